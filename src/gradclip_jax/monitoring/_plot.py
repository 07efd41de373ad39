"""Plots of training logs. Matplotlib is imported only when a plot is drawn."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._errors import public, value_error
from ._incident import KINDS, Incident
from ._summary import Log, LogSource, read_log_file

_PANELS = {
    "gradient norm": ("gradient_norm/", ""),
    "norm of the update over norm of the parameters": ("update_ratio/", ""),
    "RMS of activations": ("taps/", "/rms"),
    "kurtosis of activations": ("taps/", "/kurtosis"),
}
"""The title of each heat map, and how the keys of its rows begin and end."""
_MAX_COLUMNS = 640  # about the pixels of a panel
_MAX_LABELS = 24
_MAX_CAPTIONS = 12


@public
def plot_log(log: LogSource, *, incidents: Sequence[Incident] = (), dark: bool = False) -> Any:
    """Plot the loss of a training run, and heat maps with one row per leaf, layer or tap.

    The heat maps show the gradient norm and the ratio of update norm to parameter norm of each leaf
    or layer, and the RMS and kurtosis of the activations at each tap, if the log contains them. The
    color scale is logarithmic, from the 1st to the 99th percentile. Non-finite values are red and
    zeros are gray. A column that represents several steps shows their largest value. Steps without
    a measurement, such as micro-steps that only accumulate, are omitted.

    Incidents recorded by `watch` are marked by numbered vertical lines and described below the
    plot. Pass them as `incidents`, or add `incident.to_dict()` to the log as a separate row. If no
    incidents are given, lines mark the steps at which `incident_count` increases.

    The figure is 900 pixels wide with a transparent background. It requires matplotlib: `pip
    install "gradclip_jax[plots]"`.

    Args:
        log: Sequence of dictionaries with the metrics of one step each, such as `metrics(state)`,
            or the path of a JSON Lines file.
        incidents: Incidents to mark, such as `gcx.incidents(state)`.
        dark: Whether to use text and line colors for a dark background.

    Returns:
        A `matplotlib.figure.Figure`, which can be saved with `figure.savefig("run.png")`.

    Raises:
        ValueError: If `log` is empty, is not a sequence of mappings, or contains neither norms of
            leaves or layers nor statistics of taps.


    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"loss": 2.0, "gradient_norm/wi": 1.0, "gradient_norm/wo": 2.0}] * 3
        >>> [axes.get_title(loc="left") for axes in gcx.diagnostics.plot_log(log).axes[:2]]
        ['loss', 'gradient norm']
    """
    from matplotlib.figure import Figure

    found = read_log_file(log)
    panels = {title: _rows(found, *affixes) for title, affixes in _PANELS.items()}
    panels = {title: rows for title, rows in panels.items() if rows}
    if not panels:
        hint = "Log `metrics(state)` of an optimizer inside `gcx.watch`."
        rule, got = "a log with norms of layers or leaves", "no key `gradient_norm/...`"
        raise value_error("log", rule, got, hint)
    marks = [(x.step, str(x)) for x in incidents] or found.incidents or _kinds(found)
    marks = sorted(dict.fromkeys(mark for mark in marks if np.isfinite(mark[0])))
    captions = [f"{i}  {text}" for i, (_, text) in enumerate(marks, 1)][-_MAX_CAPTIONS:]
    captions = [line for x in captions for line in textwrap.wrap(x, 140, subsequent_indent="    ")]
    has_loss, color = "loss" in found.columns, "#dddddd" if dark else "#333333"
    heights = [1.3] * has_loss + [min(max(0.16 * len(x), 0.8), 4.0) for x in panels.values()]
    size = 9, sum(heights) + 0.4 * len(heights) + 0.5 + 0.16 * len(captions)
    figure = Figure(size, dpi=100, layout="constrained", facecolor="none")
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, title in zip(axes, ["loss"] * has_loss + list(panels), strict=True):
        axis.set_title(title, loc="left", fontsize=9, color=color)
        axis.set_facecolor("none")
        shown = [axis]
        if title == "loss":
            _draw_loss(axis, found)
        else:
            mesh = _draw_heat_map(axis, found.steps, panels[title])
            shown.append(figure.colorbar(mesh, ax=axis, pad=0.01, aspect=10).ax)
        for part in shown:
            part.tick_params(labelsize=7, colors=color, which="both")
            for spine in part.spines.values():
                spine.set_color(color)
        for step, _ in marks:
            axis.axvline(step, color="tab:red", linewidth=0.8, alpha=0.7)
    place, last = axes[0].get_xaxis_transform(), -np.inf
    for i, (step, _) in enumerate(marks, 1):
        if step - last > 0.02 * np.ptp(found.steps):  # numbers do not overlap
            last = step
            axes[0].text(step, 1.02, str(i), transform=place, color="tab:red", size=7, ha="center")
    axes[-1].set_xlabel("step", fontsize=8, color=color)
    figure.supxlabel("\n".join(captions), x=0.01, ha="left", fontsize=8, color=color)
    return figure


def _rows(log: Log, start: str, end: str) -> dict[str, np.ma.MaskedArray]:
    """Return the columns whose keys have a prefix and a suffix, which are removed from the keys."""
    keys = [key for key in log.columns if key.startswith(start) and key.endswith(end)]
    return {
        key[len(start) : len(key) - len(end)]: log.columns[key]
        for key in keys
        if not (end and key.endswith(f"/cotangent_{end[1:]}"))
    }


def _kinds(log: Log) -> list[tuple[float, str]]:
    """Return the steps at which `incident_count` increases, and the kinds of these incidents."""
    counts, flags = (log.columns.get(f"incident_{key}") for key in ("count", "kind"))
    if counts is None or flags is None:
        return []
    places = np.flatnonzero(np.diff(counts.filled(0), prepend=0) > 0)
    words = [[x for i, x in enumerate(KINDS) if int(flags.filled(0)[at]) >> i & 1] for at in places]
    steps = log.steps[places].tolist()
    return [(x, f"step {x:g}: {', '.join(kinds)}") for x, kinds in zip(steps, words, strict=True)]


def _draw_loss(axis: Any, log: Log) -> None:
    is_logged = ~np.ma.getmaskarray(log.columns["loss"])  # the line continues between logged steps
    steps, loss = log.steps[is_logged], log.columns["loss"].data[is_logged]
    axis.plot(steps, loss, color="tab:blue", linewidth=1)
    finite = loss[np.isfinite(loss)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        axis.set_yscale("log")


def _draw_heat_map(axis: Any, steps: np.ndarray, rows: dict[str, np.ma.MaskedArray]) -> Any:
    """Draw a heat map with one row for each name and one column for each measured step."""
    import matplotlib
    from matplotlib.colors import ListedColormap, LogNorm

    table, names = np.ma.array(list(rows.values())), list(rows)
    is_measured = ~np.ma.getmaskarray(table).all(axis=0) & np.isfinite(steps)
    table, steps = table[:, is_measured], steps[is_measured]
    starts = np.unique(np.linspace(0, len(steps), _MAX_COLUMNS, endpoint=False, dtype=int))
    is_bad = np.maximum.reduceat(~np.isfinite(table.filled(0)), starts, axis=1)
    finite = np.where(np.isfinite(table.filled(0)), table.filled(0), 0)
    values = np.maximum.reduceat(finite, starts, axis=1)
    is_empty = np.minimum.reduceat(np.ma.getmaskarray(table), starts, axis=1)
    last = steps[-1] + np.median(np.diff(steps)) if len(steps) > 1 else steps[-1] + 1
    edges = np.append(steps[starts], last), np.arange(len(names) + 1)
    positive = values[values > 0]
    low, high = np.percentile(positive, [1, 99]) if positive.size else (1.0, 10.0)
    colors = matplotlib.colormaps["viridis"].with_extremes(under="#8c8c8c")
    norm = LogNorm(low, max(high, low * 1.01))
    # Draw zeros below the range of the color scale, and clamp positive values to the range.
    shown = np.where(values > 0, np.maximum(values, low), low / 10)
    shown = np.ma.array(shown, mask=is_empty)
    mesh = axis.pcolormesh(*edges, shown, norm=norm, cmap=colors, rasterized=True)
    reds = ListedColormap(["tab:red"])
    axis.pcolormesh(*edges, np.ma.masked_equal(is_bad, False), cmap=reds, rasterized=True)
    step = -(-len(names) // _MAX_LABELS)
    axis.set_yticks(np.arange(0, len(names), step) + 0.5, names[::step])
    axis.set_ylim(len(names), 0)
    return mesh
