"""The loss scale: what it does to loss and gradient, when it moves, and in what it may stand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx


def scale_of(state):
    return float(gcx.metrics(state)["loss_scale"])


# The loss


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_value_is_the_true_loss_and_the_gradient_is_scaled(dtype):
    state = gcx.dynamic_loss_scale(optax.sgd(1.0), init_scale=1024.0).init(jnp.zeros(2))

    def loss(x):
        return gcx.scale_loss(state, jnp.sum(x * x))

    x = jnp.array([3.0, -4.0], dtype)
    value, grads = jax.jit(jax.value_and_grad(loss))(x)
    assert value == 25.0 and value.dtype == jnp.float32
    assert grads.dtype == x.dtype and grads.tolist() == [6144.0, -8192.0]
    assert jax.jvp(loss, (x,), (x,))[1] == 51200.0


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(optax.identity(), gcx.accumulate_gradients(tx, 2)),
        lambda tx: optax.partition({"a": tx, "b": optax.sgd(1.0)}, {"w": "a", "v": "b"}),
    ],
)
def test_the_scale_is_found_in_any_state(around):
    params = {"w": jnp.zeros(2), "v": jnp.zeros(2)}
    state = around(gcx.dynamic_loss_scale(optax.sgd(1.0), init_scale=32.0)).init(params)
    assert jax.grad(lambda x: gcx.scale_loss({"train": (state, params)}, x))(1.0) == 32.0
    assert scale_of(state) == 32.0


# When the scale moves


def test_the_scale_falls_at_a_bad_step_and_grows_after_good_ones_in_a_row_within_its_bounds():
    stream = np.float32([1, 1, 1, 1, 1, 1, np.nan, 1, 1, np.inf, 1, 1, 1, 1e30, np.nan, np.nan])
    for first, expected in (
        (2.0**24, np.float32(2.0**24) / [1, 1, 1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 2, 4, 8, 16]),
        (1.0, [1, 1, 2, 2, 2, 4, 2, 2, 2, 1, 1, 1, 2, 1, 1, 1]),
    ):
        tx = gcx.dynamic_loss_scale(optax.adam(0.1), init_scale=first, growth_interval=3)
        state, update, scales = tx.init(jnp.zeros(2)), jax.jit(tx.update), []
        for grad in stream:
            updates, state = update(jnp.full(2, grad), state)
            scales.append(scale_of(state))
            assert jnp.isfinite(updates).all()
        assert scales == list(expected)
        found = gcx.metrics(state)
        assert (found["skipped_nonfinite"], found["guard_failed"]) == (5, first == 1.0)


# What the inner optimizer sees


@pytest.mark.parametrize(("dtype", "check"), [("float16", "step"), ("bfloat16", "gradient")])
def test_gradients_are_unscaled_in_float32_and_updates_keep_their_dtype(dtype, check):
    # It steps on the gradient, and keeps it in float32.
    memory = optax.GradientTransformation(
        lambda params: jnp.zeros(params.shape), lambda g, state, params=None: (g, jnp.float32(g))
    )
    tx = gcx.dynamic_loss_scale(memory, check=check)
    params = jnp.zeros(3, dtype)
    scaled = jnp.array([1.0, 2.0**-14, 2.0**15], dtype)
    updates, state = jax.jit(tx.update)(scaled, tx.init(params), params)
    seen = state.inner_state
    assert seen.dtype == jnp.float32 and seen.tolist() == [2.0**-16, 2.0**-30, 0.5]
    chex.assert_trees_all_equal(updates, seen.astype(dtype))


@pytest.mark.parametrize("check", ["step", "gradient"])
def test_an_overflow_of_float16_is_seen_where_the_rounding_could_be_left_out(check):
    tx = gcx.dynamic_loss_scale(optax.sgd(1.0, momentum=0.9), init_scale=4.0, check=check)
    params = jnp.zeros(3, jnp.float16)

    def step(state, wide):
        return gcx.apply_gradients(tx, wide.astype(jnp.float16), state, params)

    step = jax.jit(step)
    after, state = step(tx.init(params), jnp.array([1.0, 7e4, 0.0]))
    assert not after.any() and scale_of(state) == 2.0
    assert not gcx.diagnostics.nonfinite_leaves(state._replace(grad_norm=()))
    after, state = step(state, jnp.array([1.0, 6e4, 0.0]))
    assert after.tolist() == [-0.5, -3e4, 0.0]


# With other guards and with accumulation


def test_other_guards_inside_see_unscaled_gradients_and_the_true_loss():
    tx = gcx.dynamic_loss_scale(
        gcx.skip_spikes(gcx.skip_nonfinite(optax.sgd(1.0)), norm=10.0, loss=2.5), init_scale=2.0**10
    )
    params = jnp.array([3.0, 4.0])
    state = tx.init(params)

    @jax.jit
    def step(state, factor):
        loss, grads = jax.value_and_grad(lambda p: gcx.scale_loss(state, p @ p / 10))(params)
        return tx.update(factor * grads, state, params, value=loss)[1]

    state = step(state, 1.0)
    found = gcx.metrics(state)
    assert found["grad_norm"] == 1.0
    assert found["skipped_large_norm"] == found["skipped_large_loss"] == 0
    # A spike is no fault of the scale.
    state = step(state, 100.0)
    assert gcx.metrics(state)["skipped_large_norm"] == 1 and scale_of(state) == 2.0**10
