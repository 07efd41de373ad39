"""Pictures of a run, from its log. Only here is matplotlib imported, when it is asked for."""

from typing import Any

import numpy as np

from .._errors import public, value_error
from ._log import read_columns


@public
def plot_log(log: Any) -> Any:
    """Draws what `watch` saw: norms by unit and step, shares, and update-to-parameter ratios.

    Incidents are marked by lines. It needs matplotlib: `pip install "gradclip_jax[plots]"`.

    Args:
        log: a sequence of mappings from name to number, one for each step, such as
            `metrics(state)`, or the path of a file of JSON lines.

    Returns:
        A `matplotlib.figure.Figure`; `figure.savefig("run.png")` writes it.

    Raises:
        ValueError: `log` is no list, or empty, or has no norms by unit.

    Examples:
        >>> import gradclip_jax as gcx
        >>> log = [{"gradient_norm/wi": 1.0, "gradient_norm/wo": 2.0} for step in range(3)]
        >>> [axes.get_title() for axes in gcx.diagnostics.plot_log(log).axes[:2]]
        ['gradient norm, log10', 'share of the squared gradient norm']
    """
    from matplotlib.figure import Figure

    columns = read_columns(log)
    norms, ratios = (
        {key.partition("/")[2]: x for key, x in columns.items() if key.startswith(kind)}
        for kind in ("gradient_norm/", "update_ratio/")
    )
    if not norms:
        hint = "Log `metrics(state)` of an optimizer inside `gcx.watch`."
        got = "none with `gradient_norm/...`"
        raise value_error("log", "of norms by unit", got, hint)
    table, names, height = np.stack(list(norms.values())), list(norms), 3 if ratios else 2
    figure = Figure(figsize=(9, 3 * height), layout="constrained")
    axes = figure.subplots(height, sharex=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        heat = np.log10(np.where(table > 0, table, np.nan))
        share = np.nan_to_num(table**2 / np.nansum(table**2, axis=0))
    axes[0].set_title("gradient norm, log10")
    figure.colorbar(axes[0].imshow(heat, aspect="auto", interpolation="nearest"), ax=axes[0])
    step = len(names) // 24 + 1
    axes[0].set_yticks(range(0, len(names), step), names[::step], fontsize=7)
    axes[1].set_title("share of the squared gradient norm")
    axes[1].stackplot(range(table.shape[1]), share)
    if ratios:
        axes[2].set_title("norm of the update over that of the parameters")
        axes[2].semilogy(np.transpose([np.where(x > 0, x, np.nan) for x in ratios.values()]))
    axes[-1].set_xlabel("row of the log")
    counts = np.nan_to_num(columns.get("incident_count", np.zeros(1)))
    for place in np.flatnonzero(np.diff(counts, prepend=0) > 0):
        for axis in axes:
            axis.axvline(place, color="tab:red", linewidth=0.8)
    return figure
