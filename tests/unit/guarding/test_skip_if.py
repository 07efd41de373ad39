"""Guards that users write with public names."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from guard_cases import SHARDS, WHOLE, calls, sharded

SGD = optax.sgd(1.0)


def is_large(grads, params, **extra_args):
    return jnp.abs(grads).max() > 10


# Skips a loss above twice the largest of the applied steps.
RULE = gcx.SkipRule(
    lambda params: {"largest": jnp.float32(0), "size": jnp.int32(params.size)},
    lambda grads, state, params, value, **extra_args: (
        (state["largest"] > 0) & (value > 2 * state["largest"]),
        value,
    ),
    lambda state, value, skipped: {
        **state, "largest": jnp.where(skipped, state["largest"], jnp.maximum(state["largest"], value))
    },
)  # fmt: skip


def test_extra_arguments_may_have_any_name():
    def predicate(grads, params, *, name, argument, **others):
        return name + argument > 2

    tx = gcx.skip_if(SGD, predicate)
    for name, is_applied in ((1, True), (2, False)):
        _, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1), name=name, argument=1)
        assert gcx.has_updated(state) == is_applied


def test_steps_for_which_the_predicate_is_true_are_skipped():
    tx = gcx.skip_if(optax.adam(0.1), is_large, max_consecutive_skips=2)
    params, update, rows = jnp.zeros(1), jax.jit(tx.update), []
    state = tx.init(params)
    for grad in (1.0, 50.0, 2.0, 50.0, -50.0):
        before = state.inner_state
        _, state = update(jnp.array([grad]), state, params)
        rows.append(int(state.consecutive_skips))
        if rows[-1]:
            chex.assert_trees_all_equal(before, state.inner_state)
    assert rows == [0, 1, 0, 1, 2]
    assert (gcx.metrics(state)["skipped_other"], state.guard_failed) == (3, 1)


def test_a_rule_with_a_state_observes_applied_steps():
    tx = gcx.skip_if(SGD, RULE)
    losses = [1.0, 1.5, 9.0, 2.0, 4.1, 3.9]
    _, state, rows = calls(tx, [(1.0, {"value": x}) for x in losses])
    assert rows == [1, 1, 0, 1, 0, 1]
    assert [*state.inner_guards[0].rule_state.values()] == [{"largest": np.float32(3.9), "size": 1}]
    assert gcx.metrics(state)["skipped_other"] == 2


def test_a_predicate_that_varies_over_devices_raises():
    tx = gcx.skip_if(SGD, is_large)

    @sharded((SHARDS,), SHARDS)
    def update(grads):
        return tx.update(grads, tx.init(grads))[0]

    with pytest.raises(
        TypeError, match="^skip_if: `predicate` must be .*same on all devices.*pmax"
    ):
        update(jnp.ones(8))

    def on_all(grads, params, **extra_args):
        return jax.lax.pmax(jnp.abs(grads).max(), "data") > 10

    @sharded((SHARDS,), WHOLE)
    def skips(grads):
        guard = gcx.skip_if(SGD, on_all)
        return gcx.metrics(guard.update(grads, guard.init(grads))[1])["skipped_other"]

    assert skips(jnp.ones(8)) == 0 and skips(jnp.ones(8).at[3].set(99.0)) == 1


@pytest.mark.parametrize("result", [1.0, jnp.zeros(2, bool)])
def test_a_predicate_must_return_one_bool(result):
    tx = gcx.skip_if(SGD, lambda grads, params, **extra_args: result)
    with pytest.raises(TypeError, match=r"^skip_if: `predicate` must be a function.*bool\[\]"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
