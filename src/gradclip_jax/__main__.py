"""Command line: incidents, a summary and a plot of a training log.

python -m gradclip_jax run.jsonl
"""

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from .diagnostics import Incident, plot_log, read_log
from .monitoring._rows import Outcome, Rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is in a log; return 1 if it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m gradclip_jax",
        description="Print the incidents in the log of a training run, a summary and suggestions, "
        "and plot it if matplotlib is installed.",
    )
    parser.add_argument("log", help="JSON lines, CSV, trainer_state.json, or a text file")
    parser.add_argument("--prefix", help="start of the keys of one of several runs, such as g/")
    parser.add_argument(
        "--pattern",
        help="regular expression for the lines of a text file, with the group `loss` and "
        "optionally `step` and `norm`",
    )
    parser.add_argument("--plot", help="default: <name of the log>_incidents.png in this folder")
    args = parser.parse_args(arguments)
    options = {"prefix": args.prefix, "pattern": args.pattern}
    try:
        monitor = read_log(args.log, **{key: x for key, x in options.items() if x is not None})
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(*_ends_of_streaks(monitor.incidents), "", sep="\n")
    print(monitor.summary(), _suggested_guard(monitor.rows), sep="\n")
    if importlib.util.find_spec("matplotlib"):
        path = args.plot or f"{pathlib.Path(args.log).stem}_incidents.png"
        plot_log(monitor).savefig(path)
        print(f"plot: {path}")
    return 0


def _ends_of_streaks(incidents: Sequence[Incident]) -> Iterator[Incident]:
    """Yield the first and the last incident of each streak."""
    for incident, following in pairwise([*incidents, None]):
        if incident and (incident.streak == 1 or not following or following.streak == 1):
            yield incident


def _suggested_guard(rows: Rows) -> str:
    """Suggest a guard that skips only norms far above the usual ones."""
    norms = rows.norms[rows.has(Outcome.HAS_GRADIENT), 0, 0]
    finite = norms[np.isfinite(norms)]
    if not np.any(finite):
        return "suggested guard: skip_nonfinite(optimizer)"
    threshold = float(f"{3 * np.percentile(finite, 99):.2g}")
    num_skipped = np.sum(~(norms <= threshold))
    skipped = f"which would have skipped {num_skipped} of {len(norms)} steps"
    return f"suggested guard: skip_large_norm(optimizer, {threshold:g}), {skipped}"


if __name__ == "__main__":
    sys.exit(main())
