"""Tunix: `accumulate_gradients` in the place of the sums and the division of its accumulator."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gradclip_jax as gcx


class GradientAccumulator(nnx.Module):
    def __init__(self, model, wrt, *, allocate_grads=True, **options):
        params = nnx.state(model, wrt) if allocate_grads else nnx.State({})
        self._param_dtypes = nnx.data(params.map(lambda path, p: p.dtype))
        self.tx = gcx.accumulate_gradients(optax.identity(), 2**31 - 1, **options)
        total, weight = self.tx.init(params).accumulation.gradient
        self.grads, self.denom = nnx.data(total), nnx.Variable(weight)

    def window(self):
        state = self.tx.init(self.grads)
        gradient = state.accumulation.gradient._replace(total=self.grads, weight=self.denom[...])
        inside = state.accumulation._replace(mini_step=jnp.int32(1), gradient=gradient)
        return state._replace(accumulation=inside)

    def add(self, grads, denom=None):
        denom = jnp.float32(1) if denom is None else denom.astype(jnp.float32)
        means = jax.tree.map(lambda g: g / denom, grads)
        self.store(self.tx.update(means, self.window(), weight=denom)[1])

    def get(self):
        means, _ = gcx.flush(self.tx, self.window(), self.grads)
        result = jax.tree.map(jnp.copy, self.grads)
        nnx.update(
            result, jax.tree.map(lambda x, dtype: x.astype(dtype), means, self._param_dtypes)
        )
        return result

    def reset(self):
        self.store(self.tx.init(self.grads))

    def store(self, state):
        total, weight = state.accumulation.gradient
        nnx.update(self.grads, total)
        self.denom.set_value(weight)


REPLACES = {"tunix.sft.peft_trainer:GradientAccumulator": GradientAccumulator}
TESTS = ["tests/sft/peft_trainer_test.py::GradientAccumulatorTest"]
PASSED = 27
DIFFERENCES = {}
