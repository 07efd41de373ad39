"""The plots of the study's page."""

from pathlib import Path

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from benchmarks.study.compare import FIXED, Entry, Losses, best_by_rate, sensitivity
from benchmarks.study.study import Record


def draw_ratios(path: Path, losses: Losses, methods: list[str], setting: str) -> None:
    """Every method beside the best fixed threshold, on every problem."""
    ratios = np.full((len(methods), len(losses.problems)), np.nan)
    cells = [(p, Entry(m, setting), FIXED) for m in methods for p in losses.problems]
    for (problem, entry, _), found in losses.compare(cells).items():
        ratios[methods.index(entry.method), losses.problems.index(problem)] = found.ratio
    # As wide as the page, where 100 pixels are an inch: the numbers have the size of its tables.
    figure = Figure(figsize=(7.6, 9), layout="constrained")
    axes = figure.subplots()
    shown = np.log2(ratios)
    image = axes.imshow(shown, cmap="RdBu_r", norm=TwoSlopeNorm(0, -1, 3), aspect="auto")
    for (i, j), ratio in np.ndenumerate(ratios):
        if np.isfinite(ratio):
            color = "white" if not -0.8 < shown[i, j] < 1.8 else "black"
            text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=7.5, color=color)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xticks(range(len(losses.problems)), losses.problems, rotation=90)
    bar = figure.colorbar(
        image, ax=axes, ticks=[-1, 0, 1, 2, 3], location="bottom", shrink=0.6, aspect=40
    )
    bar.ax.set_xticklabels(["1/2", "1", "2", "4", "8"])
    bar.set_label("test loss divided by that of the best fixed threshold")
    axes.set_title(f"Methods, {setting}: median over the seeds (blue is better, empty: not run)")
    figure.savefig(path, dpi=160)


def draw_sensitivity(path: Path, record: Record, problems: list[str], methods: list[str]) -> None:
    """Loss over the whole range of each hyperparameter."""
    columns = 4
    figure = Figure(figsize=(8.2, 1.8 * -(-len(methods) // columns)), layout="constrained")
    grid = figure.subplots(-(-len(methods) // columns), columns, sharey=True)
    for axes in grid.flat[len(methods) :]:
        axes.set_visible(False)
    for axes, method in zip(grid.flat, methods, strict=False):
        for problem in problems:
            ratios = sensitivity(record, problem, method)
            color = "#0072b2" if problem.endswith("adam") else "#d55e00"
            axes.plot(range(len(ratios)), ratios, color=color, alpha=0.6, linewidth=1)
        axes.set(title=method, yscale="log", ylim=(0.9, 60))
        axes.set_xticks(range(5), ["low", "", "", "", "high"])
        axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.supylabel("test loss divided by the lowest of its line, median of five seeds")
    figure.supxlabel("value of the hyperparameter")
    for label, color in (("a problem with SGD", "#d55e00"), ("with Adam", "#0072b2")):
        grid.flat[0].plot([], [], color=color, label=label)
    grid.flat[0].legend(fontsize=7, loc="upper center")
    figure.savefig(path, dpi=150)


STYLES = {
    "none": ("#999999", "-"),
    "fixed": ("#e69f00", "-"),
    "quantile": ("#0072b2", "--"),
    "ZClip": ("#d55e00", "-."),
    "value": ("#009e73", ":"),
    "Stable-SPAM": ("#cc79a7", "--"),
    "AGC": ("#cc79a7", "--"),
}


def draw_rates(path: Path, record: Record, problems: list[str]) -> None:
    """Loss over the learning rate, each method at its best value for each rate."""
    figure = Figure(figsize=(8.2, 3), layout="constrained")
    for axes, problem in zip(
        figure.subplots(1, len(problems), squeeze=False)[0], problems, strict=True
    ):
        for method, (color, line) in STYLES.items():
            rates, medians = best_by_rate(record, problem, method)
            if rates:
                axes.plot(rates, medians, line, marker=".", color=color, label=method)
        axes.set(title=problem, xscale="log", xlabel="learning rate", ylabel="test loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
