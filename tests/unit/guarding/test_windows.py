"""Guards and accumulation: windows that lock nothing up; tests/unit/test_gates.py has the verdicts."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from guard_cases import GUARDS, calls, each_guard, feed

acc = gcx.accumulate_gradients
SGD = optax.sgd(1.0)


@pytest.mark.parametrize("check", ["gradient", "step"])
@pytest.mark.parametrize("guard", [gcx.skip_nonfinite, gcx.dynamic_loss_scale])
def test_a_bad_micro_batch_before_a_clip_leaves_the_window_open(guard, check):
    tx = guard(optax.chain(gcx.clip_by_global_norm(1.0), acc(SGD, 3)), check=check)
    _, state, _ = calls(tx, [0.5, np.nan, 0.25])
    assert gcx.metrics(state)["mini_step"] == 2 and state.skipped_nonfinite == 1


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


@pytest.mark.parametrize("guard", ["skip_nonfinite", "skip_large_norm"])
def test_a_window_of_multi_steps_locks_up_no_guard_that_checks_gradients_only(guard):
    tx = GUARDS[guard](optax.MultiSteps(optax.adam(0.1), 4))
    skipped, state = feed(tx, [1.0, 1.0, 1e25, *[1.0] * 14])
    held = [i for i in range(17) if i not in (4, 8, 12, 16)]  # the third call is skipped
    assert np.flatnonzero(skipped).tolist() == held and state.inner_state.gradient_step == 4
    assert state.skipped_nonfinite == 1
