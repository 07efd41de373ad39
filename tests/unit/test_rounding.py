"""Stochastic rounding of parameters in bfloat16: its mean, its exact cases, devices and windows."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import gradclip_jax as gcx
from guard_cases import SHARDS, WHOLE, saturated, sharded


@functools.cache
def program(seed=0):
    tx = gcx.round_stochastically(seed)

    @jax.jit
    def step(params, updates, state):
        return gcx.apply_gradients(tx, updates, state, params)

    return tx, step


def applied(params, updates, *, seed=0, step=0):
    """The parameters after one step, as they are in bfloat16."""
    tx, run = program(seed)
    state = tx.init(params)._replace(step=jnp.int32(step))
    return run(jnp.asarray(params, jnp.bfloat16), jnp.asarray(updates, jnp.float32), state)[0]


def neighbours(exact):
    """The numbers of bfloat16 at or toward zero from float32 numbers, and the next from zero."""
    bits = np.asarray(exact, np.float32).view(np.uint32)
    low = bits & np.uint32(0xFFFF0000)
    high = np.where(bits == low, low, low + np.uint32(0x10000)).astype(np.uint32)
    return low.view(np.float32), high.view(np.float32)


@pytest.mark.parametrize(
    ("param", "update"),
    [(1.0, 0.001), (-3.0, 0.0021), (1e-3, -2.5e-3), (1e-20, 1e-22), (3e38, -1e35)],
)
def test_the_mean_over_many_is_the_exact_sum(param, update):
    size = 1 << 14
    old = np.full(size, param, ml_dtypes.bfloat16)
    new = np.asarray(applied(old, np.full(size, update)), np.float64)
    # The sum is taken in float32, and that is what is rounded.
    exact = np.float32(old[0]) + np.float32(update)
    low, high = map(float, neighbours(exact))
    assert set(new) == {low, high}
    share = (float(exact) - low) / (high - low)
    deviation = abs(high - low) * (share * (1 - share) / size) ** 0.5
    assert abs(new.mean() - float(exact)) < 5 * deviation


def test_an_update_of_zero_leaves_every_finite_number_as_it_is():
    params = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    size = np.abs(params.astype(np.float32))
    # XLA takes subnormal numbers for zero.
    params = params[np.isfinite(size) & ((size == 0) | (size >= np.finfo(np.float32).tiny))]
    new = applied(params, np.zeros(params.shape))
    np.testing.assert_array_equal(np.float32(new), np.float32(params))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad):
    np.testing.assert_array_equal(np.float32(applied(np.ones(64), np.full(64, bad))), bad)
    np.testing.assert_array_equal(np.float32(applied(np.full(64, bad), np.ones(64))), bad)


def test_seeds_steps_and_leaves_draw_bits_of_their_own():
    ones, update = jnp.ones(256), jnp.full(256, 1e-3)
    tx, run = program()
    params = {"a": ones.astype(jnp.bfloat16), "b": ones.astype(jnp.bfloat16)}
    both, _ = run(params, {"a": update, "b": update}, tx.init(params))
    later, again = (applied(ones, update, step=1) for _ in range(2))
    rows = [later, applied(ones, update, seed=1), *both.values()]
    assert len({np.float32(x).tobytes() for x in rows}) == 4
    np.testing.assert_array_equal(np.float32(again), np.float32(later))


def test_derivatives_go_straight_through():
    tx = gcx.round_stochastically()
    params = jnp.ones(4, jnp.bfloat16)

    def loss(updates):
        new, _ = gcx.apply_gradients(tx, updates, tx.init(params), params)
        return jnp.sum(new.astype(jnp.float32) * jnp.arange(4.0))

    def both(updates):
        return jax.grad(loss)(updates), jax.jvp(loss, (updates,), (updates,))[1]

    reverse, forward = jax.jit(both)(jnp.full(4, 1e-3))
    np.testing.assert_array_equal(reverse, jnp.arange(4.0))
    assert float(forward) == pytest.approx(6e-3, rel=2.0**-8)


# --- windows and guards ------------------------------------------------------------------------


def test_held_and_skipped_steps_change_neither_parameters_nor_the_count():
    inner = optax.chain(optax.sgd(1.0), gcx.round_stochastically())
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(inner, 2))
    first = params = jnp.linspace(1, 2, 64).astype(jnp.bfloat16)
    state = tx.init(params)
    apply = jax.jit(gcx.apply_gradients, static_argnums=0)
    for grad in (1e-3, jnp.nan, 1e-3, 1e-3):
        params, state = apply(tx, jnp.full(64, grad), state, params)
    assert state.inner_state[1].step == 1
    # The one step that was taken is that of the optimizer alone, with the mean of the window.
    alone, _ = apply(inner, jnp.full(64, 1e-3), inner.init(first), first)
    chex.assert_trees_all_equal(params, alone)


# --- devices -----------------------------------------------------------------------------------


def stepped(params, updates):
    tx = gcx.round_stochastically()
    return gcx.apply_gradients(tx, updates, tx.init(params), params)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_get_the_bits_of_one_device(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    params = {"w": jnp.ones((16, 4), jnp.bfloat16), "b": jnp.ones(16, jnp.bfloat16)}
    updates = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3), params)
    expected = jax.jit(stepped)(params, updates)
    shardings = {"w": NamedSharding(mesh, SHARDS), "b": NamedSharding(mesh, WHOLE)}
    with jax.set_mesh(mesh):
        placed = [jax.device_put(tree, shardings) for tree in (params, updates)]
        compiled = jax.jit(stepped).lower(*placed).compile()
        found = compiled(*placed)
    chex.assert_trees_all_equal(found, expected)
    assert found["w"].sharding.is_equivalent_to(shardings["w"], 2)
    text = compiled.as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    assert "[16,4]" not in text  # each device draws the bits of its own rows


def test_replicas_stay_alike_in_shard_map_and_shards_draw_their_own():
    params = {"w": jnp.ones((16, 64), jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}
    updates = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3), params)
    specs = {"w": SHARDS, "b": WHOLE}
    # That `b` may leave as replicated is checked by its type.
    found = sharded((specs, specs), specs)(stepped)(params, updates)
    copies = {np.float32(shard.data).tobytes() for shard in found["b"].addressable_shards}
    assert len(copies) == 1
    shards = {np.float32(shard.data).tobytes() for shard in found["w"].addressable_shards}
    assert len(shards) == 8


@pytest.mark.slow
def test_stochastic_rounding_draws_new_bits_after_its_counter_saturates():
    tx, params = gcx.round_stochastically(), jnp.ones(256, jnp.bfloat16)
    state = saturated(tx.init(params))
    first, state = tx.update(jnp.full(256, 1e-3), state, params)
    second, _ = tx.update(jnp.full(256, 1e-3), state, params)
    assert np.any(first != second)
