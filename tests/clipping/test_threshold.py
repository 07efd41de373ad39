"""What a threshold may be, and what its state remembers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
from gradclip_jax.clipping._threshold import apply_rule, as_rule, constant

Rule = gcx.thresholds.Rule


def run(rule, norms, param_norms=None):
    """Thresholds of consecutive norms, and the last state."""
    state = rule.init(jnp.zeros(jnp.shape(norms[0])))
    thresholds = []
    for norm in norms:
        params = None if param_norms is None else jnp.asarray(param_norms, jnp.float32)
        threshold, state = apply_rule(rule, jnp.asarray(norm), state, params)
        thresholds.append(np.asarray(threshold))
    return thresholds, state


def running_max():
    """The largest norm before this one, unit by unit: state as large as the norms, and a count."""

    def init(norm):
        return jnp.full_like(norm, jnp.inf), jnp.zeros((), jnp.int32)

    def update(norm, state, param_norm):
        peak, count = state
        highest = jnp.where(count == 0, norm, jnp.maximum(peak, norm))
        return peak, (highest, count + 1)

    return Rule(init, update)


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.float64(2), np.array(2.0), jnp.bfloat16(2), jnp.float16(2)]
)
@pytest.mark.parametrize("norm", [jnp.float32(3), jnp.ones((4,))])
def test_number_is_a_threshold_of_the_dtype_and_shape_of_the_norm(value, norm):
    with compat.strict():
        threshold, state = apply_rule(as_rule("f", "max_norm", value), norm, ())
    assert threshold.dtype == norm.dtype and threshold.shape == norm.shape
    np.testing.assert_array_equal(threshold, jnp.full_like(norm, 2))
    assert state == ()


def test_norm_in_float64_has_a_threshold_in_float64():
    with compat.x64():
        norm = jnp.asarray(np.float64(3))
        for value in (0.1, jnp.float32(0.1), np.float64(0.1)):
            threshold, _ = apply_rule(constant(value), norm, ())
            assert threshold.dtype == jnp.float64
        assert float(apply_rule(constant(0.1), norm, ())[0]) == 0.1


def test_schedule_counts_its_steps():
    rule = as_rule("f", "max_norm", optax.linear_schedule(1.0, 3.0, 2))
    thresholds, count = run(rule, [jnp.float32(9.0)] * 4)
    assert [float(t) for t in thresholds] == [1.0, 2.0, 3.0, 3.0]
    assert count == 4 and count.dtype == jnp.int32


def test_schedule_count_saturates():
    rule = as_rule("f", "max_norm", lambda count: 1.0)
    last = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    _, count = apply_rule(rule, jnp.float32(1), last)
    assert count == last


def test_schedule_may_return_a_python_number():
    assert float(run(as_rule("f", "max_norm", lambda count: 2), [jnp.float32(1)])[0][0]) == 2.0


def test_schedule_counts_a_step_whose_norm_is_not_finite():
    # The count is a step count, not a memory of norms.
    rule = as_rule("f", "max_norm", lambda count: 1.0 + count)
    thresholds, count = run(rule, [jnp.float32(1), jnp.float32(math.nan), jnp.float32(1)])
    assert [float(t) for t in thresholds] == [1.0, 2.0, 3.0]
    assert count == 3


def test_rule_sees_the_norms_before_clipping_and_keeps_its_state():
    thresholds, (peak, count) = run(running_max(), [jnp.float32(x) for x in (2.0, 5.0, 3.0)])
    assert [float(t) for t in thresholds] == [math.inf, 2.0, 5.0]
    assert float(peak) == 5.0 and int(count) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_norm_never_reaches_the_state(bad):
    rule = running_max()
    clean, (peak, _) = run(rule, [jnp.float32(2.0), jnp.float32(3.0)])
    dirty, (dirty_peak, _) = run(rule, [jnp.float32(2.0), jnp.float32(bad), jnp.float32(3.0)])
    assert float(dirty_peak) == float(peak) == 3.0
    assert [float(t) for t in dirty] == [math.inf, 2.0, 2.0]


def test_bad_norm_of_one_unit_leaves_the_others_alone():
    norms = [jnp.float32([1, 1, 1]), jnp.float32([2, math.nan, 3]), jnp.float32([0, 5, 0])]
    thresholds, (peak, _) = run(running_max(), norms)
    np.testing.assert_array_equal(thresholds[2], [2, 1, 3])
    np.testing.assert_array_equal(peak, [2, 5, 3])


def test_state_with_a_history_axis_is_kept_unit_by_unit():
    def init(norm):
        return jnp.zeros((4, *norm.shape))

    def update(norm, history, param_norm):
        return jnp.ones_like(norm), jnp.roll(history, 1, 0).at[0].set(norm)

    norms = [jnp.float32([1, 2]), jnp.float32([math.nan, 3])]
    _, history = run(Rule(init, update), norms)
    np.testing.assert_array_equal(history, [[1, 3], [0, 2], [0, 0], [0, 0]])


def test_state_keeps_its_dtype():
    rule = Rule(lambda norm: jnp.zeros_like(norm, jnp.bfloat16), lambda n, s, p: (n, s + n))
    assert run(rule, [jnp.float32(1)])[1].dtype == jnp.bfloat16


def test_rule_may_return_python_numbers():
    rule = Rule(lambda norm: (), lambda norm, state, param_norm: (2.0, state))
    assert float(run(rule, [jnp.float32(5.0)])[0][0]) == 2.0


@pytest.mark.parametrize("ratio", [0.5, np.float32(0.5), jnp.bfloat16(0.5)])
def test_relative_to_params(ratio):
    rule = gcx.thresholds.relative_to_params(ratio, eps=0.1)
    assert rule.uses_params
    with compat.strict():
        thresholds, state = run(rule, [jnp.float32([1, 1, 1])], [4.0, 0.0, 0.2])
    np.testing.assert_allclose(thresholds[0], [2.0, 0.05, 0.1], rtol=1e-6)
    assert state == ()


def test_params_are_seen_only_by_rules_that_ask():
    seen = []
    rule = Rule(lambda norm: (), lambda norm, state, p: (seen.append(p), (norm, state))[1])
    other = gcx.thresholds.relative_to_params()
    clip = gcx.clip_by_leaf_norm({"a": rule, "b": other})
    tree = {"a": jnp.ones(2), "b": jnp.ones(3)}
    clip.update(tree, clip.init(tree), tree)
    assert seen == [None]


# --- errors ---------------------------------------------------------------------------------

HINT = "Pass a positive number, a schedule, or a rule from `gcx.thresholds`; inf never clips."


@pytest.mark.parametrize("value", [-1.0, 0, 0.0, -math.inf, np.float32(-2), jnp.float32(0)])
def test_number_must_be_positive(value):
    with pytest.raises(ValueError) as error:
        as_rule("clip", "max_norm", value)
    assert str(error.value) == f"clip: `max_norm` must be a number > 0, got {value!r}. {HINT}"


def test_nan_is_no_threshold():
    with pytest.raises(ValueError, match="must be a number > 0, got nan"):
        as_rule("clip", "max_norm", math.nan)


@pytest.mark.parametrize("value", ["1", None, True, [1.0], np.ones(2), jnp.ones((1, 1)), 1j])
def test_threshold_must_be_a_number(value):
    with pytest.raises(TypeError, match="clip: `max_norm` must be a number > 0, got .* Pass a pos"):
        as_rule("clip", "max_norm", value)


def test_array_is_described_by_dtype_and_shape():
    with pytest.raises(TypeError, match=r"got float32\[2, 3\]\. "):
        as_rule("clip", "max_norm", jnp.ones((2, 3)))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_traced_number_never_raises(value):
    def threshold(x):
        return apply_rule(as_rule("clip", "max_norm", x), jnp.float32(1), ())[0]

    np.testing.assert_equal(float(jax.jit(threshold)(value)), value)


@pytest.mark.parametrize("argument", ["ratio", "eps"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_relative_to_params_refuses(argument, value):
    expected = f"relative_to_params: `{argument}` must be a number > 0, got"
    with pytest.raises(ValueError, match=expected):
        gcx.thresholds.relative_to_params(**{argument: value})
