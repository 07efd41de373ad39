"""Time, FLOPs and scratch of per-example clipping on this CPU, for models of five kinds.

    python benchmarks/per_example_models.py

Each row is one model: the ordinary gradient, `per_example.value_and_grad`, and every gradient
written down. Ratios are to the ordinary gradient; time is that of the processor, of all threads,
the median of rounds that take the programs in turn.
"""

import argparse
import json
import time
from typing import Any

import _per_example
import _report
import jax
import numpy as np
from _per_example_models import MODELS

ROUNDS = 9


def measured(model: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """One row: the programs of a model, compiled and run in turn."""
    loss, params, batch = MODELS[model]()
    compiled: dict[str, Any] = {}
    for name, program in _per_example.PROGRAMS.items():
        run = jax.jit(lambda params, batch, program=program: program(params, batch, loss))
        compiled[name] = run.lower(params, batch).compile()
        jax.block_until_ready(compiled[name](params, batch))
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, run in compiled.items():
            start = time.process_time()
            jax.block_until_ready(run(params, batch))
            times[name].append(time.process_time() - start)
    base = compiled["ordinary"]
    row: dict[str, Any] = {"what": model}
    for name, run in compiled.items():
        seconds = float(np.median(times[name]))
        row[f"{name}: CPU ms"] = round(1e3 * seconds)
        if name != "ordinary":
            row[f"{name}: time"] = round(seconds / float(np.median(times["ordinary"])), 2)
            flops = run.cost_analysis()["flops"] / base.cost_analysis()["flops"]
            row[f"{name}: FLOPs"] = round(flops, 2)
            scratch = [x.memory_analysis().temp_size_in_bytes for x in (run, base)]
            row[f"{name}: scratch"] = round(scratch[0] / scratch[1], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, one round, printed only")
    options = parser.parse_args()
    rows = []
    for model in list(MODELS)[-1:] if options.quick else MODELS:
        rows.append(measured(model, 1 if options.quick else ROUNDS))
        print(json.dumps(rows[-1]), flush=True)
    if not options.quick:
        _report.write({"Models of five kinds": rows}, "per example, models")


if __name__ == "__main__":
    main()
