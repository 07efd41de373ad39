"""Optax: its clips, `MultiSteps`, `apply_if_finite` and `microbatch`, replaced by this package."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.microbatching import AccumulationType as Type

import gradclip_jax as gcx


class State(NamedTuple):
    wrapper: Any
    mini_step = property(lambda self: gcx.metrics(self.wrapper)["mini_step"])
    acc_grads = property(lambda self: self.wrapper.accumulation.gradient.total)
    last_finite = property(lambda self: self.wrapper.consecutive_skips == 0)
    notfinite_count = property(lambda self: self.wrapper.consecutive_skips)
    total_notfinite = property(lambda self: self.wrapper.guards[0].skipped["nonfinite"])


def viewed(tx):
    def update(grads, state, params=None, **extra_args):
        updates, wrapper = tx.update(grads, state.wrapper, params, **extra_args)
        return updates, State(wrapper)

    return optax.GradientTransformationExtraArgs(lambda params: State(tx.init(params)), update)


class MultiSteps:
    def __init__(
        self,
        opt,
        every_k_schedule,
        use_grad_mean=True,
        should_skip_update_fn=None,
        accumulator_dtype=jnp.float32,
    ):
        options = {"accumulator_dtype": accumulator_dtype}
        options["reduction"] = "mean" if use_grad_mean else "sum"
        tx = gcx.accumulate_gradients(opt, every_k_schedule, **options)
        self.tx = viewed(gcx.skip_nonfinite(tx) if should_skip_update_fn else tx)

    def gradient_transformation(self):
        return self.tx

    def has_updated(self, state):
        return gcx.has_updated(state) & (gcx.metrics(state)["gradient_step"] > 0)


def apply_if_finite(inner, max_consecutive_errors):
    return viewed(gcx.skip_nonfinite(inner, max_consecutive_skips=max_consecutive_errors))


def microbatch(
    fun,
    argnums,
    microbatch_size,
    accumulator=Type.SUM,
    *,
    argnames=(),
    in_axes=0,
    num_real_microbatches=None,
):
    names = {Type.SUM: "sum", Type.CONCAT: "concatenate"}
    words = jax.tree.map(lambda kind: names.get(kind, "mean"), accumulator)
    argnums = [argnums] if isinstance(argnums, int) else list(argnums)
    argnames = [argnames] if isinstance(argnames, str) else list(argnames)

    def run(*args, **kwargs):
        given = [*args, *kwargs.values()]
        places = argnums + [len(args) + list(kwargs).index(name) for name in argnames]
        axes = [in_axes] * len(places) if isinstance(in_axes, int) else in_axes

        def moved(parts, sources, targets):
            parts = zip(parts, sources, targets, strict=True)
            return [jax.tree.map(lambda x, i=i, j=j: jnp.moveaxis(x, i, j), p) for p, i, j in parts]

        def loss(zero, rows):
            back = dict(zip(places, moved(rows, [0] * len(axes), axes), strict=True))
            full = [back.get(i, x) for i, x in enumerate(given)]
            options = dict(zip(kwargs, full[len(args) :], strict=True))
            return zero, fun(*full[: len(args)], **options)

        rows = moved([given[i] for i in places], axes, [0] * len(axes))
        size = jax.tree.leaves(rows)[0].shape[0]
        options = {"has_aux": True, "num_real_microbatches": num_real_microbatches}
        divides = size % (microbatch_size or size) == 0
        num = size // (microbatch_size or size) if divides else size + 1  # raises
        options["aux_reduction"] = words
        return gcx.microbatched_value_and_grad(loss, num, **options)(0.0, rows)[0][1]

    return run


CLIPPING, MICRO = "optax.transforms._clipping", "optax.microbatching._microbatching"
REPLACES = {
    f"{CLIPPING}:clip": gcx.clip_by_value,
    f"{CLIPPING}:clip_by_block_rms": gcx.clip_by_block_rms,
    f"{CLIPPING}:clip_by_global_norm": gcx.clip_by_global_norm,
    f"{CLIPPING}:adaptive_grad_clip": gcx.adaptive_grad_clip,
    "optax.transforms._accumulation:MultiSteps": MultiSteps,
    "optax.transforms._conditionality:apply_if_finite": apply_if_finite,
    f"{MICRO}:microbatch": microbatch,
}
TESTS = [
    "transforms/_clipping_test.py",
    "transforms/_accumulation_test.py",
    "transforms/_conditionality_test.py",
    "microbatching/_microbatching_test.py",
]
PASSED = 63
DIFFERENCES = {
    "test_clip_by_block_rms": "The RMS is one rounding below the threshold: 0.9999999, not 1.",
    "test_apply_if_finite_s": (
        "After too many skipped steps, `skip_nonfinite` sets `guard_failed` and continues to skip, "
        "whereas Optax applies the NaN."
    ),
    "test_in_axes_invariant3": "Only an array with rows for each example can be concatenated.",
    "test_in_axes_with_argnames3": "The same.",
}
