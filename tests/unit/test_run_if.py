"""`apply_gradients`, and the types of what a step returns."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
from accumulation_cases import gradients, params_like

X = jnp.array([1.0, -2.0, 3.0])


def test_a_state_keeps_its_dtypes_whatever_the_step_returns():
    carry = {
        "half": jnp.ones((2,), jnp.bfloat16),
        "count": jnp.int8(3),
        "complex": jnp.ones((2,), jnp.complex64),
        "key": jax.random.key(0),
        "none": None,
    }

    def update(updates, carry, params=None):
        return updates, {
            "half": carry["half"].astype(jnp.float32) * 3,
            "count": carry["count"].astype(jnp.int32) + 1,
            "complex": carry["complex"].real,
            "key": jax.random.split(carry["key"])[0],
            "none": None,
        }

    inner = optax.GradientTransformation(lambda params: carry, update)
    tx = gcx.accumulate_gradients(inner, 2)
    state, step = tx.init(X), jax.jit(tx.update)
    for half, count in ((1, 3), (3, 4)):
        _, state = step(X, state, X)
        chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_opt_state, carry)
        assert float(state.inner_opt_state["half"][0]) == half
        assert int(state.inner_opt_state["count"]) == count


def test_apply_gradients_rounds_low_precision_parameters_once_under_strict_promotion():
    # The update, four times the gradient, is not rounded to bfloat16 before it is added.
    tx = gcx.accumulate_gradients(optax.sgd(4.0), 2)
    step = jax.jit(functools.partial(gcx.apply_gradients, tx))
    params = params_like("bfloat16")
    exact = jax.tree.map(jnp.float32, params)
    state, exact_state = tx.init(params), tx.init(exact)
    with compat.strict():
        for i in range(2):
            grads = gradients(i, params)
            params, state = step(grads, state, params)
            exact, exact_state = step(jax.tree.map(jnp.float32, grads), exact_state, exact)
    chex.assert_trees_all_equal(params, jax.tree.map(jnp.bfloat16, exact), strict=True)


def test_a_held_step_returns_the_parameters_themselves():
    tx = gcx.accumulate_gradients(optax.adam(0.1), 2)
    params = params_like()
    held, _ = gcx.apply_gradients(tx, gradients(0, params), tx.init(params), params)
    assert all(a is b for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(params), strict=True))


@pytest.mark.parametrize("every", [None, 2])
def test_a_parameter_without_gradient_stays_as_it_is(every):
    params = {"w": X, "n": jnp.array([1, 2])}
    grads = {"w": X, "n": np.zeros((2,), jax.dtypes.float0)}
    tx = optax.masked(optax.sgd(0.5), {"w": True, "n": False})
    tx = tx if every is None else gcx.accumulate_gradients(tx, every)
    after, state = params, tx.init(params)
    for _ in range(every or 1):
        after, state = jax.jit(lambda p, s: gcx.apply_gradients(tx, grads, s, p))(after, state)
    np.testing.assert_array_equal(after["w"], 0.5 * X)
    np.testing.assert_array_equal(after["n"], params["n"])
