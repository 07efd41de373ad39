"""axlearn: `skip_spikes` and `clip_grad_norm` in the place of `skip_and_clip_by_global_norm`."""

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
    inner_state = property(lambda self: self.guard.inner_state)
    nonvalid_count = property(lambda self: sum(self.guard.guards[0].skipped.values()))
    rules = property(lambda self: self.guard.guards[0].rule_state.rules)
    moments = property(lambda self: jax.tree.leaves(self.rules) or [None] * 3)
    count = property(lambda self: self.moments[0])
    grad_norm_ema = property(lambda self: self.moments[1])
    grad_norm_square_ema = property(lambda self: self.moments[2])


def drop_norm_rule(drop_norm, decay):
    def update(norm, moments, param_norm):
        count, mean, square = moments
        limits = drop_norm(count=count, mean=mean, stddev=jnp.sqrt(square - mean**2))
        limit = jnp.min(jnp.stack(list(limits.values())))
        rate = (norm < limit) * (1 - decay) / (1 - decay ** (count + 1))
        mean, square = mean + rate * (norm - mean), square + rate * (norm**2 - square)
        return limit, (count + (norm < limit), mean, square)

    return gcx.thresholds.Rule(lambda _: (jnp.int32(0), jnp.float32(1), jnp.float32(1)), update)


def skip_and_clip_by_global_norm(inner, drop_norm=None, max_norm=None, grad_norm_ema_decay=None):
    inner, limit = maybe_instantiate(inner), maybe_instantiate(drop_norm or LARGEST)
    norm = drop_norm_rule(limit, grad_norm_ema_decay) if callable(limit) else limit

    def guard(params):  # `inner` receives more than the values of the parameters
        def update(grads, state, _):
            clipped, _ = gcx.clip_grad_norm(grads, max_norm or LARGEST)
            return inner.update(clipped, state, params)

        tx = optax.GradientTransformation(lambda _: inner.init(params), update)
        return gcx.skip_spikes(tx, norm=norm)

    def init(params):
        values = jax.tree.map(lambda p: getattr(p, "value", p), params)
        return SkipClipState(guard(params).init(values))

    def update(grads, state, params):
        updates, state = guard(params).update(grads, state.guard)
        return updates, SkipClipState(state)

    def partition(specs):
        state = gcx.skip_spikes(optax.identity(), norm=norm).init({})  # all of it are scalars
        state = jax.tree.map(lambda x: OptStateSpec(x.shape, x.dtype, PartitionSpec()), state)
        return SkipClipState(state._replace(inner_state=inner.partition(specs)))

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
