"""Tunix: `accumulate_gradients` in the place of the sums and the division of its accumulator."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from measures import GRADS, error_of_mean

import gradclip_jax as gcx


class GradientAccumulator(nnx.Module):
    sums = property(lambda self: self.state.accumulation.gradient)
    grads = property(lambda self: self.sums.total, lambda self, x: nnx.update(self.sums.total, x))
    denom = property(lambda self: self.sums.weight)

    def __init__(self, model, wrt, *, allocate_grads=True, **options):
        params = nnx.state(model, wrt) if allocate_grads else nnx.State({})
        self.wrt = wrt
        self.dtypes = nnx.data(jax.tree.map(lambda p: p.dtype, nnx.as_pure(params)))
        self.tx = gcx.accumulate_gradients(optax.identity(), 2**31 - 1, **options)
        self.state = nnx.data(jax.tree.map(nnx.Variable, nnx.as_pure(self.tx.init(params))))

    def add(self, grads, denom=1.0):
        means = jax.tree.map(lambda g: g / denom, nnx.as_pure(grads))
        self.store(self.tx.update(means, nnx.as_pure(self.state), weight=denom)[1])

    def get(self):
        means, _ = gcx.flush(self.tx, nnx.as_pure(self.state), nnx.as_pure(self.grads))
        return jax.tree.map(lambda x, like: self.wrt(x.astype(like)), means, self.dtypes)

    def reset(self):
        self.store(self.tx.init(nnx.as_pure(self.grads)))

    def store(self, state):
        nnx.update(self.state, nnx.state(jax.tree.map(nnx.Variable, state)))


REPLACES = {"tunix.sft.peft_trainer:GradientAccumulator": GradientAccumulator}
TESTS = ["tests/sft/peft_trainer_test.py::GradientAccumulatorTest"]
# `test_dist_training` passes as well, but only in a process with exactly four devices.
TESTS_ON_8 = ["tests/sft/peft_trainer_test.py::PeftTrainerTest::test_compile_once"]
PASSED = 27
TWICE = "Tunix places only sums and denominator on its mesh: the first step places the counters."
DIFFERENCES = {"test_compile_once": TWICE}


def gain(part):
    model = nnx.Linear(1_000, 1, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    accumulator, params = part(model, nnx.Param), nnx.state(model, nnx.Param)
    for grad in GRADS:
        accumulator.add(jax.tree.map(lambda p, g=grad: g.reshape(p.shape), params))
    return error_of_mean(jax.tree.leaves(accumulator.get())[0])
