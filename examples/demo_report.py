"""What the demo says about its runs: a table, a sentence or two, CSV, JSON and a plot."""

import csv
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

STYLES = {  # colour, line and width: the last two runs lie on each other
    "no clipping": ("#d55e00", "-", 2.0),
    "clipping": ("#56b4e9", "-", 4.0),
    "clipping + accumulation": ("black", ":", 1.5),
}


class Run(NamedTuple):
    """What one training run left behind; the arrays have one entry per optimizer step."""

    name: str
    micro_batches: int
    bits: np.ndarray
    grad_norm: np.ndarray
    clip_factor: np.ndarray
    seconds: float
    scratch_mib: float | None


# What came out, in numbers


def smooth(bits: np.ndarray) -> np.ndarray:
    """The mean of the last 5% of the steps, at each step that has so many before it."""
    window = max(1, len(bits) // 20)
    return np.lib.stride_tricks.sliding_window_view(bits, window).mean(axis=1)


def summarise(run: Run) -> dict[str, Any]:
    smoothed = smooth(run.bits)
    return {
        "final_bits": smoothed[-1],
        "best_bits": min(smoothed, key=lambda bits: (math.isnan(bits), bits)),
        "nonfinite_steps": int((~np.isfinite(run.bits)).sum()),
        "max_grad_norm": max(run.grad_norm, key=lambda norm: (not math.isnan(norm), norm)),
        "fraction_clipped": float((run.clip_factor < 1).mean()),
        "ms_per_step": 1e3 * run.seconds / len(run.bits),
        "scratch_mib": run.scratch_mib,
    }


def verdict(runs: list[Run]) -> list[str]:
    """What the numbers say, whichever way they fell."""
    bare, clipped, accumulated = runs
    start = bare.bits[0]
    without, with_clip, summed = (summarise(run)["final_bits"] for run in runs)
    if not with_clip < 0.9 * start:  # also where it is NaN
        first = "With clipping too the run did not train: try a lower learning rate"
    elif not without < 0.9 * start:
        first = "Without clipping the run did not train; with clipping it did"
    elif without > 1.05 * with_clip:
        first = "Both trained, with clipping better"
    elif with_clip > 1.05 * without:
        first = "Both trained, without clipping better"
    else:
        first = "Both trained, and the gap is small: try a higher learning rate"
    first += (
        f". Bits per character: {start:.2f} at the start; at the end {without:.2f} without "
        f"clipping, {with_clip:.2f} with it."
    )
    apart = np.flatnonzero(~(np.abs(clipped.bits - accumulated.bits) <= 0.01))
    together = apart[0] if apart.size else len(clipped.bits)
    second = (
        f"One batch or {accumulated.micro_batches} micro-batches: the losses agree to 0.01 bits "
        f"for the first {together} of {len(clipped.bits)} steps, and end at {with_clip:.2f} and "
        f"{summed:.2f}."
    )
    if clipped.scratch_mib and accumulated.scratch_mib:
        ratio = accumulated.scratch_mib / clipped.scratch_mib
        second += f" Scratch memory: {ratio:.0%} of that of one batch."
    return [first, second]


def table(runs: list[Run]) -> str:
    head = ("", "final", "best", "lost", "largest", "steps", "time per", "scratch")
    under = ("", "bits/char", "bits/char", "steps", "norm", "clipped", "step", "memory")
    lines = [head, under]
    for run in runs:
        found = summarise(run)
        lines.append(
            (
                run.name,
                f"{found['final_bits']:.3f}",
                f"{found['best_bits']:.3f}",
                f"{found['nonfinite_steps']}",
                f"{found['max_grad_norm']:.3g}",
                f"{found['fraction_clipped']:.0%}",
                f"{found['ms_per_step']:.1f} ms",
                f"{found['scratch_mib']:.1f} MiB" if run.scratch_mib else "unknown",
            )
        )
    texts = [f"{name:24}" + "".join(f"{cell:>11}" for cell in cells) for name, *cells in lines]
    return "\n".join([*texts[:2], "-" * len(texts[0]), *texts[2:]])


# What came out, in files


def write_csv(path: Path, runs: list[Run]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("run", "step", "bits_per_character", "grad_norm", "clip_factor"))
        for run in runs:
            columns = (run.bits, run.grad_norm, run.clip_factor)
            for step, values in enumerate(zip(*columns, strict=True), start=1):
                writer.writerow((run.name, step, *(f"{value:.7g}" for value in values)))


def write_json(path: Path, runs: list[Run], settings: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:  # JSON has no NaN and no infinity
        return value if not isinstance(value, float) or math.isfinite(value) else None

    summaries = {
        run.name: {name: plain(value) for name, value in summarise(run).items()} for run in runs
    }
    versions = {module.__name__: module.__version__ for module in (jax, flax, optax)}
    found = {
        "settings": settings,
        "versions": versions,
        "runs": summaries,
        "verdict": verdict(runs),
    }
    path.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def plot(path: Path, runs: list[Run], max_norm: float) -> None:
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for run in runs:
        color, line, width = STYLES[run.name]
        steps, smoothed = np.arange(1, len(run.bits) + 1), smooth(run.bits)
        top.plot(steps, run.bits, color=color, alpha=0.3, linewidth=0.7)
        late = steps[-len(smoothed) :]
        top.plot(late, smoothed, line, color=color, linewidth=width, label=run.name)
        bottom.plot(steps, run.grad_norm, line, color=color, linewidth=width / 2)
    marks = (top, runs[0].bits[0], "untrained"), (bottom, max_norm, f"max norm {max_norm:g}")
    for axes, height, words in marks:
        axes.axhline(height, color="black", linewidth=1)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(words, (1, height), (0, 5), ha="right", fontsize=9, bbox=white, **place)
        axes.spines[["top", "right"]].set_visible(False)
    top.set(yscale="log", ylabel="bits per character", title="Character-level tanh RNN, plain SGD")
    bottom.set(yscale="log", ylabel="gradient norm before clipping", xlabel="optimizer step")
    top.yaxis.set_major_locator(LogLocator(base=2, subs=[1]))
    top.yaxis.set_major_formatter("{x:g}")
    top.minorticks_off()
    window = len(runs[0].bits) - len(smooth(runs[0].bits)) + 1
    title = f"thick: mean of the last {window} steps; faint: each step"
    top.set_ylim(top=4 * top.get_ylim()[1])  # room for the legend
    top.legend(frameon=False, loc="upper right", ncols=3, title=title)
    figure.savefig(path, dpi=110)


def write_files(folder: Path, runs: list[Run], settings: dict[str, Any]) -> None:
    write_csv(folder / "demo.csv", runs)
    write_json(folder / "demo.json", runs, settings)
    plot(folder / "demo.png", runs, settings["max_norm"])
