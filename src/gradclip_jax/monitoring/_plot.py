"""Plots of training runs. Matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._errors import public
from .._types import HostArray
from ._log import LogSource
from ._monitor import Monitor, read_log
from ._rows import Names, Outcome, Rows

_MAX_UNITS = 40
_MAX_COLUMNS = 640  # about the pixels of a panel
_MAX_LABELS = 24
_MAX_CAPTIONS = 12


@public
def plot_log(log: LogSource | Monitor) -> Any:
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

    monitor = log if isinstance(log, Monitor) else read_log(log)
    rows = monitor.rows
    incidents = [x for x in monitor.incidents if x.step in rows.step]
    panels = list(_panels(rows, monitor.names, [x.leaf for x in incidents]))
    captions = [f"{i}  {x}" for i, x in enumerate(incidents, 1)][-_MAX_CAPTIONS:]
    captions = [line for x in captions for line in textwrap.wrap(x, 140, subsequent_indent="    ")]
    color = "#7f7f7f"  # readable on light and dark pages
    heights = [np.clip(0.16 * len(x), 0.8, 4.0) if x else 1.3 for _, _, _, x in panels]
    size = 9, sum(heights) + 0.4 * len(heights) + 0.5 + 0.16 * len(captions)
    figure = Figure(size, dpi=100, layout="constrained", facecolor="none")
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, steps, values, labels) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=9, color=color)
        _draw(axis, steps, values, labels)
        for incident in incidents:
            axis.axvline(incident.step, color="tab:red", linewidth=0.8, alpha=0.7)
    for axis in figure.axes:
        axis.set_facecolor("none")
        axis.tick_params(labelsize=7, colors=color, which="both")
        axis.spines[:].set_color(color)
    place, last = axes[0].get_xaxis_transform(), -np.inf
    for i, incident in enumerate(incidents, 1):
        step = incident.step
        if step - last > 0.02 * np.ptp(rows.step):  # numbers do not overlap
            last = step
            axes[0].text(step, 1.02, str(i), transform=place, color="tab:red", size=7, ha="center")
    axes[-1].set_xlabel("step", fontsize=8, color=color)
    figure.supxlabel("\n".join(captions), x=0.01, ha="left", fontsize=8, color=color)
    return figure


def _panels(
    rows: Rows, names: Names, leaves: Sequence[str]
) -> Iterator[tuple[str, HostArray, HostArray, Sequence[str]]]:
    """Yield the title, steps, values and labels of each panel; a line has no labels.

    `leaves` are the units to show first.
    """
    order = sorted(range(len(names.units)), key=lambda i: names.units[i] not in leaves)[:_MAX_UNITS]
    units = [names.units[i] for i in order]
    gradient, update, parameter = np.moveaxis(rows.norms[:, :, 1:][:, :, order], 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(update == 0, 0, update / parameter)
    has_units, has_gradient = rows.has(Outcome.HAS_UNITS), rows.has(Outcome.HAS_GRADIENT)
    has_ratio = rows.has(Outcome.HAS_UPDATE) & rows.has(Outcome.HAS_PARAMETER)
    for title, is_known, values, labels in (
        ("loss", rows.has(Outcome.HAS_LOSS), rows.loss, ()),
        ("gradient norm", has_gradient & (not units), rows.norms[:, 0, 0], ()),
        ("gradient norm", has_gradient & has_units, gradient, units),
        ("norm of the update over norm of the parameters", has_ratio & has_units, ratio, units),
        ("RMS of activations", rows.has(Outcome.HAS_TAPS), rows.taps[:, :, 0, 1], names.taps),
        ("kurtosis of activations", rows.has(Outcome.HAS_TAPS), rows.taps[:, :, 0, 2], names.taps),
    ):
        if is_known.any():
            yield title, rows.step[is_known], values[is_known], labels


def _draw(axis: Any, steps: HostArray, values: HostArray, labels: Sequence[str]) -> None:
    """Draw a heat map with a row for each label, or a line if there are no labels."""
    import matplotlib

    if not labels:
        axis.plot(steps, values, color="tab:blue", linewidth=1)
        finite = values[np.isfinite(values)]
        if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
            axis.set_yscale("log")
        return
    starts = np.unique(np.linspace(0, len(steps), _MAX_COLUMNS, endpoint=False, dtype=int))
    values = np.where(np.isfinite(values), values, np.nan)
    values = np.maximum.reduceat(values, starts).T  # NaN if one is NaN
    width, places = np.median(np.diff(steps)) if len(steps) > 1 else 1, np.arange(len(labels) + 1)
    edges = np.append(steps[starts], steps[-1] + width) - width / 2, places - 0.5
    positive = values[values > 0]
    low, high = np.percentile(positive, [1, 99]) if positive.size else (1.0, 10.0)
    colors = matplotlib.colormaps["viridis"].with_extremes(under="#8c8c8c", bad="tab:red")
    # Draw zeros below the range of the color scale, and clamp positive values to the range.
    shown = np.where(values == 0, low / 10, np.maximum(values, low))
    limits = {"norm": "log", "vmin": low, "vmax": max(high, low * 1.01)}
    mesh = axis.pcolormesh(*edges, shown, cmap=colors, rasterized=True, **limits)
    axis.figure.colorbar(mesh, ax=axis, pad=0.01, aspect=10)
    every = -(-len(labels) // _MAX_LABELS)
    axis.set_yticks(places[:-1:every], labels[::every])
    axis.invert_yaxis()
