"""The usual accumulation as three plain values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from .._checks import check_count, check_number, check_transformation, error_message
from .._serialize import check_arguments, from_plain, to_plain
from ..clipping._transform import clip_by_global_norm
from ._transform import accumulate_gradients


@dataclasses.dataclass(frozen=True)
class AccumulationConfig:
    """How to accumulate, as plain values that can be written to a file.

    Use `TransformConfig("accumulate_gradients", ...)` for the other arguments.

    Attributes:
        accumulation_steps: micro-batches in a window, >= 1.
        normalize: the mean of the window if True, else the sum.
        max_grad_norm: the accumulated, normalised gradient is clipped to this global norm,
            > 0; None does not clip.

    Examples:
        >>> import optax, gradclip_jax as gcx
        >>> config = gcx.AccumulationConfig(accumulation_steps=8, max_grad_norm=1.0)
        >>> config.effective_batch_size(16)
        128
        >>> gcx.AccumulationConfig.from_dict(config.to_dict()) == config
        True
        >>> tx = config.build(optax.adamw(1e-3))
    """

    accumulation_steps: int = 4
    normalize: bool = True
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        name = "AccumulationConfig"
        check_count(name, "accumulation_steps", self.accumulation_steps, "Pass 1 for every step.")
        if not isinstance(self.normalize, bool):
            hint = "True takes the mean, False the sum."
            raise TypeError(error_message(name, "normalize", "a bool", repr(self.normalize), hint))
        if self.max_grad_norm is not None:
            check_number(name, "max_grad_norm", self.max_grad_norm, "Pass None not to clip.")

    def effective_batch_size(self, micro_batch_size: int) -> int:
        """Examples in one optimizer step."""
        name = "AccumulationConfig.effective_batch_size"
        check_count(name, "micro_batch_size", micro_batch_size, "Pass the examples of one call.")
        return int(micro_batch_size) * int(self.accumulation_steps)

    def build(self, inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """The accumulation around an inner optimizer."""
        check_transformation("AccumulationConfig.build", "inner", inner)
        if self.max_grad_norm is not None:
            inner = optax.chain(clip_by_global_norm(self.max_grad_norm), inner)
        reduction = "mean" if self.normalize else "sum"
        return accumulate_gradients(inner, self.accumulation_steps, reduction=reduction)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or YAML; infinity as "inf"."""
        return to_plain("AccumulationConfig", "self", dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AccumulationConfig":
        """The inverse of `to_dict`; refuses keys it does not know."""
        check_arguments("AccumulationConfig.from_dict", "values", values, cls)
        return cls(**from_plain(dict(values)))
