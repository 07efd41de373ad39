"""Detected training faults, which print as sentences."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

KINDS = (
    *("nan", "infinity", "norm", "loss", "update", "skipped", "held", "clipped", "leaf"),
    *("parameter", "zero", "drift", "replica", "unchanged", "tap", "window", "note"),
)
"""Kinds of faults and outcomes of a step."""

FATES = ("skipped", "held", "unchanged", "clipped")
"""The kinds that describe the outcome of the step."""

_EVIDENCE = ("parameter", "leaf", "zero", "drift", "update")
"""The kinds that occur in one leaf, from the strongest evidence to the weakest."""

STREAK = 8
"""Maximum number of rows between two incidents of one streak."""


class Incident(NamedTuple):
    """A training step in which `watch` detected a fault; `str` returns it as a sentence.

    `leaf`, `share` and `leaf_rise` belong to the strongest evidence, in this order: parameters,
    non-finite elements, a rise of the gradient, a gradient of zero, a drift, the update.

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
        leaf_rise: Ratio of the gradient norm of this leaf or layer to its median, divided by the
            median of this ratio over all leaves; 0 if the norm of no leaf or layer is an outlier.
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
    norm: float | None = None
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
        batch = "" if self.batch_id is None else f", batch {self.batch_id}"
        fates = " and ".join(word for word in FATES if word in self.kinds) or "applied"
        norm = "no gradient"
        if self.norm is not None:
            norm = f"gradient norm {_compared(self.norm, self.norm_threshold)}"
        fates = fates.replace("unchanged", "parameters unchanged")
        parts = [f"step {self.step}{batch}: {fates}, {norm}", self._place(), *self._faults()]
        if self.activation:  # usually makes all cotangents non-finite
            parts.append(f"first non-finite activation: {self.activation}")
        elif self.cotangent:
            parts.append(f"first non-finite cotangent: {self.cotangent}")
        if self.loss is not None:
            parts.append(f"loss {_compared(self.loss, self.loss_threshold)}")
        if self.streak > 1:
            parts.append(f"{self.streak} times since step {self.first_step}")
        return "; ".join(filter(None, parts))

    def _place(self) -> str:
        """Describe which leaves contain the non-finite elements or dominate the gradient norm."""
        count = self.bad_elements
        share = f"{100 * self.share:.0f} % of {'them' if count else 'it'} in {self.leaf}"
        if self.second_share >= 0.1:
            share += f", {100 * self.second_share:.0f} % in {self.second_leaf}"
        if not count:
            return share if self.leaf and self.norm and self.share >= 0.1 else ""
        elements = f"{count} non-finite element{'s' if count > 1 else ''}"
        if self.leaf:
            elements += f" in {self.leaf}" if self.share == 1 else f", {share}"
        return elements

    def _faults(self) -> list[str]:
        """Describe the faults other than outliers of the gradient norm and the loss.

        `leaf` is the place of the first of these kinds, so that the others are not described.
        """
        first, *others = [x for x in _EVIDENCE if x in self.kinds] or [""]
        if self.bad_elements and first != "parameter":  # `leaf` is their place
            others.append(first)
        of = f" of {self.leaf}" if self.leaf else ""
        rose = f"rose {_short(self.leaf_rise)} times"
        if self.second_leaf not in ("", self.leaf):
            rose += " more than those of other leaves"
        inside = f" in {self.leaf}" if self.leaf else ""
        parameter, update = self.parameter_norm or 0.0, self.update_norm or 0.0
        is_finite = math.isfinite(parameter)
        changed = f"rose to {_short(parameter)}" if is_finite else "is not finite"
        texts = {
            "parameter": f"parameter norm {changed}{inside}",
            "leaf": f"gradient norm{of} {rose}",
            "update": f"update norm {_compared(update, self.update_threshold)}{inside}",
            "zero": f"the gradient{of if self.norm else ''} has become zero",
            "drift": f"gradient norm{of} slowly {rose}",
            "tap": f"RMS of the {self.tap} rose {_short(self.tap_rise)} times",
            "window": "the weight of the accumulated window is zero",
            "note": "overflows as rare as those of a loss scale are not reported again",
            "replica": f"the parameters on device {self.device} differ from those on the others",
        }
        return [texts[x] for x in texts if x in self.kinds and x not in others]

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of JSON values with all fields; "sentence" is `str(incident)`.

        Non-finite numbers become strings such as "nan" and "inf".

        Examples:
            >>> import gradclip_jax as gcx
            >>> incident = gcx.diagnostics.Incident(3, ("nan",), float("nan"))
            >>> row = incident.to_dict()
            >>> row["norm"], row["norm_threshold"], row["sentence"]
            ('nan', 'inf', 'step 3: applied, gradient norm NaN')
        """
        fields = self._asdict() | {"kinds": list(self.kinds), "sentence": str(self)}
        return to_json(fields)


def to_json(line: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten floats to the digits of a float32; name non-finite ones, which JSON does not have."""
    floats = {key: x for key, x in line.items() if isinstance(x, float)}
    texts = {key: str(x) for key, x in floats.items() if not math.isfinite(x)}
    return {**line, **{key: float(f"{x:.9g}") for key, x in floats.items()}, **texts}


def from_lines(lines: Iterable[Mapping[str, Any]]) -> list[Incident]:
    """Return the incidents in a log, whose lines are those of `Incident.to_dict`."""
    found: list[Incident] = []
    for line in lines:
        if "sentence" in line:
            fields: dict[str, Any] = {x: line[x] for x in Incident._fields if x in line}
            fields |= {key: float(x) for key, x in fields.items() if x in ("nan", "inf", "-inf")}
            fields["kinds"] = tuple(fields["kinds"])
            found.append(Incident(**fields))
    return found


def _compared(value: float, threshold: float) -> str:
    """Format a value; append the threshold if the value exceeds it."""
    is_above = math.isfinite(value) and value > threshold
    return _short(value) + (f" (threshold {_short(threshold)})" if is_above else "")


def _short(x: float) -> str:
    """Format a number with two significant digits, such as 3.1e5."""
    return "NaN" if math.isnan(x) else re.sub(r"e\+?(-?)0*", r"e\1", f"{x:.2g}")
