"""Write the pages of docs/api from the docstrings of the public names.

    PYTHONPATH=src python docs/write_api.py

A test fails if a page is not current.
"""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

import gradclip_jax as gcx

FOLDER = Path(__file__).parent / "api"
# Title and introduction of each page, and its names in the order in which they are read.
PAGES = {
    "clipping": (
        "# Clipping\n\nThe guide is [Clipping](../clipping.md).",
        "global_norm leaf_norms combine_norms clip_grad_norm clip_grad_value clip_cotangent qk_clip"
        " clip_by_value clip_by_norm clip_by_global_norm clip_by_leaf_norm clip_by_group_norm"
        " clip_by_block_rms granularities.group granularities.layer granularities.axis"
        " granularities.Granularity",
    ),
    "thresholds": (
        "# Thresholds\n\nEvery `max_norm` argument accepts these rules. The guide is"
        " [Adaptive clipping](../adaptive.md).",
        "thresholds.percentile thresholds.mean_std thresholds.zscore thresholds.ema"
        " thresholds.quantile thresholds.relative_to_params thresholds.capped thresholds.Rule",
    ),
    "adaptive": (
        "# Adaptive clipping\n\nThe guide is [Adaptive clipping](../adaptive.md).",
        "adaptive_grad_clip autoclip zclip adagc stable_adamw",
    ),
    "accumulation": (
        "# Accumulation\n\nThe guide is [Accumulation](../accumulation.md).",
        "accumulate_gradients apply_gradients round_stochastically microbatched_value_and_grad"
        " flush reset_accumulation has_updated diagnostics.noise_scale"
        " diagnostics.accumulation_stats diagnostics.AccumulationStats",
    ),
    "guarding": (
        "# Guarding\n\nThe guide is [Guards](../guarding.md).",
        "skip_nonfinite skip_spikes skip_if SkipRule raise_if_failed dynamic_loss_scale"
        " scale_loss",
    ),
    "per_example": (
        "# Per example\n\nThe guide is [Per-example gradients](../per_example.md).",
        "per_example.value_and_grad per_example.Stats per_example.norms",
    ),
    "monitoring": (
        "# Monitoring\n\nThe guides are [Watching](../watching.md) and"
        " [Logging](../recipes/logging.md).",
        "metrics watch Monitor diagnostics.Report last_row incidents diagnostics.Incident"
        " diagnostics.Outcome diagnostics.read_log diagnostics.plot_log"
        " diagnostics.suggest_max_norm diagnostics.nonfinite_leaves diagnostics.verify_step"
        " diagnostics.Verification",
    ),
    "taps": (
        "# Taps\n\nThe guide is [Taps](../taps.md).",
        "taps.tap taps.make_probes taps.metrics",
    ),
    "convert": (
        "# Checkpoints\n\nThe guide is [Checkpoints](../checkpoints.md).",
        "convert_state",
    ),
}
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Examples|References):$")
ITEM = re.compile(r"^(\S[^:\n]*): ")
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Source(str):
    """A string that is shown without quotes, such as an annotation."""

    __repr__ = str.__str__


def signature(name: str, function: Any) -> str:
    """Return the call of a function, with one argument a line if it is long."""
    found = inspect.signature(function)
    parameters = [x for x in found.parameters.values() if x.name != "self"]
    for i, parameter in enumerate(parameters):
        default = parameter.default
        default = Source(default) if isinstance(default, np.dtype) else default
        annotation = Source(parameter.annotation)
        if parameter.annotation is parameter.empty:
            annotation = parameter.empty
        parameters[i] = parameter.replace(annotation=annotation, default=default)
    result = found.return_annotation
    result = "" if result is found.empty else f" -> {result}"
    short = f"{name}{found.replace(parameters=parameters, return_annotation=found.empty)}{result}"
    if len(short) <= 88:
        return short
    lines = [str(x) for x in parameters]
    keywords = [x.kind is x.KEYWORD_ONLY for x in parameters]
    if True in keywords:
        lines.insert(keywords.index(True), "*")
    return f"{name}(\n    " + ",\n    ".join(lines) + f",\n){result}"


def as_markdown(docstring: str) -> str:
    """Return a docstring in Google's style as Markdown."""
    blocks, section = [("", [])], ""
    for line in docstring.splitlines():
        if found := SECTION.match(line):
            section = found[1]
            blocks.append((section, []))
        else:
            blocks[-1][1].append(line)
    written = []
    for section, lines in blocks:
        text = textwrap.dedent("\n".join(lines)).strip("\n")
        if section in ("Args", "Attributes", "Raises"):
            items = (ITEM.sub(r"- `\1`: ", line) for line in text.splitlines())
            text = "\n".join(re.sub(r"^ {4}", "  ", line) for line in items)
        text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
        written.append(f"**{section}**\n\n{text}" if section else text)
    return "\n\n".join(written)


def entry(path: str) -> str:
    """Return the heading, the signature and the docstring of a public name."""
    value: Any = gcx
    for part in path.split("."):
        value = getattr(value, part)
    docstring = inspect.getdoc(value) or ""
    text = f'<a id="gradclip_jax.{path}"></a>\n\n## `{path}`\n\n'
    if "\nArgs:" in docstring or inspect.isfunction(value):
        text += f"```py\n{signature(path, value)}\n```\n\n"
    text += as_markdown(docstring)
    if inspect.isclass(value):
        for name, method in vars(value).items():
            if inspect.isfunction(method) and not name.startswith("_") and method.__doc__:
                full = f"{path.split('.')[-1]}.{name}"
                text += f"\n\n### `{full}`\n\n```py\n{signature(full, method)}\n```\n\n"
                text += as_markdown(inspect.getdoc(method) or "")
    return text


def page(name: str) -> str:
    """Return the Markdown of a page."""
    introduction, names = PAGES[name]
    note = "<!-- Written by docs/write_api.py from the docstrings. -->"
    return "\n\n".join([note, introduction, *map(entry, names.split())]) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")
