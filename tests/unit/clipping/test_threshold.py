"""What a threshold may be, and what its state remembers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat
import gradclip_jax as gcx
from clip_cases import train

Rule = gcx.thresholds.Rule


def by_row(threshold):
    """A clip of columns, each number a unit by itself."""
    return gcx.clip_by_norm(threshold, granularity=gcx.granularities.axis(-1), ord=1)


def column(*values):
    return jnp.float32(values)[:, None]


def test_number_of_any_type_is_a_threshold_for_every_unit():
    numbers = 2, np.float64(2), jnp.bfloat16(2), np.uint8(2), np.int64(3_000_000_000), 10**20

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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_leaf_norm,
        lambda rule: gcx.clip_by_group_norm({"a": rule, "b": rule}, {"a": "a", "b": "b"}),
        by_row,
    ],
    ids=["leaf", "group", "axis"],
)
def test_a_step_that_is_discarded_does_not_change_the_rules_of_other_leaves(make, bad):
    clip = make(gcx.thresholds.ema(2.0, decay=0.5, warmup_steps=1, warmup_max=jnp.inf))
    grads = {"a": np.float32([[1], [2], [100]]), "b": np.float32([[1], [bad], [1]])}
    updates, *_ = train(clip, grads)
    np.testing.assert_allclose(updates["a"][-1], 2.0, rtol=1e-6)
