"""Whole training steps on this machine: milliseconds of ours beside Optax's, and eager calls.

The steps of `compiled.py`, run in turn: A B A B. `make bench` runs it; `--only "PPO:skip_spikes"`
runs a part, `--large` the models that take a second and more for a step of a CPU.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np
import optax

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks._measure import Case, interleaved
from benchmarks._models import MODELS, Model
from benchmarks._rows import EVERY, OPTAX, ROWS, Row

SMALL = ("PPO", "scan GPT, small", "GPT, small", "conv net, small")
GOAL = 1.05  # times Optax's
_ADAMW = optax.adamw(1e-4)
EAGER = {
    "clip_by_global_norm": (gcx.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)),
    "clip_by_leaf_norm": (gcx.clip_by_leaf_norm(1.0), optax.clip_by_block_rms(1.0)),
    "adaptive_grad_clip": (gcx.adaptive_grad_clip(0.01), optax.adaptive_grad_clip(0.01)),
    "autoclip": (gcx.autoclip(), optax.clip_by_global_norm(1.0)),
    "skip_nonfinite(AdamW)": (gcx.skip_nonfinite(_ADAMW), optax.apply_if_finite(_ADAMW, 9)),
    "accumulate_gradients(AdamW)": (
        gcx.accumulate_gradients(_ADAMW, EVERY),
        optax.MultiSteps(_ADAMW, EVERY),
    ),
}


def jitted(model: Model, name: str, row: Row, repetitions: int) -> dict[str, Any]:
    """One line of a model: milliseconds of a step, or of one in a window of an accumulation."""
    params, batch = model.arrays()

    def case(maker: Any) -> Case:
        step = maker(model)

        def run(carry: Any, batch: Any) -> Any:
            return step.run(*carry, batch)[:2]

        return Case(
            run, lambda: jax.tree.map(jax.numpy.copy, (params, step.tx.init(params))), (batch,)
        )

    # A training loop does not wait for a step of a millisecond before it starts the next.
    group = EVERY if row.accumulates or model.size < 1 << 20 else 1
    cases = {"ours": case(row.ours), "Optax": case(OPTAX[row.theirs])}
    found = interleaved(cases, repetitions, group)
    ratio = float(np.median(found["ours"].seconds / found["Optax"].seconds))
    return {
        "what": f"{name} / optax {row.theirs}",
        "ms": _beside(*(1e3 * found[who].median / group for who in cases)),
        "ratio": _marked(ratio),
        "spread": f"{found['ours'].spread:.0%} / {found['Optax'].spread:.0%}",
    }


def eager(model: Model, name: str, repetitions: int) -> dict[str, Any]:
    """One line of calls outside jit: the first of a process, and those that follow."""
    params, _ = model.arrays()
    first: list[list[float]] = [[], []]
    later: list[list[float]] = [[], []]
    for turn in range(-1, repetitions // 3):  # the first of all also starts JAX
        for which, tx in enumerate(EAGER[name]):
            state = tx.init(params)
            jax.clear_caches()
            seconds = _call_seconds(tx, params, state)
            if turn >= 0:
                first[which].append(seconds)
    for tx in EAGER[name]:
        _call_seconds(tx, params, tx.init(params))
    states = [tx.init(params) for tx in EAGER[name]]
    for _ in range(3 * repetitions):
        for which, tx in enumerate(EAGER[name]):
            later[which].append(_call_seconds(tx, params, states[which]))
    line: dict[str, Any] = {"what": f"eager, {name}"}
    for title, seconds in {"first call, ms": first, "then, ms": later}.items():
        ours, theirs = (1e3 * float(np.median(found)) for found in seconds)
        line |= {
            title: _beside(ours, theirs),
            f"ratio, {title[:5].strip()}": _marked(ours / theirs),
        }
    return line


def _call_seconds(tx: Any, params: Any, state: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(tx.update(params, state, params))
    return time.perf_counter() - start


def _beside(ours: float, theirs: float) -> str:
    return f"{ours:.3g} / {theirs:.3g}"


def _marked(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio > GOAL else f"{ratio:.2f}"


def main() -> None:
    """Runs what is chosen and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="steps with this in `model:step`")
    parser.add_argument("--large", action="store_true", help="all models")
    parser.add_argument("--repetitions", type=int, default=31, help="of each step (31)")
    parser.add_argument("--quick", action="store_true", help="PPO, three times, printed only")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 3
    titles = SMALL[:1] if options.quick else MODELS if options.large else SMALL
    sections: dict[str, _report.Rows] = {}

    def add(section: str, line: dict[str, Any]) -> None:
        sections.setdefault(section, []).append(line)
        print(f"{section} | " + " | ".join(map(str, line.values())), flush=True)
        if not (options.quick or options.no_write):
            _report.write(sections, "whole steps", commit=_report.commit())

    for title in titles:
        for name, row in ROWS.items():
            if options.only in f"{title}:{name}":
                add(
                    f"{title}: ours / Optax",
                    jitted(MODELS[title](), name, row, options.repetitions),
                )
        for name in EAGER if title == "PPO" else ():
            if options.only in f"{title}:eager {name}":
                add(
                    f"{title}, eager: ours / Optax",
                    eager(MODELS[title](), name, options.repetitions),
                )


if __name__ == "__main__":
    main()
