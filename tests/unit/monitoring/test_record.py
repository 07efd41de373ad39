"""The record of norms: in time order, a row for every step, of fixed shape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from accumulation_cases import run
from guard_cases import SHARDS, WHOLE, feed, sharded
from oracles import eps, vector_norm
from trees import build


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
def test_the_last_norms_come_back_in_time_order(window, steps):
    norms = np.arange(1.0, steps + 1)
    history = gcx.diagnostics.norm_history(feed(gcx.record_norms(window), norms)[1])
    assert history.dtype == np.float32 and isinstance(history, np.ndarray)
    np.testing.assert_allclose(history, norms[-window:], rtol=4 * eps("float32"))


def test_every_step_has_a_row_also_one_that_is_not_finite():
    norms = [1.0, np.nan, 2.0, np.inf, -np.inf, 3.0, np.nan]
    _, state = feed(gcx.record_norms(8), norms)
    np.testing.assert_allclose(gcx.diagnostics.norm_history(state), np.abs(norms), rtol=1e-6)
    assert state.nonfinite_norms == 4 and state.step_count == 7
    _, state = feed(gcx.record_norms(2), norms)
    np.testing.assert_allclose(gcx.diagnostics.norm_history(state), [3, np.nan], rtol=1e-6)


@pytest.mark.parametrize(("ord", "norm"), [(1, 140_000.0), (np.inf, 2.0)])
def test_norms_of_other_orders_are_recorded_and_a_nan_is_counted(ord, norm):
    record, grads = gcx.record_norms(4, ord=ord), jnp.full(70_000, 2.0)
    update, state = jax.jit(record.update), record.init(grads)
    for value in (2.0, np.nan):
        _, state = update(grads.at[500].set(value), state)
    found = gcx.diagnostics.norm_history(state)
    assert found[0] == norm and not np.isfinite(found[1]) and state.nonfinite_norms == 1


def test_per_leaf_norms_have_the_names_of_the_leaves_and_a_row_for_each_step():
    tree = build("mixed_dtypes")
    record = gcx.record_norms(3, per_leaf=True)
    update, state = jax.jit(record.update), record.init(tree)
    for value in (1.0, np.nan):
        _, state = update(tree | {"float32": tree["float32"] * value}, state)
    history = gcx.diagnostics.leaf_norm_history(state, tree)
    assert list(history) == sorted(tree)
    for name, leaf in tree.items():
        norm = vector_norm(leaf)
        second = np.nan if name == "float32" else norm
        np.testing.assert_allclose(history[name], [norm, second], rtol=4 * eps("float32"))
    assert state.nonfinite_norms == 1


def test_a_per_leaf_record_of_seeds_has_nested_names_and_no_masked_leaves():
    tx = gcx.record_norms(2, per_leaf=True)
    grads = {"a": jnp.float32([[1], [2]]), "b": {"c": jnp.float32([[3], [4]])}, "n": None}
    _, state = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(grads))
    np.testing.assert_array_equal(gcx.diagnostics.norm_history(state), [[[1, 3]], [[2, 4]]])
    names = gcx.diagnostics.leaf_norm_history(jax.tree.map(lambda x: x[0], state), grads)
    assert list(names) == ["a", "b/c"]


def test_a_call_that_only_flushes_is_not_recorded():
    tx = optax.chain(gcx.record_norms(4), gcx.accumulate_gradients(optax.sgd(0.1), 2))
    params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
    for norm in (5.0, 10.0, 15.0):
        _, state = tx.update(norm * jnp.array([0.6, 0.8]), state, params)
    _, state = jax.jit(lambda state: gcx.flush(tx, state, params))(state)
    np.testing.assert_allclose(gcx.diagnostics.norm_history(state), [5, 10, 15], rtol=1e-6)


def test_a_record_is_found_inside_any_state():
    inner = optax.chain(gcx.record_norms(4), optax.sgd(0.1))
    tx = gcx.accumulate_gradients(gcx.skip_nonfinite(inner), 2)
    grads = jnp.array([3.0, 4.0])
    _, states = run(tx, grads, [grads] * 4)
    np.testing.assert_array_equal(gcx.diagnostics.norm_history(states[-1]), [5.0, 5.0])


def test_the_norm_over_shards_is_recorded_on_all_devices():
    record = gcx.record_norms(2)

    @sharded(SHARDS, WHOLE)
    def step(grads):
        return record.update(grads, record.init(grads))[1]

    history = gcx.diagnostics.norm_history(step(jnp.full(16, 2.0)))
    np.testing.assert_allclose(history, [8.0], rtol=1e-6)
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


def test_vmapped_seeds_of_which_a_guard_skipped_one_have_histories_of_their_own():
    tx = gcx.skip_large_norm(gcx.record_norms(3), np.inf)
    state = jax.vmap(tx.init)(jnp.zeros((2, 1)))
    for i, row in enumerate([[1, 1], [np.nan, 2], [3, 3], [4, 6], [5, 7]], 1):
        _, state = jax.vmap(tx.update)(jnp.float32(row)[:, None], state)
        if i == 3:
            with pytest.raises(ValueError, match="^norm_history: `state` must be .* from 2 to 3"):
                gcx.diagnostics.norm_history(state)
    history = gcx.diagnostics.norm_history(state)
    np.testing.assert_array_equal(history, [[3, 4, 5], [3, 6, 7]])
    assert gcx.diagnostics.suggest_max_norm(history) == 4.5  # the median of 3, 4, 5, 3, 6 and 7
