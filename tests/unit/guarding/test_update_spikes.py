"""The guard against spikes of the update norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from guard_cases import FROZEN, feed


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: tx, lambda tx: gcx.skip_nonfinite(tx, check="step")],
    ids=["alone", "in guard"],
)
def test_a_rule_for_the_update_skips_and_learns_anew(wrap):
    momentum = optax.chain(optax.trace(0.5), optax.scale(-1.0))
    tx = wrap(gcx.skip_spikes(momentum, update=FROZEN, relearn_after=2))
    # The updates, of which those in brackets are skipped: 1, 1.5, [], [9.75], [9.75], 9.75 which
    # becomes the level, 13.875, [36.9375].
    skipped, state = feed(tx, [1, 1, np.nan, 9, 9, 9, 9, 30])
    assert skipped.tolist() == [False, False, True, True, True, False, False, True]
    found = gcx.metrics(state)
    assert (found["skipped_large_update"], found["skipped_nonfinite"]) == (3, 1)
    np.testing.assert_allclose((found["update_norm"], found["update_threshold"]), (36.9375, 19.5))


def test_a_nonfinite_update_is_skipped_and_its_window_dropped():
    inner = optax.stateless(lambda updates, _: jax.tree.map(lambda x: 1 / (x - 2), updates))
    tx = gcx.skip_spikes(gcx.accumulate_gradients(inner, 2), update=3.0)
    state, updates = tx.init(jnp.zeros(1)), []
    step = jax.jit(tx.update)
    for grad in (2.0, 2.0, 3.0, 3.0, 2.1, 2.1):
        update, state = step(jnp.array([grad]), state)
        updates.append(float(update[0]))
    assert updates == [0, 0, 0, 1, 0, 0]
    found = gcx.metrics(state)
    assert (found["skipped_nonfinite"], found["skipped_large_update"]) == (1, 1)
    assert found["consecutive_skips"] == 1 and found["update_norm"] == pytest.approx(10, rel=1e-4)


def test_a_nan_micro_batch_that_flushes_a_window_with_a_large_update_counts_once_in_each_guard():
    tx = gcx.skip_spikes(gcx.accumulate_gradients(optax.sgd(1.0), 4), update=3.0)
    tx, params = gcx.skip_nonfinite(tx), jnp.zeros(1)
    _, state = tx.update(jnp.array([9.0]), tx.init(params), params)
    _, state = tx.update(jnp.array([jnp.nan]), state, params, flush=True)
    inner = state.inner_state
    assert (state.skipped_nonfinite, inner.skipped_nonfinite) == (1, 0)
    assert inner.skipped_large_update == 1 and inner.consecutive_skips == 1
    assert inner.inner_state.mini_step == 0


def test_a_skipped_update_is_not_reported():
    tx = gcx.skip_spikes(optax.sgd(1.0), norm=2.0, update=5.0)
    _, state = tx.update(jnp.array([9.0]), tx.init(jnp.zeros(1)))
    assert np.isnan(state.update_norm) and state.skipped_large_norm == 1
    assert state.skipped_large_update == state.skipped_nonfinite == 0


def test_the_ratio_of_update_to_parameter_can_be_bounded():
    rule = gcx.thresholds.relative_to_params(0.1)
    tx = gcx.skip_spikes(optax.sgd(1.0), update=rule)
    params = jnp.array([30.0, 40.0])
    state, skips = tx.init(params), []
    for size in (4.9, 5.1):
        _, state = tx.update(jnp.array([size, 0.0]), state, params)
        skips.append(int(state.skipped_large_update))
    assert skips == [0, 1] and state.update_threshold == 5
