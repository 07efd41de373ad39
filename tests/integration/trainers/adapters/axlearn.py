"""axlearn: `skip_spikes` around a clip in the place of `skip_and_clip_by_global_norm`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from axlearn.common.config import maybe_instantiate
from axlearn.common.optimizer_base import OptStateSpec, PartitionedGradientTransformation
from jax.sharding import PartitionSpec
from measures import after_a_nan

import gradclip_jax as gcx

LARGEST = float(jnp.finfo(jnp.float32).max)


class SkipClipState(NamedTuple):
    guard: Any
    inner_state = property(lambda self: self.guard.inner_state[1])
    nonvalid_count = property(lambda self: sum(self.guard.guards[0].skipped.values()))
    moments = property(lambda self: jax.tree.leaves(self.rules["norm"]) or [None] * 3)
    rules = property(lambda self: self.guard.guards[0].rule_state.rules)
    count = property(lambda self: self.moments[0])
    grad_norm_ema = property(lambda self: self.moments[1])
    grad_norm_square_ema = property(lambda self: self.moments[2])


def skip_and_clip_by_global_norm(inner, drop_norm=None, max_norm=None, grad_norm_ema_decay=0.0):
    inner, limits = maybe_instantiate(inner), maybe_instantiate(drop_norm or LARGEST)

    def limit_and_moments(norm, moments, param_norm):
        count, mean, square = moments
        named = limits(count=count, mean=mean, stddev=jnp.sqrt(square - mean**2))
        limit = jnp.min(jnp.stack(list(named.values())))
        rate = (1 - grad_norm_ema_decay) / (1 - grad_norm_ema_decay ** (count + 1))
        moved = count + 1, mean + rate * (norm - mean), square + rate * (norm**2 - square)
        return limit, jax.tree.map(lambda x, y: jnp.where(norm < limit, x, y), moved, moments)

    def first(norm):
        return jnp.int32(0), jnp.float32(1), jnp.float32(1)

    norm = gcx.thresholds.Rule(first, limit_and_moments) if callable(limits) else limits

    def guard(params, init=inner.init):
        optimizer = (lambda _: init(params), lambda g, s, _: inner.update(g, s, params))
        clip = gcx.clip_by_global_norm(max_norm or LARGEST)
        return gcx.skip_spikes(
            optax.chain(clip, optax.GradientTransformation(*optimizer)), norm=norm
        )

    def init(params):
        values = jax.tree.map(lambda p: getattr(p, "value", p), params)
        return SkipClipState(guard(params).init(values))

    def update(grads, state, params):
        updates, state = guard(params).update(grads, state.guard)
        return updates, SkipClipState(state)

    def partition(specs):
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
        state = jax.eval_shape(guard(specs, lambda _: ()).init, shapes)
        state = jax.tree.map(lambda x: OptStateSpec(x.shape, x.dtype, PartitionSpec()), state)
        inner_state = state.inner_state[0], inner.partition(specs)
        return SkipClipState(state._replace(inner_state=inner_state))

    return PartitionedGradientTransformation(init, update, partition)


REPLACES = {
    "axlearn.common.optimizers:SkipClipState": SkipClipState,
    "axlearn.common.optimizers:skip_and_clip_by_global_norm": skip_and_clip_by_global_norm,
}
TESTS = ["axlearn/common/optimizers_test.py", "-k", "gradient_skipping"]
PASSED = 36
DIFFERENCES = {
    "test_gradient_skipping_backward_compatibility": (
        "The state of older versions is restored with `convert_state`, not by the names of its fields."
    )
}


def gain(part):
    if isinstance(part, type):
        return ""
    sgd = optax.sgd(1.0)
    tx = part(PartitionedGradientTransformation(sgd.init, sgd.update, lambda specs: ()))
    tx = optax.GradientTransformation(tx.init, tx.update)
    return after_a_nan(optax.with_extra_args_support(tx))
