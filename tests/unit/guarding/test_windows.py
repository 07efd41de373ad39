"""Guards and accumulation: windows that lock nothing up; tests/unit/test_gates.py has the verdicts."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from guard_cases import FROZEN, GUARDS, calls, each_guard, feed

checking_steps, acc = GUARDS["check of steps"], gcx.accumulate_gradients
SGD = optax.sgd(1.0)


def test_a_compiled_flush_behind_a_clip_closes_the_window():
    # The gradient of the flush, zero, is a constant of the program.
    tx = optax.chain(gcx.clip_by_global_norm(10.0), gcx.skip_nonfinite(acc(SGD, 3)))
    params = jnp.zeros(2)
    _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params)
    updates, state = jax.jit(lambda s, p: gcx.flush(tx, s, p))(state, params)
    assert updates.tolist() == [-3.0, -4.0] and gcx.metrics(state)["skipped_nonfinite"] == 0


@pytest.mark.parametrize("check", ["gradient", "step"])
@pytest.mark.parametrize("guard", [gcx.skip_nonfinite, gcx.dynamic_loss_scale])
def test_a_bad_micro_batch_before_a_clip_leaves_the_window_open(guard, check):
    tx = guard(optax.chain(gcx.clip_by_global_norm(1.0), acc(SGD, 3)), check=check)
    _, state, _ = calls(tx, [0.5, np.nan, 0.25])
    assert gcx.metrics(state)["mini_step"] == 2 and state.skipped_nonfinite == 1


Stranger = collections.namedtuple("Stranger", "mini_step acc_grads clip_threshold emitted")


@pytest.mark.parametrize(("factor", "skips"), [(1.0, 0), (np.nan, 1)])
def test_a_state_with_the_field_names_of_ours_is_checked_but_not_reset(factor, skips):
    def init(params):
        return Stranger(jnp.int32(3), jnp.ones_like(params), jnp.ones_like(params), jnp.array(True))

    def update(updates, state, params=None):
        return updates, state._replace(clip_threshold=factor * state.clip_threshold)

    tx = checking_steps(optax.chain(optax.GradientTransformation(init, update)))
    params = jnp.ones(2)
    first = tx.init(params)
    for grads in (params, jnp.array([1.0, jnp.nan])):
        _, state = tx.update(grads, first, params)
        chex.assert_trees_all_equal(state.inner_state, first.inner_state)
        assert state.skipped_nonfinite == (skips if grads is params else 1)


@each_guard
def test_a_run_of_nan_that_flushes_empty_windows_fails(guard):
    tx = guard(acc(optax.sgd(0.1), 4), max_consecutive_skips=6)
    params = jnp.zeros(2)
    state = tx.init(params)
    for i in range(6):
        _, state = tx.update(jnp.full(2, jnp.nan), state, params)
        if i % 2:
            _, state = gcx.flush(tx, state, params)
    assert state.guard_failed and state.consecutive_skips == 6


def test_a_new_level_is_learned_where_empty_windows_are_flushed():
    tx = gcx.skip_large_norm(acc(optax.sgd(0.1), 100), FROZEN, relearn_after=3)
    params = jnp.zeros(1)
    state = tx.init(params)
    skips = []
    for norm in (1.0, 9.0, 9.0, 9.0, 9.0):
        _, state = tx.update(jnp.array([norm]), state, params)
        skips.append(int(state.consecutive_skips))
        if norm > 1:
            state = gcx.reset_accumulation(state)  # the window of the first is open until then
            _, state = gcx.flush(tx, state, params)
    assert skips == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("guard", ["skip_nonfinite", "skip_large_norm"])
def test_a_window_of_multi_steps_locks_up_no_guard_that_checks_gradients_only(guard):
    tx = GUARDS[guard](optax.MultiSteps(optax.adam(0.1), 4))
    skipped, state = feed(tx, [1.0, 1.0, 1e25, *[1.0] * 14])
    held = [i for i in range(17) if i not in (4, 8, 12, 16)]  # the third call is skipped
    assert np.flatnonzero(skipped).tolist() == held and state.inner_state.gradient_step == 4
    assert state.skipped_nonfinite == 1
