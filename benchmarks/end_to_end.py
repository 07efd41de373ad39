"""Tokens per second of the example GPT, with our accumulation and with that of Optax.

The same model, data and steps, in turn: small micro-batches, so that what a hold step costs is
seen beside forward and backward.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import _report
import numpy as np

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "sharded_transformer.py"
CHOICES = {"gcx.accumulate_gradients": "gcx", "optax.MultiSteps": "multisteps"}


def tokens_per_second(accumulation: str, options: argparse.Namespace) -> float:
    """One training run in a process of its own, compilation left out."""
    with tempfile.TemporaryDirectory() as folder:
        summary = pathlib.Path(folder) / "summary.json"
        sizes = {"layers": options.layers, "width": options.width, "length": options.length}
        words = [f"--{name}={value}" for name, value in sizes.items()]
        words += [f"--steps={options.steps}", "--every=8", "--micro-batches=1", "--data=1"]
        words += [f"--batch-size={options.batch_size}", "--no-guard"]
        words += [f"--accumulation={accumulation}", f"--summary={summary}"]
        command = [sys.executable, str(EXAMPLE), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(summary.read_text())["tokens_per_second"]


def main() -> None:
    """Runs both in turn and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks (6)")
    parser.add_argument("--width", type=int, default=512, help="of the residual stream (512)")
    parser.add_argument("--length", type=int, default=64, help="characters in a stretch (64)")
    parser.add_argument("--batch-size", type=int, default=1, help="stretches in a micro-batch (1)")
    parser.add_argument("--steps", type=int, default=65, help="micro-batches (65)")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, printed only")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.width, options.steps, options.repetitions = 1, 32, 9, 1
    speeds: dict[str, list[float]] = {name: [] for name in CHOICES}
    for _ in range(options.repetitions):
        for name, choice in CHOICES.items():
            speeds[name].append(tokens_per_second(choice, options))
            print(f"{name}: {speeds[name][-1]:,.0f} tokens per second", flush=True)
    ours = np.median(speeds["gcx.accumulate_gradients"])
    rows: _report.Rows = [
        {
            "what": name,
            "tokens per second": f"{np.median(found):,.0f}",
            "ours is faster by": round(float(ours / np.median(found)), 2),
        }
        for name, found in speeds.items()
    ]
    title = (
        f"GPT of {options.layers} layers, width {options.width}: windows of 8 micro-batches "
        f"of {options.batch_size} x {options.length} tokens"
    )
    print(f"\n{title}\n{_report.table(rows)}")
    if not (options.no_write or options.quick):
        print(f"\nwritten to {_report.write({title: rows}, 'end to end')}")


if __name__ == "__main__":
    main()
