"""Norms are correct whatever operation produced the gradient in the same program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx

ENDS = [2e-16, 3e-10, 1.0, 1e20, 4e20]  # no element behind a producer is below 3e-17
A, B = np.array([1.0, -3.0, 0.5, 2.0]), np.array([0.25, 1.0, -2.0, 1.0])

# From two vectors of the size under test to the gradient; every function is linear in its scale.
PRODUCERS = {
    "itself": lambda a, b: a,
    "negative scale": lambda a, b: -0.5 * a,
    "product": lambda a, b: a * jnp.sign(b),
    "fused multiply-add": lambda a, b: a * 0.5 - b * 0.25,
    "cast": lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32),
    "where": lambda a, b: jnp.where(b > 0, a, -a),
    "scatter": lambda a, b: jnp.zeros_like(a).at[jnp.array([0, 1, 1, 2])].add(-a),
    "broadcast of a scalar": lambda a, b: jnp.full((3, 4), -a[1]),
    "dot": lambda a, b: -jnp.dot(a.reshape(2, 2), jnp.eye(2), precision="highest"),
    "sum over an axis": lambda a, b: -jnp.stack([a, b]).sum(0),
    "cumulative sum": lambda a, b: -jnp.cumsum(a),
    "scan": lambda a, b: jax.lax.scan(lambda c, x: (c, -x), 0.0, a)[1],
    "gradient": lambda a, b: jax.grad(lambda x: -jnp.vdot(x, a))(jnp.ones_like(a)),
}


def exact(values):
    return np.linalg.norm(np.asarray(values, np.float64).ravel())


@pytest.mark.parametrize("name", PRODUCERS)
def test_a_norm_behind_a_producer_is_exact_at_both_ends_of_the_range(name):
    produce = PRODUCERS[name]

    @jax.jit
    def together(a, b):
        grads = produce(a, b)
        clipped, state = gcx.clip_by_global_norm(1.0).update(grads, None)
        return grads, gcx.global_norm(grads), clipped, state.grad_norm

    for size in ENDS:
        a, b = (jnp.asarray(x * size, jnp.float32) for x in (A, B))
        grads, norm, clipped, reported = together(a, b)
        want = exact(grads)
        np.testing.assert_allclose([norm, reported], want, rtol=2e-6)
        np.testing.assert_allclose(exact(clipped), min(1.0, want), rtol=4e-6)


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_norm_of_one_element(shape):
    @jax.jit
    def norms(x):
        return [gcx.global_norm(y) for y in (x, -x, -2.0 * x * 0.5)]

    for value in (1e-16, 3.0, 1e20, 4e21, np.inf, np.nan):
        np.testing.assert_allclose(norms(jnp.full(shape, value)), [value] * 3, rtol=2e-6)
