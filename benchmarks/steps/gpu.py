"""Run the GPU tests, then time whole training steps on a GPU: ours beside Optax's.

    make gpu                       # at most 20 minutes
    make gpu GPU_ARGS=--small      # small models on any device, for instance a CPU; writes nothing

Steps are timed in turn, A B A B, in one process: medians in milliseconds, and the median ratio.
Host stops are the conditionals and the loops of zero or one trip in the compiled program: the host
waits for the predicate of each. Steps with the same counterpart share one run of it.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _report
from benchmarks._measure import Case, interleaved
from benchmarks._models import Model, gpt, ppo, resnet
from benchmarks._rows import EVERY, OPTAX, PER_EXAMPLE, ROWS, Maker
from benchmarks.compiled import _hlo

MODELS: dict[str, Callable[[], Model]] = {
    "PPO": ppo,
    "GPT-2 124M": lambda: gpt(12, 768, 50257, 8, 1024, scan=True),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), 64, 32, 224, 1000),
}
SMALL: dict[str, Callable[[], Model]] = {
    "PPO": lambda: ppo(batch=16),
    "GPT": lambda: gpt(2, 64, 512, 8, 16, scan=True),
    "ResNet": lambda: resnet((1,), 32, 8, 16, 10),
}
# Steps with the same counterpart stand together, and are timed together.
STEPS = {
    "clip": "clip_by_global_norm",
    "watch": "watch(clip)",
    "agc": "adaptive_grad_clip",
    "guard": "skip_nonfinite",
    'guard, check="step"': 'skip_nonfinite(check="step")',
    "accumulation": "accumulate_gradients(clip)",
}


def groups() -> list[tuple[str, Maker, dict[str, Maker]]]:
    """For each counterpart its name, the counterpart, and our steps."""
    found = []
    for theirs, labels in itertools.groupby(STEPS, lambda label: ROWS[STEPS[label]].theirs):
        found.append((theirs, OPTAX[theirs], {name: ROWS[STEPS[name]].ours for name in labels}))
    aggregate = "differentially_private_aggregate"
    return [*found, (aggregate, PER_EXAMPLE["Optax"], {"per-example": PER_EXAMPLE["ours"]})]


def rows_of(
    model: Model, theirs: str, counterpart: Maker, ours: dict[str, Maker], repetitions: int
) -> _report.Rows:
    """One row for each of our steps that share a counterpart."""
    params, batch = model.arrays()

    def case(make: Maker) -> Case:
        step = make(model)

        def carry() -> Any:
            return jax.tree.map(jnp.copy, (params, step.tx.init(params)))

        return Case(lambda carry, batch: step.run(*carry, batch)[:2], carry, (batch,))

    group = EVERY if theirs.startswith("MultiSteps") or model.size < 1 << 20 else 1
    cases = {"Optax": counterpart} | ours
    found = interleaved({name: case(make) for name, make in cases.items()}, repetitions, group)

    def beside(value: Callable[[Any], Any], name: str) -> str:
        return f"{value(found[name])} / {value(found['Optax'])}"

    return [
        {
            "what": name,
            "Optax's counterpart": theirs,
            "ms": beside(lambda timing: f"{1e3 * timing.median / group:.4g}", name),
            "ratio": f"{np.median(found[name].seconds / found['Optax'].seconds):.3f}",
            "spread": beside(lambda timing: f"{timing.spread:.0%}", name),
            "host stops": beside(lambda timing: host_stops(timing.text), name),
        }
        for name in ours
    ]


def host_stops(text: str) -> int:
    """Conditionals and loops of zero or one trip in a compiled program."""
    program = _hlo.analyse(text)
    return program.always.stops + sum(loop.stops for loop in program.optional)


def main() -> None:
    """Run the tests and the steps, print every row, and write the results of this device."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small models, on any device")
    parser.add_argument("--only", help="one of the models, such as PPO")
    parser.add_argument("--no-tests", action="store_true", help="without the GPU tests")
    parser.add_argument("--minutes", type=float, default=17.0, help="start no step later (17)")
    parser.add_argument("--repetitions", type=int, default=21, help="of each step (21)")
    options = parser.parse_args()
    status = 0
    if not options.no_tests:  # before this process allocates the memory of the GPU
        tests = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "gpu", "tests"]
        status = subprocess.run(tests, check=False).returncode
    if jax.default_backend() != "gpu" and not options.small:
        parser.error(f"JAX finds no GPU, only {jax.devices()}; --small runs on any device")
    sections: dict[str, _report.Rows] = {}
    with tempfile.TemporaryDirectory() as cache:  # each program is compiled once
        jax.config.update("jax_compilation_cache_dir", cache)
        models = SMALL if options.small else MODELS
        for title in [options.only] if options.only else models:
            for group in groups():
                if time.monotonic() - start > 60 * options.minutes:
                    print(f"| {title}: {', '.join(group[2])} | not run: out of time |", flush=True)
                    continue
                rows = rows_of(models[title](), *group, 3 if options.small else options.repetitions)
                sections.setdefault(title, []).extend(rows)
                for row in rows:
                    print(f"| {title}: " + " | ".join(row.values()) + " |", flush=True)
        jax.config.update("jax_compilation_cache_dir", None)
    if not options.small:
        _report.write(sections, "whole steps", commit=_report.commit())
    sys.exit(status)


if __name__ == "__main__":
    main()
