"""CPU time of tracing and compiling whole training steps on this machine: ours beside Optax's.

    python -m benchmarks.steps.compile_time             # two minutes on two cores
    python -m benchmarks.steps.compile_time --quick     # a small network, printed only

Two tables: the time to trace a step of PPO, for every step of `_rows.py`; and the time to trace and
compile a step of a network of 150 layers, which has 300 leaves.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import _report
from benchmarks._models import Model, deep, ppo
from benchmarks._rows import OPTAX, ROWS, Maker

CLIPS = (
    "clip_by_global_norm",
    "clip_by_leaf_norm",
    "clip_by_block_rms",
    "adaptive_grad_clip",
    "adagc",
)
TRACE, COMPILE = "trace, ms", "trace + compile, s"


def trace(make: Maker, model: Model) -> Any:
    """A step, traced as its first call would trace it."""
    jax.clear_caches()
    step = make(model)
    args = (model.params, step.state(model.params), model.batch)
    return jax.jit(step.run, donate_argnums=(0, 1)).trace(*args)


def compile_step(make: Maker, model: Model) -> Any:
    """A step, traced and compiled."""
    return trace(make, model).lower().compile()


def cpu_seconds(function: Callable[..., Any], *args: Any) -> float:
    """CPU time of one call, of all threads."""
    start = time.process_time()
    function(*args)
    return time.process_time() - start


def compare(
    function: Callable[[Maker, Model], Any], model: Model, name: str, unit: str, repetitions: int
) -> dict[str, Any]:
    """One row: medians of alternating calls, and the median of their ratios."""
    row = ROWS[name]
    pair = (row.ours, OPTAX[row.theirs])
    found = [[cpu_seconds(function, make, model) for make in pair] for _ in range(repetitions)]
    scale = 1e3 if unit == TRACE else 1.0
    ours, theirs = scale * np.median(found, 0)
    ratio = float(np.median([a / b for a, b in found]))
    return {
        "what": f"{name} / optax {row.theirs}",
        unit: f"{ours:.3g} / {theirs:.3g}",
        "ratio": f"{ratio:.2f}",
    }


def main() -> None:
    """Print both tables and write the results of this device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 layers, one round, printed only")
    quick = parser.parse_args().quick
    compile_step(OPTAX["AdamW alone"], ppo())  # starts the compiler
    network = deep(5 if quick else 150)
    leaves = len(jax.tree.leaves(network.params))
    cases = [(f"PPO: {TRACE}", trace, ppo(), name, TRACE, 1 if quick else 9) for name in ROWS]
    title = f"a network of {leaves} leaves: {COMPILE}"
    cases += [(title, compile_step, network, name, COMPILE, 1 if quick else 2) for name in CLIPS]
    sections: dict[str, _report.Rows] = {}
    for title, *case in cases:
        row = compare(*case)
        sections.setdefault(title, []).append(row)
        print(f"{title} | " + " | ".join(row.values()), flush=True)
    if not quick:
        _report.write(sections, "compile time", commit=_report.commit())


if __name__ == "__main__":
    main()
