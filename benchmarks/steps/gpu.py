"""Milliseconds on a GPU: the tests that need one, whole steps, workarounds, and the floor.

    PYTHONPATH=src python3 -m benchmarks.steps.gpu --minutes 8 --out DIR
    PYTHONPATH=src python3 -m benchmarks.steps.gpu --small --out DIR    # small models, any device

Only JAX, Optax and pytest are needed. Every row is printed and written to DIR as soon as it is
measured, the most important first, so that a run that is cut off leaves valid results. Compiled
programs are kept in DIR/cache: a second call starts warm. Steps that share a counterpart are timed
in turn with it and with a step that has only the loss, the gradient and AdamW ("nothing"),
A B C A B C, in one process; the ratios are medians over neighbours in time. The row "nothing" is
this step beside itself, and shows the error of the ratios.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import _report
from benchmarks._measure import Case, Timing, compiled_together, interleaved
from benchmarks._models import Model, gpt, ppo, resnet
from benchmarks._rows import EVERY, NOTHING, OPTAX, PER_EXAMPLE, ROWS, Maker, case_of
from benchmarks.compiled import _hlo
from benchmarks.steps import _floor, _workarounds

TESTS = "tests/integration/test_gpu.py"
SCANNED = 64
"""Number of steps of PPO in one jitted `scan`, as its training loops are written."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model, and how its steps are timed.

    Attributes:
        title: name of the model in the tables.
        make: makes the model.
        scanned: number of steps inside one jitted `scan`, which is timed as a whole.
    """

    title: str
    make: Callable[[], Model]
    scanned: int = 1


SETTINGS = (
    Setting("GPT-2 124M", lambda: gpt(12, 768, 50257, 32, 1024, scan=True)),
    Setting("PPO in a scan", ppo, SCANNED),
    Setting("ResNet-50", lambda: resnet((3, 4, 6, 3), 64, 128, 224, 1000)),
)
SMALL = (
    Setting("GPT-2 124M", lambda: gpt(2, 64, 512, 8, 16, scan=True)),
    Setting("PPO in a scan", lambda: ppo(batch=16), EVERY),
    Setting("ResNet-50", lambda: resnet((1,), 32, 8, 16, 10)),
)
# Steps with the same counterpart stand together, and are timed together.
STEPS = {
    "clip": "clip_by_global_norm",
    "watch": "watch(clip)",
    "clip, guard": "skip_nonfinite(clip)",
    "guard": "skip_nonfinite",
    'guard, check="step"': 'skip_nonfinite(check="step")',
    "accumulation": "accumulate_gradients(clip)",
    "agc": "adaptive_grad_clip",
}


def groups() -> list[tuple[str, Maker, dict[str, Maker]]]:
    """For each counterpart its name, the counterpart, and our steps."""
    found = [(NOTHING, OPTAX[NOTHING], {NOTHING: OPTAX[NOTHING]})]
    for theirs, labels in itertools.groupby(STEPS, lambda label: ROWS[STEPS[label]].theirs):
        found.append((theirs, OPTAX[theirs], {name: ROWS[STEPS[name]].ours for name in labels}))
    aggregate = "differentially_private_aggregate"
    return [*found, (aggregate, PER_EXAMPLE["Optax"], {"per-example": PER_EXAMPLE["ours"]})]


@functools.cache
def model_of(setting: Setting) -> Model:
    """The model of a setting, made once."""
    return setting.make()


def compile_steps(setting: Setting) -> tuple[()]:
    """Compile all steps of a model in parallel, into JAX's cache."""
    model = model_of(setting)
    makers: dict[str, Maker] = {}
    for theirs, counterpart, ours in groups():
        makers |= {theirs: counterpart} | ours
    compiled_together({name: case_of(model, x, setting.scanned) for name, x in makers.items()})
    return ()


def rows_of(
    setting: Setting, theirs: str, counterpart: Maker, ours: dict[str, Maker]
) -> _report.Rows:
    """One row for each of our steps that share a counterpart, two for an accumulation."""
    windows, scanned = theirs.startswith("MultiSteps"), setting.scanned
    # Two keys of one step, so that it is also timed beside itself.
    makers = {"beside": OPTAX[NOTHING], "Optax": counterpart} | ours
    cases = {name: case_of(model_of(setting), make, scanned) for name, make in makers.items()}
    phased = windows and scanned == 1  # each micro-step is timed: which one emits is known
    repetitions, warmup = (7 * EVERY, EVERY) if phased else (21, 1)
    found = interleaved(cases, repetitions, warmup=warmup)
    position = np.arange(repetitions) % EVERY
    phases = {", held": position < EVERY - 1, ", emitting": position == EVERY - 1}
    rows = []
    for name in ours:
        for phase, chosen in phases.items() if phased else [("", slice(None))]:
            timings = [found[x].of(chosen) for x in (name, "Optax", "beside")]
            rows.append(
                {"what": name + phase, "Optax's counterpart": theirs} | row_of(*timings, scanned)
            )
    return rows


def row_of(ours: Timing, theirs: Timing, nothing: Timing, steps: int) -> dict[str, str]:
    """The figures of one row; `steps` is the number of steps in a repetition."""

    def beside(value: Callable[[Timing], Any]) -> str:
        return " / ".join(str(value(x)) for x in (ours, theirs, nothing))

    return {
        "ms, ours / Optax / nothing": beside(lambda x: f"{1e3 * x.median / steps:.4g}"),
        "to Optax": f"{np.median(ours.seconds / theirs.seconds):.3f}",
        "to nothing": f"{np.median(ours.seconds / nothing.seconds):.3f}",
        "spread": beside(lambda x: f"{x.spread:.1%}"),
        "peak GiB": beside(lambda x: f"{x.peak_bytes / 2**30:.3g}"),
        "host stops": beside(lambda x: _hlo.analyse(x.text).stops),
    }


@functools.cache
def workaround_cases(setting: Setting) -> dict[tuple[str, str], dict[str, Case]]:
    """For each workaround and its step, the step as it is and with each alternative."""
    found: dict[tuple[str, str], dict[str, Case]] = {}
    for name, row, replacements in _workarounds.ALL:
        for label, replacement in {"now": {}, **replacements}.items():
            with _workarounds.replaced(replacement):
                case = case_of(model_of(setting), ROWS[row].ours, setting.scanned)
                # Traced here, because the replacement ends before the program is compiled.
                traced = jax.jit(case.step).trace(jax.eval_shape(case.carry), *case.args)
                step = _workarounds.retraced(traced)
                found.setdefault((name, row), {})[label] = dataclasses.replace(case, step=step)
    return found


def workaround_rows(setting: Setting, name: str, row: str) -> Iterator[dict[str, str]]:
    """For each alternative of a workaround, the milliseconds of a step with and without it."""
    cases, repetitions = workaround_cases(setting)[name, row], 21 if setting.scanned == 1 else 9
    times = interleaved(cases, EVERY * 3 if "accumulate" in row else repetitions)
    # The mean, because in an accumulation one step in a window is longer.
    ms = {label: 1e3 * np.mean(x.seconds) / setting.scanned for label, x in times.items()}
    for label in list(cases)[1:]:
        yield {
            "what": f"{name}, {row}: {label}",
            "ms now / instead": f"{ms['now']:.4g} / {ms[label]:.4g}",
            "worth": f"{ms[label] / ms['now'] - 1:+.1%}",
        }


def driver() -> str:
    """The version of the NVIDIA driver, or "none"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def run_tests(*, small: bool) -> int:
    """Run the tests of a GPU, at most 90 s, without the plugins of the suite."""
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", *["-m", "not gpu"] * small]
    command = ["timeout", "90", sys.executable, "-m", "pytest", *options, TESTS]
    return subprocess.run(command, check=False).returncode


def main() -> None:
    """Run the tests, the steps, the floor and the workarounds, in this order."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small models, on any device")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no row later (8)")
    parser.add_argument("--out", type=pathlib.Path, default=_report.RESULTS, help="folder to write")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--parts", default="tests,steps,floor,workarounds", help="what to run")
    parser.add_argument("--commit", default=None, help="commit of the library, without git")
    options = parser.parse_args()
    # The tests run before this process allocates the memory of the GPU.
    status = run_tests(small=options.small) if "tests" in options.parts else 0
    if jax.default_backend() != "gpu" and not options.small:
        parser.error(f"JAX finds no GPU, only {jax.devices()}; --small runs on any device")
    jax.config.update("jax_compilation_cache_dir", str(options.out / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    facts = {"driver": driver(), "commit": options.commit or _report.commit()}
    settings = [x for x in (SMALL if options.small else SETTINGS) if options.only in x.title]

    def add(section: str, what: str, rows: Callable[[], Iterable[dict[str, str]]]) -> None:
        if time.monotonic() - start > 60 * options.minutes:
            print(f"| {section}: {what}: not run, out of time |", flush=True)
            return
        try:
            for row in rows():
                print(f"| {section}: " + " | ".join(row.values()) + " |", flush=True)
                _report.write({section: [row]}, "GPU steps", folder=options.out, **facts)
        except Exception as error:  # out of memory: the rows that follow are still of use
            print(f"| {section}: {what}: {str(error)[:500]} |", flush=True)

    for setting in settings if "steps" in options.parts else ():
        add(setting.title, "compilation", functools.partial(compile_steps, setting))
        for theirs, counterpart, ours in groups():
            measure = functools.partial(rows_of, setting, theirs, counterpart, ours)
            add(setting.title, ", ".join(ours), measure)
    if "floor" in options.parts:
        add("A clip and AdamW alone", "floor", functools.partial(_floor.rows, small=options.small))
    for setting in settings if "workarounds" in options.parts else ():
        for name, row, _ in _workarounds.ALL[: 1 if options.small else None]:
            measure = functools.partial(workaround_rows, setting, name, row)
            add(f"Workarounds, {setting.title}", name, measure)
    sys.exit(status)


if __name__ == "__main__":
    main()
