"""What the tests of clips share: steps, and comparisons with oracles and the authors' numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import oracles
import recorded


def step(tx, grads, params=None):
    """One jitted update from a fresh state."""
    return jax.jit(tx.update)(grads, tx.init(grads), params)


@functools.partial(jax.jit, static_argnums=0)
def _train(tx, grads, params):
    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (updates, state, params)

    return jax.lax.scan(step, (params, tx.init(params)), grads)[1]


def train(tx, grads, params=None):
    """The updates, states and parameters after each step, as NumPy arrays."""
    grads = jax.tree.map(jnp.asarray, grads)
    if params is None:
        params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), grads)
    return jax.tree.map(np.asarray, _train(tx, grads, params))


def recordings(method, *left_out):
    """A parameter `run` with what the authors' code gave."""
    names = [name for name in recorded.names(method) if name not in left_out]
    return pytest.mark.parametrize(
        "run", [recorded.recording(method, name) for name in names], ids=names
    )


def assert_close(updates, exact, rtol=1e-6):
    """Compare with the leaves that an oracle gives."""
    for got, wanted in zip(jax.tree.leaves(updates), exact, strict=True):
        eps = oracles.eps(got.dtype)
        step = float(jnp.finfo(got.dtype).tiny) * eps  # of subnormal numbers, rounded downwards
        np.testing.assert_allclose(oracles.wide(got), wanted, rtol=max(rtol, eps), atol=step)


def assert_same_bits(updates, grads):
    for got, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()
