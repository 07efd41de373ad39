"""Every public transformation with its traits, one row each: the rows of the conformance suite."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

import gradclip_jax as gcx

SGD = optax.sgd(0.5)
# The XLA of JAX 0.7 fuses less on the CPU.
OLD_XLA = jax.__version_info__ < (0, 8)


@dataclasses.dataclass(frozen=True)
class Row:
    """How one transformation is made, and in what it differs from the others.

    Attributes:
        make: makes it; may take `axis_name`, for mapped axes that types do not name.
        around: makes it around another transformation, if it is a wrapper.
        is_identity_below: whether an update that needs no clipping is returned bit for bit.
        reads_state: whether an update depends on the state.
        recovers: whether a step that is not finite leaves the state finite.
        split_axis: the axis of a matrix along which it may be spread over devices.
        scratch: peak temporary memory of a step, in sizes of the parameters.
        keeps_dtypes: of parameters for which the updates keep theirs.
    """

    make: Callable[..., Any]
    around: Callable[[Any], Any] | None = None
    is_identity_below: bool = True
    reads_state: bool = True
    recovers: bool = True
    split_axis: int = 0
    scratch: float = 1.1
    keeps_dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")

    @property
    def takes_axis_name(self) -> bool:
        """Whether it reduces over devices."""
        return "axis_name" in inspect.signature(self.make).parameters

    def __call__(self, axis_name: str | None = None) -> Any:
        return self.make(axis_name=axis_name) if self.takes_axis_name else self.make()


def _group(tree: Any) -> Any:
    return {key: "rest" if key == "b" else "a" for key in tree}


fixed = partial(Row, reads_state=False)
optimizer = partial(Row, is_identity_below=False)


def wrapper(function: Callable[..., Any], scratch: float = 1.1, **arguments: Any) -> Row:
    around = partial(function, **arguments)
    return optimizer(partial(function, SGD, **arguments), around=around, scratch=scratch)


TRANSFORMATIONS: dict[str, Row] = {
    "clip_by_value": fixed(partial(gcx.clip_by_value, 0.5, min_value=-1.0)),
    "clip_by_norm": fixed(partial(gcx.clip_by_norm, 100.0, granularity="leaf", reaction="zero")),
    "clip_by_global_norm": fixed(partial(gcx.clip_by_global_norm, 1.0)),
    "clip_by_leaf_norm": fixed(partial(gcx.clip_by_leaf_norm, 1.0)),
    "clip_by_group_norm": fixed(partial(gcx.clip_by_group_norm, {"a": 1.0}, _group)),
    "clip_by_block_rms": fixed(partial(gcx.clip_by_block_rms, 0.5)),
    # Its units, the columns of a matrix, must not be spread over devices.
    "adaptive_grad_clip": fixed(
        lambda: gcx.adaptive_grad_clip(0.1),
        split_axis=1,
        scratch=2.1 if OLD_XLA else 1.1,
    ),
    "autoclip": Row(partial(gcx.autoclip, window=8)),
    "zclip": Row(partial(gcx.zclip, warmup_steps=2)),
    "adagc": Row(partial(gcx.adagc, warmup_steps=2)),
    # Like Adam it keeps a bad value; its docstring says to wrap it.
    "stable_adamw": optimizer(
        partial(gcx.stable_adamw, 0.1), recovers=False, scratch=2.3 if OLD_XLA else 1.3
    ),
    "accumulate_gradients": optimizer(
        partial(gcx.accumulate_gradients, SGD, 2),
        around=partial(gcx.accumulate_gradients, every=1),
    ),
    "skip_nonfinite": wrapper(gcx.skip_nonfinite),
    "skip_spikes": wrapper(gcx.skip_spikes, norm=100.0),
    "skip_if": wrapper(gcx.skip_if, predicate=lambda *args, **kwargs: False),
    # The unscaled gradient, and a flag for each element.
    "dynamic_loss_scale": wrapper(
        gcx.dynamic_loss_scale, init_scale=8.0, growth_interval=2, scratch=2.1 if OLD_XLA else 1.3
    ),
    # A CPU writes the squares of a leaf, and flags of its bad elements, before it adds them up.
    "watch": wrapper(gcx.watch, scratch=4.3 if OLD_XLA else 1.1),
    # Of bfloat16 it makes float32, and float16 it refuses: tests/unit/test_rounding.py.
    "round_stochastically": Row(gcx.round_stochastically, keeps_dtypes=("float32", "float64")),
}
