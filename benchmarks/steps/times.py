"""Milliseconds of whole training steps on this CPU: ours, Optax's, and one with nothing.

    python -m benchmarks.steps.times --only "PPO:skip_spikes"    # one step

The steps are those of `benchmarks.compiled.steps`, run in turn: A B C A B C. They are milliseconds
of CPU time of all threads, which hardly depend on what else the machine does. The row "nothing" is
this step beside itself, and shows the error of the ratios.
"""

import argparse
import time
from typing import Any

import numpy as np

from benchmarks import _report
from benchmarks._measure import interleaved
from benchmarks._models import MODELS, Model
from benchmarks._rows import EVERY, NOTHING, OPTAX, ROWS, Row, case_of

SMALL = ("PPO", "scan GPT, small", "GPT, small", "conv net, small")
GOAL = 1.05  # times Optax's


def jitted(model: Model, name: str, row: Row, repetitions: int) -> dict[str, Any]:
    """One line of a model: milliseconds of a step, or of one in a window of an accumulation."""
    # A training loop does not wait for a step of a millisecond before it starts the next.
    group = EVERY if row.accumulates or model.size < 1 << 20 else 1
    makers = {"ours": row.ours, "Optax": OPTAX[row.theirs], NOTHING: OPTAX[NOTHING]}
    cases = {who: case_of(model, make) for who, make in makers.items()}
    found = interleaved(cases, repetitions, group, clock=time.process_time)
    times = {who: timing.seconds for who, timing in found.items()}
    ratio = float(np.median(times["ours"] / times["Optax"]))
    return {
        "what": f"{name} / optax {row.theirs}",
        "CPU ms": " / ".join(f"{1e3 * x.median / group:.3g}" for x in found.values()),
        "ratio": f"**{ratio:.2f}**" if ratio > GOAL else f"{ratio:.2f}",
        "to nothing": f"{np.median(times['ours'] / times[NOTHING]):.2f}",
        "spread": " / ".join(f"{x.spread:.0%}" for x in found.values()),
    }


def main() -> None:
    """Runs what is chosen and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="steps with this in `model:step`")
    parser.add_argument("--repetitions", type=int, default=31, help="of each step (31)")
    parser.add_argument("--quick", action="store_true", help="PPO, three times, printed only")
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 3
    sections: dict[str, _report.Rows] = {}

    def add(section: str, line: dict[str, Any]) -> None:
        sections.setdefault(section, []).append(line)
        print(f"{section} | " + " | ".join(map(str, line.values())), flush=True)
        if not options.quick:
            _report.write(sections, "whole steps", commit=_report.commit())

    for title in SMALL[:1] if options.quick else SMALL:
        for name, row in ({NOTHING: Row(OPTAX[NOTHING], NOTHING)} | ROWS).items():
            if options.only in f"{title}:{name}":
                add(
                    f"{title}: ours / Optax / nothing",
                    jitted(MODELS[title](), name, row, options.repetitions),
                )


if __name__ == "__main__":
    main()
