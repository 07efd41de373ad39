"""Draw docs/images/steps_*.svg: the cost of clips, guards and accumulations in a step.

The charts depend on results/steps-compiled*.json alone. Their background is transparent.
"""

import argparse
import pathlib
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from benchmarks import _report
from benchmarks._rows import ROWS
from benchmarks.compiled.steps import all_records

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"
MODEL = "PPO"
DEVICES = {"H100": "an H100", "TPU v5e": "a TPU v5e", "CPU": "a CPU"}
STEPS = {
    "clip_by_global_norm": "clip by global norm",
    "adaptive_grad_clip": "adaptive_grad_clip",
    "skip_nonfinite": "guard",
    "skip_nonfinite(clip)": "guard and clip",
    "accumulate_gradients(clip)": "micro-step, accumulation",
    "skip_nonfinite(accumulate_gradients(clip))": "micro-step, guarded accumulation",
}
COLOURS = {"gradclip_jax": "#d9541e", "Optax": "#607d8b"}


def bars(records: dict[str, Any], device: str) -> dict[str, tuple[float, float]]:
    """For each step the bytes that ours and Optax's move beyond AdamW alone, in percent of it."""
    alone = records[f"{device}: {MODEL}: optax AdamW alone"]["phases"][""]["bytes, N"]
    found = {}
    for name, label in STEPS.items():
        row, phase = ROWS[name], "held" if ROWS[name].accumulates else ""
        pair = (f"gcx {name}", f"optax {row.theirs}")
        moved = [records[f"{device}: {MODEL}: {x}"]["phases"][phase]["bytes, N"] for x in pair]
        found[label] = (100 * (moved[0] / alone - 1), 100 * (moved[1] / alone - 1))
    return found


def words(percent: float) -> str:
    """As it is written beside a bar."""
    return f"{percent:+.1f}"


def draw(found: dict[str, tuple[float, float]], device: str, path: pathlib.Path) -> None:
    """One chart, as an SVG whose bytes depend on nothing but the numbers."""
    matplotlib.rcParams |= _report.THEME | {"svg.hashsalt": device, "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for offset, (label, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
        extra = [pair[list(COLOURS).index(label)] for pair in found.values()]
        places = [i + offset for i in range(len(found))]
        drawn = axes.barh(places, extra, height=0.38, color=colour, label=label)
        axes.bar_label(drawn, [words(percent) for percent in extra], padding=3, fontsize=8)
    axes.axvline(0, color="#808080", linewidth=1, label="only AdamW")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("additional memory traffic, percent of the step with only AdamW")
    axes.set_title(f"PPO's two networks, compiled for {DEVICES[device]}", fontsize=10)
    figure.legend(fontsize=8, loc="outside upper left", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def path_of(device: str) -> pathlib.Path:
    """Where the chart of a device is."""
    return IMAGES / f"steps_{device.lower().replace(' ', '_')}.svg"


def main() -> None:
    """Draws all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="print the numbers only")
    quick = parser.parse_args().quick
    matplotlib.use("svg")
    records = all_records()
    for device in DEVICES:
        extra = bars(records, device)
        print(f"{path_of(device).name}: {extra}")
        if not quick:
            draw(extra, device, path_of(device))


if __name__ == "__main__":
    main()
