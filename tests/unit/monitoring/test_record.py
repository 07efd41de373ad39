"""The record of norms: in time order, a row for every step, of fixed shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import gradclip_jax as gcx
from oracles import eps, vector_norm
from trees import build


def feed(record, norms):
    """The state after gradients of the given norms."""

    def step(state, norm):
        grads = {"a": jnp.stack([norm * 0.6, norm * 0.0]), "b": norm * 0.8}
        return record.update(grads, state)[1], None

    state = record.init({"a": jnp.zeros(2), "b": jnp.zeros(())})
    return jax.jit(lambda s, n: jax.lax.scan(step, s, n)[0])(state, jnp.float32(norms))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
def test_the_last_norms_come_back_in_time_order(window, steps):
    norms = np.arange(1.0, steps + 1)
    history = gcx.diagnostics.norm_history(feed(gcx.record_norms(window), norms))
    assert history.dtype == np.float32 and isinstance(history, np.ndarray)
    np.testing.assert_allclose(history, norms[-window:], rtol=4 * eps("float32"))


def test_every_step_has_a_row_also_one_that_is_not_finite():
    norms = [1.0, np.nan, 2.0, np.inf, -np.inf, 3.0, np.nan]  # `feed` multiplies by 0
    state = feed(gcx.record_norms(8), norms)
    expected = [1, np.nan, 2, np.nan, np.nan, 3, np.nan]
    np.testing.assert_allclose(gcx.diagnostics.norm_history(state), expected, rtol=1e-6)
    assert state.nonfinite_norms == 4 and state.step_count == 7
    state = feed(gcx.record_norms(2), norms)
    np.testing.assert_allclose(gcx.diagnostics.norm_history(state), [3, np.nan], rtol=1e-6)


@pytest.mark.parametrize("ord", [1, np.inf])
def test_a_nan_is_counted_whatever_the_order_of_the_norm(ord):
    record = gcx.record_norms(4, ord=ord)
    grads = jnp.ones(70_000).at[500].set(jnp.nan)
    _, state = jax.jit(record.update)(grads, record.init(grads))
    assert state.nonfinite_norms == 1 and not np.isfinite(gcx.diagnostics.norm_history(state)).any()


def test_per_leaf_norms_are_in_the_order_of_the_leaves():
    tree = build("mixed_dtypes")
    record = gcx.record_norms(3, per_leaf=True)
    _, state = jax.jit(record.update)(tree, record.init(tree))
    history = gcx.diagnostics.norm_history(state)
    assert history.shape == (1, len(jax.tree.leaves(tree)))
    expected = [vector_norm(leaf) for leaf in jax.tree.leaves(tree)]
    np.testing.assert_allclose(history[0], expected, rtol=4 * eps("float32"))


def test_per_leaf_one_bad_leaf_is_told_by_name_at_its_step():
    record = gcx.record_norms(3, per_leaf=True)
    params = {"a": jnp.ones(1), "b": {"c": jnp.ones(1)}, "n": None}
    state = record.init(params)
    for a, c in ((1.0, 2.0), (np.nan, 3.0), (4.0, 5.0)):
        _, state = record.update(
            {"a": jnp.array([a]), "b": {"c": jnp.array([c])}, "n": None}, state
        )
    history = gcx.diagnostics.leaf_norm_history(state, params)
    assert list(history) == ["a", "b/c"]
    np.testing.assert_array_equal(history["a"], [1, np.nan, 4])
    np.testing.assert_array_equal(history["b/c"], [2, 3, 5])
    assert state.nonfinite_norms == 1


def test_the_order_of_the_norm_is_a_choice():
    grads = jnp.array([3.0, -4.0])
    for ord, norm in ((1, 7.0), (2, 5.0), (np.inf, 4.0)):
        record = gcx.record_norms(2, ord=ord)
        assert gcx.diagnostics.norm_history(record.update(grads, record.init(grads))[1]) == [norm]


def test_a_record_is_found_inside_any_state():
    inner = optax.chain(gcx.record_norms(4), optax.sgd(0.1))
    tx = gcx.accumulate_gradients(gcx.skip_nonfinite(inner), 2)
    grads = jnp.array([3.0, 4.0])
    state = tx.init(grads)
    for _ in range(4):
        _, state = tx.update(grads, state, grads)
    np.testing.assert_array_equal(gcx.diagnostics.norm_history(state), [5.0, 5.0])


def test_the_norm_over_shards_is_recorded_on_all_devices():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    record = gcx.record_norms(2)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    def step(grads):
        return record.update(grads, record.init(grads))[1]

    np.testing.assert_allclose(
        gcx.diagnostics.norm_history(step(jnp.full(16, 2.0))), [8.0], rtol=1e-6
    )
    state = step(jnp.ones(16).at[11].set(jnp.nan))
    assert state.nonfinite_norms == 1


def test_counters_saturate_and_the_ring_goes_on():
    record = gcx.record_norms(2)
    full = np.iinfo(np.int32).max
    state = record.init(jnp.zeros(1))._replace(nonfinite_norms=jnp.int32(full))
    _, state = record.update(jnp.array([jnp.nan]), state)
    assert state.nonfinite_norms == full
    for norm in (1.0, 2.0, 3.0):
        _, state = record.update(jnp.array([norm]), state)
    assert state.step_count == 2 and gcx.diagnostics.norm_history(state).tolist() == [2.0, 3.0]


def test_the_history_of_a_state_that_was_vmapped_over_seeds():
    tx = gcx.record_norms(3)
    state = jax.vmap(tx.init)(jnp.zeros((2, 1)))
    for row in ([1.0, 5.0], [2.0, jnp.nan], [3.0, 6.0], [4.0, jnp.nan]):
        _, state = jax.vmap(tx.update)(jnp.array(row)[:, None], state)
    history = gcx.diagnostics.norm_history(state)
    np.testing.assert_array_equal(history, [[2, 3, 4], [np.nan, 6, np.nan]])
    assert gcx.diagnostics.suggest_max_norm(history) == 3.5  # the median of 2, 3, 4 and 6


def test_the_history_of_leaves_of_seeds():
    tx = gcx.record_norms(2, per_leaf=True)
    params = {"a": jnp.zeros((2, 1)), "b": jnp.zeros((2, 1))}
    state = jax.vmap(tx.init)(params)
    grads = {"a": jnp.array([[1.0], [2.0]]), "b": jnp.array([[3.0], [4.0]])}
    _, state = jax.vmap(tx.update)(grads, state)
    np.testing.assert_array_equal(gcx.diagnostics.norm_history(state), [[[1, 3]], [[2, 4]]])
