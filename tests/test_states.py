"""States are found inside any Optax state, counted without wrapping, and replaced in place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from gradclip_jax._states import find_states, increment_where, replace_states
from gradclip_jax.accumulation._state import AccumulationState
from gradclip_jax.clipping._clip import ClipState
from gradclip_jax.guarding._skip_nonfinite import SkipNonfiniteState
from gradclip_jax.guarding._skip_spikes import SkipSpikesState
from registry import TRANSFORMATIONS

PARAMS = {"w": jnp.ones(2)}


def paths(state, kinds):
    return [
        (jax.tree_util.keystr(path), type(found).__name__)
        for path, found in find_states(state, kinds)
    ]


def test_a_state_that_is_itself_of_a_kind_is_found_at_the_root():
    assert paths(gcx.clip_by_global_norm(1.0).init(PARAMS), ClipState) == [("", "ClipState")]


def test_states_inside_one_another_are_all_found_the_outermost_first():
    tx = gcx.skip_nonfinite(
        gcx.accumulate_gradients(
            optax.chain(
                gcx.skip_large_norm(gcx.skip_nonfinite(gcx.clip_by_global_norm(1.0)), 1.0),
                gcx.clip_by_global_norm(2.0),
            ),
            2,
        )
    )
    kinds = (ClipState, AccumulationState, SkipNonfiniteState, SkipSpikesState)
    accumulation = ".inner_state"
    large = ".inner_state.inner_opt_state[0]"
    assert paths(tx.init(PARAMS), kinds) == [
        ("", "SkipNonfiniteState"),
        (accumulation, "AccumulationState"),
        (large, "SkipSpikesState"),
        (f"{large}.inner_state", "SkipNonfiniteState"),
        (f"{large}.inner_state.inner_state", "ClipState"),
        (".inner_state.inner_opt_state[1]", "ClipState"),
    ]


def test_the_same_kind_inside_itself_is_found_twice():
    tx = gcx.skip_nonfinite(gcx.skip_nonfinite(optax.sgd(0.1)))
    assert paths(tx.init(PARAMS), SkipNonfiniteState) == [
        ("", "SkipNonfiniteState"),
        (".inner_state", "SkipNonfiniteState"),
    ]


def test_no_state_is_found_where_there_is_none():
    for state in (None, (), {}, optax.adam(0.1).init(PARAMS), jnp.ones(2)):
        assert find_states(state, ClipState) == []


def test_what_is_found_is_the_state_itself():
    tx = optax.masked(gcx.clip_by_global_norm(1.0), {"w": True})
    state = tx.init(PARAMS)
    ((path, found),) = find_states(state, ClipState)
    assert found is state.inner_state
    assert jax.tree_util.keystr(path, simple=True, separator="/") == "inner_state"


def test_only_the_outermost_state_of_a_kind_is_replaced():
    tx = optax.chain(gcx.skip_nonfinite(gcx.skip_nonfinite(optax.sgd(0.1))), optax.trace(0.5))
    state = tx.init(PARAMS)
    new = replace_states(
        state, SkipNonfiniteState, lambda s: s._replace(skipped_nonfinite=jnp.int32(7))
    )
    assert [int(s.skipped_nonfinite) for _, s in find_states(new, SkipNonfiniteState)] == [7, 0]
    chex.assert_trees_all_equal(new[1], state[1])
    chex.assert_trees_all_equal_structs(new, state)


def test_nothing_is_replaced_where_there_is_nothing():
    state = optax.adam(0.1).init(PARAMS)
    new = replace_states(state, ClipState, lambda s: None)
    chex.assert_trees_all_equal(new, state)


@pytest.mark.parametrize("happened", [True, False])
@pytest.mark.parametrize("count", [0, 5, np.iinfo(np.int32).max - 1, np.iinfo(np.int32).max])
def test_a_counter_saturates(count, happened):
    expected = min(count + happened, np.iinfo(np.int32).max)
    for run in (increment_where, jax.jit(increment_where)):
        new = run(jnp.int32(count), jnp.array(happened))
        assert new == expected and new.dtype == jnp.int32


def test_a_counter_counts_without_a_condition():
    assert increment_where(jnp.array([1, 2])).tolist() == [2, 3]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_no_leaf_of_a_first_state_is_a_bool(name):
    # Checkpoints by tensorstore on several devices restore none.
    state = TRANSFORMATIONS[name]().init({"a": jnp.ones((8, 4)), "b": jnp.ones(4)})
    assert not [x for x in jax.tree.leaves(state) if jnp.asarray(x).dtype == jnp.bool_]
