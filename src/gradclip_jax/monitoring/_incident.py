"""Detected training faults, which print as sentences."""

import math
import re
from typing import Any, NamedTuple

from .._types import UNBOUNDED
from ._taps import FirstNonfinite

KINDS = (
    *("nan", "infinity", "norm", "loss", "update", "skipped", "held", "clipped", "leaf"),
    *("parameter", "zero", "drift", "replica", "unchanged", "jump", "tap", "window", "note"),
)
"""Kinds of faults and outcomes of a step."""

FATES = ("skipped", "held", "unchanged", "clipped")
"""The kinds that describe the outcome of the step."""

STREAK = 8
"""Maximum number of rows between two incidents of one streak."""


class Incident(NamedTuple):
    """A training step in which `watch` detected a fault; `str` returns it as a sentence.

    Attributes:
        step: Index of the call of `watch`, starting at 0.
        kinds: Kinds of the fault and outcome of the step; see `incidents`.
        norm: Global gradient norm; None if the call only flushed an accumulation.
        norm_threshold: Threshold for `norm`, from `watch` or from the guard that skipped the step
            because of the norm; inf if there was no threshold yet.
        leaf: Name of the leaf or layer in which the fault occurred; "" for `granularity="global"`.
        share: Fraction of the non-finite elements that are in this leaf or layer; if all are
            finite, its fraction of the squared gradient norm.
        second_leaf: Name of the leaf or layer with the second largest fraction.
        second_share: Fraction of `second_leaf`, as in `share`.
        bad_elements: Number of NaN or infinite elements in the gradient.
        loss: Loss; None if no loss was passed.
        loss_threshold: Threshold for `loss`; inf if there was no threshold.
        update_norm: Norm of the update; None if it was not measured.
        update_threshold: Threshold for `update_norm`; inf if there was no threshold.
        leaf_rise: Ratio of the gradient, update or parameter norm of this leaf or layer to its
            median, divided by the median of this ratio over the other leaves; 0 if the norm of no
            single leaf or layer is an outlier.
        parameter_norm: Norm of the parameters; None if it was not measured.
        device: Index of the device whose parameters differ from the others; -1 if they are equal.
        activation: Name of the first tap in the forward pass with a non-finite activation; None if
            all were finite or no statistics of taps were passed.
        cotangent: Name of the first tap in the backward pass with a non-finite cotangent, or None.
        tap: Name of the tap whose RMS is an outlier, such as "activation of layers_3/mlp", or None.
        tap_rise: Ratio of this RMS to its level.
        batch_id: The extra argument `batch_id` of `update`; None if it was not passed.
        streak: Number of incidents with a common kind that follow each other within 8 rows,
            including this one.
        first_step: Step at which these consecutive incidents started.


    Examples:
        >>> import gradclip_jax as gcx
        >>> kinds = ("norm", "skipped")
        >>> print(
        ...     gcx.diagnostics.Incident(
        ...         1203, kinds, 3.1e5, 4.2, "h_7/wi", 0.97, "h_7/wo", 0.02, 0, 3.2, 4.0
        ...     )
        ... )
        step 1203: skipped, gradient norm 3.1e5 (threshold 4.2); 97 % of it in h_7/wi; loss 3.2
    """

    step: int
    kinds: tuple[str, ...]
    norm: float | None
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
    leaf_rise: float = 1.0
    parameter_norm: float | None = None
    device: int = -1
    activation: str | None = None
    cotangent: str | None = None
    tap: str | None = None
    tap_rise: float = 1.0
    batch_id: int | None = None
    streak: int = 1
    first_step: int = -1

    def __str__(self) -> str:
        """Return the incident as a sentence."""
        fate = " and ".join(word for word in FATES if word in self.kinds) or "applied"
        gradient = "no gradient" if self.norm is None else "gradient zero"
        if self.norm:
            gradient = f"gradient norm {_compared(self.norm, self.norm_threshold)}"
        batch = "" if self.batch_id is None else f", batch {self.batch_id}"
        text = f"step {self.step}{batch}: {fate.replace('unchanged', 'parameters unchanged')}"
        parts = [f"{text}, {gradient}", *filter(None, [self._place(), *self._causes()])]
        if self.loss is not None:
            parts.append(f"loss {_compared(self.loss, self.loss_threshold)}")
        if self.streak > 1:
            parts.append(f"{self.streak} times since step {self.first_step}")
        return "; ".join(parts)

    def _place(self) -> str:
        """Describe which leaves contain the non-finite elements or dominate the gradient norm."""
        count, second = self.bad_elements, ""
        if self.second_share >= 0.1:
            second = f", {100 * self.second_share:.0f} % in {self.second_leaf}"
        if not count:
            # Omit leaves if the gradient is zero or if no leaf dominates its norm.
            is_share = self.leaf and self.norm and self.share >= 0.1
            return f"{100 * self.share:.0f} % of it in {self.leaf}{second}" if is_share else ""
        elements = f"{count} non-finite element{'s' if count > 1 else ''}"
        if not self.leaf:
            return elements
        if self.share == 1:
            return f"{elements} in {self.leaf}"
        return f"{elements}, {100 * self.share:.0f} % of them in {self.leaf}{second}"

    def _causes(self) -> list[str]:
        """Describe faults other than outliers of the gradient norm or the loss."""
        place = f" of {self.leaf}" if self.leaf else ""
        inside = f" in {self.leaf}" if self.leaf else ""
        factor = _short(self.leaf_rise)
        is_only = self.second_leaf in ("", self.leaf)
        others = "" if is_only else " more than those of other leaves"
        rise = f"rose {factor} times{others}"
        parts: list[str] = []
        if "jump" in self.kinds:
            parts.append(f"parameter norm rose to {_short(self.parameter_norm or 0.0)}")
        if "parameter" in self.kinds:
            norm = self.parameter_norm or 0.0
            what = f"{place} {rise}" if math.isfinite(norm) else f" {_beyond(norm)}{inside}"
            parts.append(f"parameter norm{what}")
        elif "leaf" in self.kinds:
            parts.append(f"gradient norm{place} {rise}")
        if "update" in self.kinds and self.update_norm:
            norm = _compared(self.update_norm, self.update_threshold)
            if not math.isfinite(self.update_norm):
                norm = _beyond(self.update_norm) + inside
            elif place and self.leaf_rise > 1:
                norm += f", that{place} {rise}"
            parts.append(f"update norm {norm}")
        # `leaf` is the leaf of the first of these faults, which are ordered by their evidence.
        has_other = not {"parameter", "leaf"}.isdisjoint(self.kinds) or self.bad_elements > 0
        if "zero" in self.kinds and self.norm:
            leaf = "another leaf" if has_other else self.leaf
            parts.append(f"the gradient of {leaf} has become zero")
        if "drift" in self.kinds and (has_other or "zero" in self.kinds):
            parts.append("the gradient norm of another leaf has slowly risen")
        elif "drift" in self.kinds:
            parts.append(f"gradient norm{place} has slowly risen {factor} times{others}")
        if self.tap:
            parts.append(f"RMS of the {self.tap} rose {_short(self.tap_rise)} times")
        if "window" in self.kinds:
            parts.append("the weight of the accumulated window is zero")
        if "note" in self.kinds:
            parts.append("overflows as rare as those of a loss scale are not reported again")
        if "replica" in self.kinds:
            parts.append(f"the parameters on device {self.device} differ from those on the others")
        if self.activation or self.cotangent:
            # A non-finite activation usually makes all cotangents non-finite.
            cotangent = None if self.activation else self.cotangent
            parts.append(str(FirstNonfinite(self.activation, cotangent)))
        return parts

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of JSON values with all fields; "sentence" is `str(incident)`.

        An infinite threshold becomes None. Other non-finite numbers become strings such as "nan".


        Examples:
            >>> import gradclip_jax as gcx
            >>> incident = gcx.diagnostics.Incident(3, ("nan",), float("nan"))
            >>> row = incident.to_dict()
            >>> row["norm"], row["norm_threshold"], row["sentence"]
            ('nan', None, 'step 3: applied, gradient norm NaN')
        """
        fields: dict[str, Any] = self._asdict() | {"kinds": list(self.kinds), "sentence": str(self)}
        for key, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[key] = None if key.endswith("_threshold") else str(value)
        return fields


def _compared(value: float, threshold: float) -> str:
    """Format a value; append the threshold if the value exceeds it."""
    is_above = math.isfinite(value) and value > threshold and threshold < UNBOUNDED
    return _short(value) + (f" (threshold {_short(threshold)})" if is_above else "")


def _beyond(norm: float) -> str:
    """Format a non-finite norm; it is infinite if an element is or if its square overflowed."""
    return "NaN" if math.isnan(norm) else "above 5e21"


def _short(x: float) -> str:
    """Format a number with two significant digits, such as 3.1e5."""
    return "NaN" if math.isnan(x) else re.sub(r"e\+?(-?)0*", r"e\1", f"{x:.2g}")
