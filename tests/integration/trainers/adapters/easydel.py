"""EasyDeL: `microbatched_value_and_grad` in the place of its loop over micro-batches."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient
from measures import GRADS, error_of_mean

import gradclip_jax as gcx


def minibatch_call(state, batch, minibatch_size, grad_fn):
    leaves, treedef = jax.tree.flatten(batch)
    sizes = [x.shape[0] for x in leaves if getattr(x, "shape", ())]
    size = max(sizes, key=sizes.count)
    rows = {i: x for i, x in enumerate(leaves) if getattr(x, "shape", ())[:1] == (size,)}

    def loss(params, rows):  # its value and its gradient are those of `grad_fn`
        whole = [rows.get(i, x) for i, x in enumerate(leaves)]
        result = grad_fn(stop_gradient(params), treedef.unflatten(whole))
        (value, metrics), grads = stop_gradient(result)
        change = jax.tree.map(lambda p: p - stop_gradient(p), params)
        return value + optax.tree.vdot(grads, change), metrics

    options = {"has_aux": True, "aux_reduction": "mean"}
    value_and_grad = gcx.microbatched_value_and_grad(loss, size // minibatch_size, **options)
    (_, metrics), grads = value_and_grad(state.graphstate, rows)
    return grads, metrics


REPLACES = {"easydel.trainers.training_utils:minibatch_call": minibatch_call}
TESTS = ["tests/trainers/test_training_utils_gradient_accumulation.py"]
PASSED = 4
DIFFERENCES = {}


def gain(part):
    def loss(params, batch):
        return jnp.mean(batch["x"] @ params), {}

    state = SimpleNamespace(graphstate=jnp.zeros(1_000, jnp.bfloat16))
    grads, _ = part(state, {"x": GRADS}, 1, jax.value_and_grad(loss, has_aux=True))
    return error_of_mean(grads)
