"""What the tests of clips share: one step, and comparisons with the oracles."""

import jax
import jax.numpy as jnp
import numpy as np

import oracles


def step(tx, grads, params=None, state=None):
    """One jitted update, from a fresh state unless there is one."""
    state = tx.init(grads if params is None else params) if state is None else state
    return jax.jit(tx.update)(grads, state, params)


def assert_close(updates, exact, rtol=1e-6):
    """Compare with the leaves that an oracle gives."""
    for got, wanted in zip(jax.tree.leaves(updates), exact, strict=True):
        eps = oracles.eps(got.dtype)
        step = float(jnp.finfo(got.dtype).tiny) * eps  # of subnormal numbers, rounded downwards
        np.testing.assert_allclose(oracles.wide(got), wanted, rtol=max(rtol, eps), atol=step)


def assert_same_bits(updates, grads):
    for got, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()
