"""Optax: `accumulate_gradients` in the place of `MultiSteps`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from measures import GRADS, error_of_mean

import gradclip_jax as gcx

GUARDS = {None: lambda tx: tx, optax.skip_not_finite: gcx.skip_nonfinite}


class State(NamedTuple):
    wrapper: Any
    mini_step = property(lambda self: gcx.metrics(self.wrapper)["mini_step"])
    acc_grads = property(lambda self: self.wrapper.accumulation.gradient.total)


class MultiSteps:
    def __init__(
        self, opt, every_k_schedule, use_grad_mean=True, should_skip_update_fn=None, **options
    ):
        options["reduction"] = "mean" if use_grad_mean else "sum"
        accumulation = gcx.accumulate_gradients(opt, every_k_schedule, **options)
        self.tx = GUARDS[should_skip_update_fn](accumulation)

    def init(self, params):
        return State(self.tx.init(params))

    def update(self, grads, state, params=None, **extra_args):
        updates, wrapper = self.tx.update(grads, state.wrapper, params, **extra_args)
        return updates, State(wrapper)

    def gradient_transformation(self):
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def has_updated(self, state):
        return gcx.has_updated(state) & (gcx.metrics(state)["gradient_step"] > 0)


REPLACES = {"optax.transforms._accumulation:MultiSteps": MultiSteps}
TESTS = ["transforms/_accumulation_test.py"]
PASSED = 12
DIFFERENCES = {}


def gain(part):
    tx = part(optax.identity(), len(GRADS))
    params = jnp.zeros(1_000, jnp.bfloat16)
    state = tx.init(params)
    for grad in GRADS:
        mean, state = tx.update(grad, state, params)
    return error_of_mean(mean)
