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


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("value", [1e-16, 3.0, 1e20, 4e21, np.inf, np.nan])
def test_a_norm_of_one_element(shape, value):
    x = jnp.full(shape, value)
    for produce in (lambda x: x, lambda x: -x, lambda x: -2.0 * x * 0.5):
        norm = jax.jit(lambda x, produce=produce: gcx.global_norm(produce(x)))(x)
        np.testing.assert_allclose(norm, value, rtol=2e-6)


@pytest.mark.parametrize("fun", [jax.hessian, lambda f: jax.jacrev(jax.grad(f))])
def test_second_derivatives_of_a_norm_where_an_element_is_zero(fun):
    def exact_hessian(x):
        norm = np.linalg.norm(x)
        return np.eye(x.size) / norm - np.outer(x, x) / norm**3

    for x in ([3.0, 0.0], [0.0, 0.0, 2.0], [1.0, 2.0]):
        x = np.array(x)
        got = jax.jit(fun(gcx.global_norm))(jnp.float32(x))
        np.testing.assert_allclose(got, exact_hessian(x), atol=1e-6)

    def clipped(x):
        return jnp.sum(gcx.clip_grad_norm(x, 1.0)[0] * jnp.arange(1.0, x.size + 1))

    x, step = np.array([3.0, 0.0, 4.0]), 1e-2
    shifts = step * np.eye(3)
    gradient = jax.jit(jax.grad(clipped))
    want = [
        (gradient(jnp.float32(x + s)) - gradient(jnp.float32(x - s))) / (2 * step) for s in shifts
    ]
    np.testing.assert_allclose(jax.jit(fun(clipped))(jnp.float32(x)), want, atol=1e-4)
