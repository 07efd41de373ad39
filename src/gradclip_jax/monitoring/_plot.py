"""Plots of training runs. Matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._errors import public, value_error
from .._types import HostArray
from ._incident import Incident
from ._log import LogSource, read_lines, read_rows
from ._monitor import Monitor, logged_incidents, read_log
from ._rows import Names, Outcome, Rows

_MAX_UNITS = 40
_MAX_COLUMNS = 640  # about the pixels of a panel
_MAX_LABELS = 24
_MAX_CAPTIONS = 12


@public
def plot_log(
    log: LogSource | Monitor,
    *,
    incidents: Sequence[Incident] | None = None,
    dark: bool = False,
) -> Any:
    """Plot the loss of a training run, and heat maps with one row per leaf, layer or tap.

    The heat maps show the gradient norm and the ratio of update norm to parameter norm of at most
    40 leaves or layers, those with incidents first, and the RMS and kurtosis of the activations at
    each tap, if the log contains them. The color scale is logarithmic, from the 1st to the 99th
    percentile. Non-finite values are red and zeros are gray. A column that represents several steps
    shows their largest value. A log without norms of units is plotted as lines.

    Incidents are marked by numbered vertical lines and described below the plot.

    The figure is 900 pixels wide with a transparent background. It requires matplotlib: `pip
    install "gradclip_jax[plots]"`.

    Args:
        log: Path of a log of any trainer, its lines as dictionaries, or a monitor, whose `rows` are
            plotted.
        incidents: Incidents to mark. None marks those in the log of a `Monitor`, or those that are
            detected in another log.
        dark: Whether to use text and line colors for a dark background.

    Returns:
        A `matplotlib.figure.Figure`, which can be saved with `figure.savefig("run.png")`.

    Raises:
        ValueError: If `log` has neither a loss nor a norm.

    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"loss": 2.0, "gradient_norm/wi": 1.0, "gradient_norm/wo": 2.0}] * 3
        >>> [axes.get_title(loc="left") for axes in gcx.diagnostics.plot_log(log).axes[:2]]
        ['loss', 'gradient norm']
    """
    from matplotlib.figure import Figure

    if isinstance(log, Monitor):
        rows, names, logged = log.rows, log.names, log.incidents
    else:
        lines = read_lines(log)
        rows, names = read_rows(lines)
        is_ours = incidents is not None or any("outcome" in line for line in lines)
        logged = logged_incidents(lines) if is_ours else read_log(lines).incidents
    found = logged if incidents is None else incidents
    panels = _panels(rows, names, [x.leaf for x in found])
    if not panels:
        rule, hint = "rows with a loss or a norm", "Log `loss` and `gradient_norm`."
        raise value_error("log", rule, f"{len(rows.step)} rows without them", hint)
    captions = [f"{i}  {x}" for i, x in enumerate(found, 1)][-_MAX_CAPTIONS:]
    captions = [line for x in captions for line in textwrap.wrap(x, 140, subsequent_indent="    ")]
    color = "#dddddd" if dark else "#333333"
    heights = [1.3 if x is None else min(max(0.16 * len(x), 0.8), 4.0) for _, _, _, x in panels]
    size = 9, sum(heights) + 0.4 * len(heights) + 0.5 + 0.16 * len(captions)
    figure = Figure(size, dpi=100, layout="constrained", facecolor="none")
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, steps, values, labels) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=9, color=color)
        axis.set_facecolor("none")
        shown = [axis]
        if labels is None:
            _draw_line(axis, steps, values)
        else:
            mesh = _draw_heat_map(axis, steps, values, labels)
            shown.append(figure.colorbar(mesh, ax=axis, pad=0.01, aspect=10).ax)
        for part in shown:
            part.tick_params(labelsize=7, colors=color, which="both")
            for spine in part.spines.values():
                spine.set_color(color)
        for incident in found:
            axis.axvline(incident.step, color="tab:red", linewidth=0.8, alpha=0.7)
    place, last = axes[0].get_xaxis_transform(), -np.inf
    for i, incident in enumerate(found, 1):
        step = incident.step
        if step - last > 0.02 * np.ptp(rows.step):  # numbers do not overlap
            last = step
            axes[0].text(step, 1.02, str(i), transform=place, color="tab:red", size=7, ha="center")
    axes[-1].set_xlabel("step", fontsize=8, color=color)
    figure.supxlabel("\n".join(captions), x=0.01, ha="left", fontsize=8, color=color)
    return figure


def _panels(
    rows: Rows, names: Names, leaves: Sequence[str]
) -> list[tuple[str, HostArray, HostArray, list[str] | None]]:
    """Return the title, steps, values and labels of each panel; a line has no labels.

    `leaves` are the units to show first.
    """
    panels: list[tuple[str, HostArray, HostArray, list[str] | None]] = []

    def add(title: str, flag: Outcome, values: HostArray, labels: list[str] | None = None) -> None:
        is_shown = np.logical_and.reduce([rows.has(x) for x in flag])
        if is_shown.any() and (labels is None or labels):
            panels.append((title, rows.step[is_shown], values[is_shown], labels))

    add("loss", Outcome.HAS_LOSS, rows.loss)
    order = sorted(range(len(names.units)), key=lambda i: names.units[i] not in leaves)[:_MAX_UNITS]
    units, norms = [names.units[i] for i in order], rows.norms[:, :, 1:][:, :, order]
    if units:
        flags = Outcome.HAS_UNITS | Outcome.HAS_GRADIENT
        add("gradient norm", flags, norms[:, 0], units)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(norms[:, 1] == 0, 0, norms[:, 1] / norms[:, 2])
        flags = Outcome.HAS_UNITS | Outcome.HAS_UPDATE | Outcome.HAS_PARAMETER
        add("norm of the update over norm of the parameters", flags, ratio, units)
    else:
        add("gradient norm", Outcome.HAS_GRADIENT, rows.norms[:, 0, 0])
    for i, key in ((1, "RMS"), (2, "kurtosis")):
        add(f"{key} of activations", Outcome.HAS_TAPS, rows.taps[:, :, 0, i], list(names.taps))
    return panels


def _draw_line(axis: Any, steps: HostArray, values: HostArray) -> None:
    axis.plot(steps, values, color="tab:blue", linewidth=1)
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        axis.set_yscale("log")


def _draw_heat_map(axis: Any, steps: HostArray, values: HostArray, labels: list[str]) -> Any:
    """Draw a heat map with one row for each label and one column for each step."""
    import matplotlib
    from matplotlib.colors import ListedColormap, LogNorm

    starts = np.unique(np.linspace(0, len(steps), _MAX_COLUMNS, endpoint=False, dtype=int))
    is_bad = np.maximum.reduceat(~np.isfinite(values), starts).T
    values = np.maximum.reduceat(np.where(np.isfinite(values), values, 0), starts).T
    last = steps[-1] + np.median(np.diff(steps)) if len(steps) > 1 else steps[-1] + 1
    edges = np.append(steps[starts], last), np.arange(len(labels) + 1)
    positive = values[values > 0]
    low, high = np.percentile(positive, [1, 99]) if positive.size else (1.0, 10.0)
    colors = matplotlib.colormaps["viridis"].with_extremes(under="#8c8c8c")
    norm = LogNorm(low, max(high, low * 1.01))
    # Draw zeros below the range of the color scale, and clamp positive values to the range.
    shown = np.where(values > 0, np.maximum(values, low), low / 10)
    mesh = axis.pcolormesh(*edges, shown, norm=norm, cmap=colors, rasterized=True)
    reds = ListedColormap(["tab:red"])
    axis.pcolormesh(*edges, np.ma.masked_equal(is_bad, False), cmap=reds, rasterized=True)
    every = -(-len(labels) // _MAX_LABELS)
    axis.set_yticks(np.arange(0, len(labels), every) + 0.5, labels[::every])
    axis.set_ylim(len(labels), 0)
    return mesh
