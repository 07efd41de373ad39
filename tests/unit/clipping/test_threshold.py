"""What a threshold may be, and what its state remembers."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

import compat
import gradclip_jax as gcx
from clip_cases import train

Rule = gcx.thresholds.Rule


def by_row(threshold):
    """A clip of columns, each number a unit by itself."""
    return gcx.clip_by_norm(threshold, granularity=gcx.granularities.axis(-1), ord=1)


def column(*values):
    return jnp.float32(values)[:, None]


def running_max():
    """The largest norm before this one, unit by unit; its state has a history axis, and a count."""

    def init(norm):
        return jnp.full((3, *norm.shape), jnp.inf), jnp.zeros((), jnp.int32)

    def update(norm, state, param_norm):
        peaks, count = state
        highest = jnp.where(count == 0, norm, jnp.maximum(peaks[0], norm))
        return peaks[0], (jnp.roll(peaks, 1, 0).at[0].set(highest), count + 1)

    return Rule(init, update)


def test_number_of_any_type_is_a_threshold_for_every_unit():
    numbers = 2, np.float64(2), jnp.bfloat16(2), np.uint8(2), 10**20

    @jax.jit
    def results(grads):
        return [(by_row(x).update(grads, None), gcx.clip_grad_value(grads, x)) for x in numbers]

    with compat.strict():
        found = results(column(3, -3, 1, 8))
    for value, ((clipped, state), by_value) in zip(numbers, found, strict=True):
        exact = np.clip([3, -3, 1, 8], -float(value), float(value))
        np.testing.assert_allclose(clipped[:, 0], exact, rtol=1e-6)
        assert state.clip_threshold.dtype == jnp.float32 and state.rules == ()
        np.testing.assert_allclose(by_value[:, 0], exact)


def test_schedule_counts_a_step_whose_norm_is_not_finite():
    # The count is a step count, not a memory of norms.
    clip = gcx.clip_by_norm(lambda count: 1.0 + count)
    _, states, _ = train(clip, np.float32([1, math.nan, 1]))
    assert states.clip_threshold.tolist() == [1.0, 2.0, 3.0]
    assert states.rules[0]["schedule"].tolist() == [1, 2, 3]


def test_a_step_with_one_bad_norm_changes_the_state_of_no_norm():
    clip = by_row(running_max())
    update, state = jax.jit(clip.update), clip.init(column(0, 0, 0))
    for norms in ((1, 1, 1), (2, 0, 3)):
        _, state = update(column(*norms), state)
    for bad in (math.nan, math.inf):
        _, after = update(column(4, bad, 5), state)
        chex.assert_trees_all_equal(after.rules, state.rules)
    clipped, _ = update(column(0, 5, 9), state)
    np.testing.assert_allclose(clipped, column(0, 1, 3), rtol=1e-6)


def test_relative_to_params():
    clip = by_row(gcx.thresholds.relative_to_params(jnp.bfloat16(0.5), eps=0.1))
    with compat.strict():
        clipped, state = jax.jit(clip.update)(column(9, 9, 9), None, column(4.0, 0.0, 0.2))
    np.testing.assert_allclose(clipped, column(2.0, 0.05, 0.1), rtol=1e-6)
    assert state.rules == ()


def test_a_norm_that_fits_no_float32_counts_as_the_largest_that_does():
    half = Rule(lambda norm: (), lambda norm, state, param_norm: (norm / 2, state))
    with compat.x64():
        grads = jnp.asarray(np.array([1e60]))
        updates, _ = jax.jit(gcx.clip_by_global_norm(half).update)(grads, None)
        np.testing.assert_allclose(updates, [np.finfo(np.float32).max / 2], rtol=1e-6)
