"""One incident, as a person reads it."""

import math
from typing import Any, NamedTuple

import numpy as np

from .._types import UNBOUNDED
from ..clipping._incident import COLUMNS, Kind


class Incident(NamedTuple):
    """What happened at one step; printed it is a sentence.

    Attributes:
        step: calls of what kept the incident before this one: `watch`, a guard or a clip.
        kinds: of "nan", "infinity", "norm", "loss", "update" what was wrong, and of "skipped",
            "held", "clipped" what became of the step; none of these: it was taken.
        norm: of the gradient.
        norm_threshold: above which a norm counts as a spike, or was skipped by a guard; inf
            before there is one.
        leaf: the unit with the most bad elements, or else with the largest share of the squared
            norm; "" where norms are of the whole tree.
        share: its share of the bad elements, or of the squared norm, 0 to 1.
        second_leaf: the unit that comes next.
        second_share: its share.
        bad_elements: how many elements of the gradient are NaN or infinite.
        loss: None if none was passed.
        loss_threshold: as `norm_threshold`.
        update_norm: the norm of the update; None if it was not measured.
        update_threshold: as `norm_threshold`.
        clip_factor: by what a clip multiplied the gradient; the smallest of several units.

    Examples:
        >>> import gradclip_jax as gcx
        >>> kinds = ("norm", "skipped")
        >>> print(
        ...     gcx.diagnostics.Incident(
        ...         1203, kinds, 3.1e5, 4.2, "h_7/wi", 0.97, "h_7/wo", 0.02, 0, 3.2, 4.0
        ...     )
        ... )
        step 1203: skipped, gradient norm 3.1e5 above 4.2; 97 % of it in h_7/wi; loss 3.2, usual
    """

    step: int
    kinds: tuple[str, ...]
    norm: float
    norm_threshold: float = math.inf
    leaf: str = ""
    share: float = 1.0
    second_leaf: str = ""
    second_share: float = 0.0
    bad_elements: int = 0
    loss: float | None = None
    loss_threshold: float = math.inf
    update_norm: float | None = None
    update_threshold: float = math.inf
    clip_factor: float = 1.0

    def __str__(self) -> str:
        """What happened, as a person would say it."""
        fates = [word for word in ("skipped", "held", "clipped") if word in self.kinds]
        parts = [f"step {self.step}: {' and '.join(fates) or 'taken'}, gradient norm "]
        parts[0] += _compared(self.norm, self.norm_threshold)
        if self.bad_elements:
            noun = "element" if self.bad_elements == 1 else "elements"
            where = f" in {self.leaf}" if self.share == 1 else f", {self._places('them')}"
            parts.append(f"{self.bad_elements} bad {noun}" + (where if self.leaf else ""))
        elif self.leaf:
            parts.append(self._places("it"))
        if "update" in self.kinds:
            norm = self.update_norm or math.nan  # that of a skipped step is zero
            text = f"norm {_compared(norm, self.update_threshold)}"
            parts.append("update " + (text if math.isfinite(norm) else "not finite"))
        if self.loss is not None:
            parts.append(f"loss {_compared(self.loss, self.loss_threshold)}")
        return "; ".join(parts)

    def _places(self, whole: str) -> str:
        text = f"{self.share:.0%} of {whole} in {self.leaf}".replace("%", " %")
        if self.second_share >= 0.1:
            text += f", {self.second_share:.0%} in {self.second_leaf}".replace("%", " %")
        return text


def _compared(value: float, threshold: float) -> str:
    """A value, and how it stands to its threshold if there is one."""
    is_above = f" above {_short(threshold)}" if value > threshold else ", usual"
    is_known = math.isfinite(value) and threshold < UNBOUNDED
    return _short(value) + (is_above if is_known else "")


def _short(x: float) -> str:
    """Two digits: 3.1e5."""
    if math.isnan(x):
        return "NaN"
    mantissa, e, exponent = f"{x:.2g}".partition("e")
    return mantissa + (f"e{int(exponent)}" if e else "")


def read_row(row: Any, names: list[str]) -> Incident:
    """The incident of a row."""
    row = np.asarray(row, np.int32)
    first = COLUMNS.index("norm")
    step, kind, worst, second, bad_elements = row[:first].tolist()
    floats = dict(zip(COLUMNS[first:], row[first:].view(np.float32).tolist(), strict=True))
    floats |= {key: math.inf for key, x in floats.items() if x >= UNBOUNDED}
    flags = Kind(kind)
    for key, flag in (("loss", Kind.LOSS), ("update_norm", Kind.UPDATE)):
        if math.isnan(floats[key]) and flag not in flags:
            floats[key] = None
    return Incident(
        step=step,
        kinds=tuple(str(flag.name).lower() for flag in Kind if flag in flags),
        leaf=names[worst] if names else "",
        second_leaf=names[second] if names else "",
        bad_elements=bad_elements,
        **floats,
    )
