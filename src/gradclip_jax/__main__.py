"""Print the incidents in a training log and a summary, and plot the log."""

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

import jax

from .diagnostics import plot_log, read_log


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is in a log; return 1 if it cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m gradclip_jax", description=__doc__)
    parser.add_argument("log", help="JSON lines, CSV, trainer_state.json, or a text file")
    parser.add_argument("--prefix", help="start of the keys of one of several runs, such as g/")
    args = parser.parse_args(arguments)
    try:
        monitor = read_log(args.log, prefix=args.prefix)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    # The first and the last incident of each streak, and each NaN that begins inside it.
    found = monitor.incidents
    for i, incident in enumerate(found):
        is_last = i + 1 == len(found) or found[i + 1].streak == 1
        is_new_nan = "nan" in {*incident.kinds} - {*found[i - 1].kinds}
        if incident.streak == 1 or is_last or is_new_nan:
            print(incident)
    print("", monitor.summary(), sep="\n")
    if importlib.util.find_spec("matplotlib"):
        path = f"{pathlib.Path(args.log).stem}_incidents.png"
        plot_log(monitor).savefig(path)
        print(f"plot: {path}")
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # leave the memory of a GPU to the training
    sys.exit(main())
