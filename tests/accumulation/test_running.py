"""The running sum of a window: right in every dtype, never poisoned, weighted."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import oracles
import trees
from gradclip_jax.accumulation import _reduction
from gradclip_jax.accumulation._reduction import (
    MicroBatch,
    accumulator_dtype,
    accumulator_like,
    add_micro_batch,
    as_weight,
)

FIRST, LATER = jnp.array(True), jnp.array(False)


def add_weighted(acc, grads, weight, is_first, word="sum"):
    words = [word] * len(jax.tree.leaves(grads))
    return add_micro_batch(acc, MicroBatch(grads, words, weight), is_first)


def window_gradient(acc, grads, total_weight, *, mean):
    words = ["mean" if mean else "sum"] * len(jax.tree.leaves(grads))
    return _reduction.window_gradient(acc, MicroBatch(grads, words), total_weight)


def window(grads, weights, dtype=jnp.float32):
    """Sum and total weight of a window of weighted micro-batches."""
    acc = jax.tree.map(lambda x: x * jnp.nan, accumulator_like("f", grads[0], dtype))
    for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
        acc = add_weighted(acc, g, jnp.float32(w), jnp.array(i == 0))
    return acc, jnp.float32(sum(weights))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        *((kind, "float32") for kind in trees.REAL),
        ("complex64", "complex64"),
    ],
)
def test_accumulator_is_float32_or_the_complex_type_over_it(kind, wanted):
    acc = accumulator_like("f", {"a": trees.normal((2, 3), kind)}, np.dtype("float32"))["a"]
    assert acc.dtype == wanted and acc.shape == (2, 3) and not acc.any()
    lower = jnp.dtype(accumulator_dtype(jnp.dtype(kind), jnp.bfloat16))
    assert lower == ("complex64" if kind == "complex64" else "bfloat16")


@pytest.mark.parametrize("kind", ["float64", "complex128"])
def test_64_bit_leaves_keep_their_precision(kind):
    wide = 64 if kind == "float64" else 128
    assert jnp.dtype(accumulator_dtype(jnp.dtype(kind), jnp.float32)).itemsize * 8 == wide


def test_nodes_without_leaves_and_integer_parameters_pass_through():
    params = {"a": jnp.ones(2), "b": None, "c": optax.MaskedNode(), "n": jnp.ones((3,), jnp.int32)}
    acc = accumulator_like("f", params, jnp.float32)
    assert acc["b"] is None and acc["c"] == optax.MaskedNode()
    assert acc["n"].shape == () and acc["n"].dtype == jnp.float32
    grads = {**params, "n": np.zeros((3,), jax.dtypes.float0)}
    acc = add_weighted(acc, grads, None, FIRST)
    out = window_gradient(acc, grads, jnp.float32(1), mean=True)
    assert out["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(out["a"], jnp.ones(2))


def test_the_first_micro_batch_overwrites_what_the_last_window_left():
    acc = add_weighted(jnp.array([jnp.nan, jnp.inf, 7.0]), jnp.ones(3), None, FIRST)
    np.testing.assert_array_equal(acc, jnp.ones(3))


@pytest.mark.parametrize("first", [FIRST, LATER])
def test_a_micro_batch_of_zero_weight_adds_nothing_even_if_it_is_nan(first):
    bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    acc = add_weighted(jnp.array([1.0, 2.0, 3.0]), bad, jnp.float32(0), first)
    np.testing.assert_array_equal(acc, jnp.zeros(3) if first else jnp.array([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("word", "wanted"), [("max", [1.0, 4.0, -3.0]), ("last", [-1.0, 4.0, -5.0])]
)
def test_what_is_no_gradient_is_not_multiplied_by_its_weight(word, wanted):
    values = [[1.0, 2.0, -3.0], [-1.0, 4.0, -5.0], [9.0, 9.0, 9.0]]
    acc = jnp.array([jnp.nan, jnp.inf, 7.0])
    for i, (value, weight) in enumerate(zip(values, (2, 3, 0), strict=True)):
        acc = add_weighted(acc, jnp.array(value), jnp.float32(weight), jnp.array(i == 0), word)
    np.testing.assert_array_equal(acc, wanted)


def test_no_weight_is_a_weight_of_one():
    acc, grads = jnp.array([1.0, 2.0]), jnp.array([0.5, jnp.inf])
    one = add_weighted(acc, grads, jnp.float32(1), LATER)
    np.testing.assert_array_equal(add_weighted(acc, grads, None, LATER), one)


def test_two_thousand_bfloat16_gradients_add_up_to_float32_precision():
    # In bfloat16 the sum would stop growing at 256.
    count = 2_000
    grads = jnp.ones((3,), jnp.bfloat16)
    total = jax.lax.fori_loop(
        0, count, lambda i, acc: add_weighted(acc, grads, None, i == 0), jnp.zeros(3)
    )
    np.testing.assert_array_equal(total, jnp.full(3, count))


def test_float16_gradients_may_add_up_beyond_float16():
    acc, weight = window([jnp.float16([6e4])] * 4, [1, 1, 1, 1])
    np.testing.assert_array_equal(acc, np.float32([4 * 6e4]))
    np.testing.assert_array_equal(window_gradient(acc, acc, weight, mean=True), np.float32([6e4]))


@pytest.mark.slow
@hypothesis.settings(derandomize=True, max_examples=40, deadline=None)
@hypothesis.given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "complex64", "float8_e4m3fn"]),
    weights=st.lists(st.integers(0, 1_000), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    mean=st.booleans(),
)
def test_read_out_is_the_weighted_mean_or_sum(dtype, weights, seed, mean):
    hypothesis.assume(sum(weights) > 0)
    grads = [{"a": trees.normal((4,), dtype, seed=seed + i)} for i in range(len(weights))]
    acc, total = window(grads, weights)
    out = np.asarray(window_gradient(acc, grads[0], total, mean=mean)["a"])
    terms = [w * oracles.wide(g["a"]) for w, g in zip(weights, grads, strict=True)]
    divisor = sum(weights) if mean else 1
    # Each product, sum and quotient rounds once, to half an eps of the largest partial sum.
    size = sum(np.abs(t) for t in terms) / divisor
    bound = (len(weights) + 2) * 2.0**-23 * size
    assert np.all(np.abs(out - sum(terms) / divisor) <= bound)


@pytest.mark.parametrize("weight", [3, 2.5, np.int64(7), np.float16(2), jnp.int32(4), 2**40, 0])
def test_weight_is_a_float32_scalar_whatever_number_it_was(weight):
    out = as_weight("f", weight)
    assert out.dtype == jnp.float32 and out.shape == () and float(out) == float(weight)


def test_weight_of_none_stays_none():
    assert as_weight("f", None) is None


@pytest.mark.parametrize(
    ("weight", "error", "got"),
    [
        (jnp.ones(2), TypeError, "float32[2]"),
        (np.ones((1,)), TypeError, "float64[1]"),
        (1j, TypeError, "complex[]"),
        (jnp.complex64(1), TypeError, "complex64[]"),
        (-1, ValueError, "-1"),
        (jnp.float32(-2), ValueError, "Array(-2., dtype=float32)"),
    ],
)
def test_a_weight_that_is_no_scalar_at_least_zero_is_refused(weight, error, got):
    message = f"f: `weight` must be a real scalar >= 0, got {got}. Pass the number of examples or"
    with pytest.raises(error, match=re.escape(message)):
        as_weight("f", weight)


def test_stochastic_rounding_of_a_long_sum_is_right_in_the_mean():
    # 1.001 a thousand times: in bfloat16 the sum stops growing at 256, where 1.001 is half an eps.
    params, count = jnp.zeros(512), 1_000
    wanted = count * 1.001

    def run(**kwargs):
        tx = gcx.accumulate_gradients(
            optax.identity(), 2 * count, reduction="sum", accumulator_dtype=jnp.bfloat16, **kwargs
        )
        step = lambda state, _: (tx.update(jnp.full(512, 1.001), state, params)[1], None)  # noqa: E731
        state = jax.jit(lambda s: jax.lax.scan(step, s, length=count)[0])(tx.init(params))
        assert state.acc_grads.dtype == jnp.bfloat16
        return np.asarray(state.acc_grads, np.float64)

    first, again = run(rounding="stochastic"), run(rounding="stochastic")
    np.testing.assert_array_equal(first, again)
    # Five standard errors of the mean.
    assert abs(first.mean() - wanted) < 5 * first.std() / np.sqrt(first.size)
    assert run().max() < 0.6 * wanted


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_stochastic_rounding_keeps_what_is_not_finite(bad):
    micro_batch = MicroBatch(jnp.full(64, bad), ["sum"], None, jax.random.key(0))
    out = add_micro_batch(jnp.zeros(64, jnp.bfloat16), micro_batch, LATER)
    np.testing.assert_array_equal(np.float32(out), np.full(64, bad, np.float32))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_weights_may_be_larger_than_the_accumulator_can_hold(dtype):
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2, accumulator_dtype=dtype)
    params = jnp.zeros(3)
    state = tx.init(params)
    for weight in (40_001.0, 40_003.0):
        updates, state = tx.update(jnp.full(3, 0.5), state, params, weight=weight)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(updates, -0.5, rtol=2 * eps)
