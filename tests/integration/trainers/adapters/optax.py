"""Optax: clips and `skip_nonfinite` in the place of its clips and of `apply_if_finite`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import gradclip_jax as gcx


class State(NamedTuple):
    guard: Any
    last_finite = property(lambda self: self.guard.consecutive_skips == 0)
    notfinite_count = property(lambda self: self.guard.consecutive_skips)
    total_notfinite = property(lambda self: self.guard.inner_guards[0].skipped["nonfinite"])


def apply_if_finite(inner, max_consecutive_errors):
    tx = gcx.skip_nonfinite(inner, max_consecutive_skips=max_consecutive_errors)

    def update(grads, state, params=None, **extra_args):
        updates, guard = tx.update(grads, state.guard, params, **extra_args)
        return updates, State(guard)

    return optax.GradientTransformationExtraArgs(lambda params: State(tx.init(params)), update)


CLIPPING = "optax.transforms._clipping"
REPLACES = {
    f"{CLIPPING}:clip": gcx.clip_by_value,
    f"{CLIPPING}:clip_by_block_rms": gcx.clip_by_block_rms,
    f"{CLIPPING}:clip_by_global_norm": gcx.clip_by_global_norm,
    f"{CLIPPING}:adaptive_grad_clip": gcx.adaptive_grad_clip,
    "optax.transforms._conditionality:apply_if_finite": apply_if_finite,
}
TESTS = ["transforms/_clipping_test.py", "transforms/_conditionality_test.py"]
PASSED = 14
FAILED = "`skip_nonfinite` sets `guard_failed` and skips on, where Optax applies the NaN."
DIFFERENCES = {
    "test_clip_by_block_rms": "The RMS is one rounding below the threshold: 0.9999999, not 1.",
    "test_apply_if_finite_sgd": FAILED,
    "test_apply_if_finite_sgd_extra_args": FAILED,
    "test_apply_if_finite_stateful_sgd": FAILED,
}


def gain(part):
    if part.__name__ != "apply_if_finite":
        return ""
    tx, params = part(optax.sgd(1.0), 5), jnp.ones(2)
    state = tx.init(params)
    for _ in range(7):
        updates, state = tx.update(jnp.full(2, jnp.nan), state, params)
        params = params + updates
    return f"parameters {params[0]} after 7 NaN in a row, 5 allowed"
