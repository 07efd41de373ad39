"""Print the incidents in a training log and a summary, and plot the log."""

import argparse
import importlib.util
import io
import os
import pathlib
import sys
from collections.abc import Sequence

import jax

from .diagnostics import plot_log, read_log

_EXAMPLE = """example:
  python -m gradclip_jax train.log

  prints for example
    step 201: applied, gradient norm 40 (threshold 5); loss 9 (threshold 2.8)
  and writes train_incidents.png, which requires matplotlib
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report on a log; return 1 if it cannot be read or if the output was closed."""
    parser = argparse.ArgumentParser(
        prog="python -m gradclip_jax",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", help="JSON lines, JSON, CSV, trainer_state.json, or a text file")
    parser.add_argument("--prefix", help="start of the keys of one of several runs, such as g/")
    args = parser.parse_args(arguments)
    try:
        _report(args.log, args.prefix)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        # Otherwise, Python would write the rest when it exits, and print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        print(_printable(f"{parser.prog}: {error}"), file=sys.stderr)
        return 1
    return 0


def _report(log: str, prefix: str | None) -> None:
    """Print incidents and a summary, and write the plot."""
    monitor = read_log(log, prefix=prefix)
    # Print only the first and the last incident of a streak, and every incident at which NaN values
    # appear.
    found = monitor.incidents
    for i, incident in enumerate(found):
        is_last = i + 1 == len(found) or found[i + 1].streak == 1
        is_new_nan = "nan" in {*incident.kinds} - {*found[i - 1].kinds}
        if incident.streak == 1 or is_last or is_new_nan:
            print(_printable(str(incident)))
    print("", _printable(monitor.summary()), sep="\n")
    if importlib.util.find_spec("matplotlib"):
        path = f"{pathlib.Path(log).stem}_incidents.png"
        plot_log(monitor).savefig(path)
        print(f"plot: {path}")


def _printable(text: str) -> str:
    """Replace control characters, which a log may contain, by spaces."""
    return "".join(x if x.isprintable() or x == "\n" else " " for x in text)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # leave GPU memory to the training run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    sys.exit(main())
