"""Every public transformation with its traits, one row each: the rows of the conformance suite."""

import dataclasses
import functools
from collections.abc import Callable
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
        make: makes it; takes `axis_name`, for mapped axes that types do not name.
        around: makes it around another transformation, if it is a wrapper.
        bound: unit of the norm ("tree", "leaf" or "column") and what bounds it after clipping: a
            number, or the metric that reports it. None if no norm is bounded.
        is_identity_below: whether an update that needs no clipping is returned bit for bit.
        recovers: whether a step that is not finite leaves the state finite.
        split_axis: the axis of a matrix along which it may be spread over devices.
        scratch: peak temporary memory of a step, in sizes of the parameters.
        keeps_dtypes: of parameters for which the updates keep theirs.
    """

    make: Callable[..., Any]
    around: Callable[[Any], Any] | None = None
    bound: tuple[str, float | str] | None = None
    is_identity_below: bool = True
    recovers: bool = True
    split_axis: int = 0
    scratch: float = 1.1
    keeps_dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")

    def __call__(self, **axes: Any) -> Any:
        return self.make(**axes)


def _group(tree: Any) -> Any:
    return {key: "rest" if key == "b" else "a" for key in tree}


learned = functools.partial(Row, bound=("tree", "clip_threshold"))
optimizer = functools.partial(Row, is_identity_below=False)

TRANSFORMATIONS: dict[str, Row] = {
    "clip": Row(lambda **_: gcx.clip(0.5)),
    "clip_by_value": Row(lambda **_: gcx.clip_by_value(0.5, min_value=-1.0)),
    "clip_by_norm": Row(
        lambda **axes: gcx.clip_by_norm(100.0, granularity="leaf", reaction="zero", **axes)
    ),
    "clip_by_global_norm": Row(
        lambda **axes: gcx.clip_by_global_norm(1.0, **axes), bound=("tree", 1.0)
    ),
    "clip_by_leaf_norm": Row(
        lambda **axes: gcx.clip_by_leaf_norm(1.0, **axes), bound=("leaf", 1.0)
    ),
    "clip_by_group_norm": Row(
        lambda **axes: gcx.clip_by_group_norm({"a": 1.0}, _group, **axes), bound=("tree", 1.0)
    ),
    "clip_by_block_rms": Row(
        lambda **axes: gcx.clip_by_block_rms(0.5, **axes), bound=("leaf", 0.5 * (64 * 8) ** 0.5)
    ),
    # Its units, the columns of a matrix, must not be spread over devices.
    "adaptive_grad_clip": Row(
        lambda **_: gcx.adaptive_grad_clip(0.1),
        bound=("column", 0.1),
        split_axis=1,
        scratch=2.1 if OLD_XLA else 1.1,
    ),
    "zero_large_norm": Row(lambda **axes: gcx.zero_large_norm(100.0, **axes)),
    "autoclip": learned(lambda **axes: gcx.autoclip(window=8, **axes)),
    "zclip": learned(lambda **axes: gcx.zclip(warmup_steps=2, **axes)),
    "quantile_clip": learned(lambda **axes: gcx.quantile_clip(**axes)),
    "adagc": Row(
        lambda **axes: gcx.adagc(warmup_steps=2, **axes), bound=("leaf", "clip_threshold")
    ),
    # Scratch above 1.1: gradient and carry, or moments and an update, all at once: the first tree
    # has to be there while the norm of the second is taken.
    "u_clip": Row(
        lambda **axes: gcx.contrib.u_clip(gcx.clip_by_global_norm(1.0, **axes)),
        around=lambda inner: gcx.contrib.u_clip(inner),
        bound=("tree", 1.0),
        scratch=3.1 if OLD_XLA else 2.1,
    ),
    "acclip": Row(lambda **_: gcx.contrib.acclip(), is_identity_below=False, scratch=1.6),
    "spam_clip": Row(
        lambda **_: gcx.contrib.spam_clip(warmup_steps=2), scratch=1.6 if OLD_XLA else 1.3
    ),
    "stable_spam_clip": Row(
        lambda **axes: gcx.contrib.stable_spam_clip(**axes), is_identity_below=False, scratch=2.1
    ),
    # Like Adam it keeps a bad value; its docstring says to wrap it.
    "stable_adamw": optimizer(
        lambda **axes: gcx.contrib.stable_adamw(0.1, **axes),
        recovers=False,
        scratch=2.3 if OLD_XLA else 1.3,
    ),
    "accumulate_gradients": optimizer(
        lambda **_: gcx.accumulate_gradients(SGD, 2),
        around=lambda inner: gcx.accumulate_gradients(inner, 1),
    ),
    "skip_nonfinite": optimizer(
        lambda **axes: gcx.skip_nonfinite(SGD, **axes),
        around=lambda inner: gcx.skip_nonfinite(inner),
    ),
    "skip_large_norm": optimizer(
        lambda **axes: gcx.skip_large_norm(SGD, 100.0, **axes),
        around=lambda inner: gcx.skip_large_norm(inner, 100.0),
    ),
    "skip_spikes": optimizer(
        lambda **axes: gcx.skip_spikes(SGD, norm=100.0, **axes),
        around=lambda inner: gcx.skip_spikes(inner, norm=100.0),
    ),
    # The unscaled gradient, and a flag for each element.
    "dynamic_loss_scale": optimizer(
        lambda **axes: gcx.dynamic_loss_scale(SGD, init_scale=8.0, growth_interval=2, **axes),
        around=lambda inner: gcx.dynamic_loss_scale(inner),
        scratch=2.1 if OLD_XLA else 1.3,
    ),
    # The random bits and the noise of a leaf beside the sum.
    "noisy_mean": Row(
        lambda **axes: gcx.per_example.noisy_mean(1.0, 1.0, 1.0, 0, **axes),
        is_identity_below=False,
        scratch=2.6,
    ),
    "watch": optimizer(
        lambda **axes: gcx.watch(SGD, **axes),
        around=lambda inner: gcx.watch(inner),
        # A CPU writes the squares of a leaf, and flags of its bad elements, before it adds them up.
        scratch=4.3 if OLD_XLA else 3.3,
    ),
    "record_norms": Row(lambda **axes: gcx.record_norms(4, **axes)),
    # Of bfloat16 it makes float32, and float16 it refuses: tests/test_rounding.py.
    "round_stochastically": Row(
        lambda **_: gcx.round_stochastically(), keeps_dtypes=("float32", "float64")
    ),
}
