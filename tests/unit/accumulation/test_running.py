"""The running sum of a window: its dtypes, its weights, and how it rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
import oracles
import trees
from accumulation_cases import run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulator_is_of_the_dtype_chosen_or_the_complex_or_64_bit_type_over_it(dtype):
    with compat.x64():
        kinds = (*trees.REAL, "complex64", "float64", "complex128")
        params = {kind: jnp.zeros((2, 3), kind) for kind in kinds}
        tx = gcx.accumulate_gradients(optax.scale(1.0), 2, accumulator_dtype=np.dtype(dtype))
        for kind, acc in jax.eval_shape(tx.init, params).acc_grads.items():
            assert acc.dtype == (dtype if kind in trees.REAL else kind)
            assert acc.shape == (2, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_window_is_read_as_the_weighted_mean_or_sum_of_every_dtype(dtype, reduction):
    weights, grads = np.float32([3, 0, 1000, 7]), trees.normal((4, 5), dtype)
    tx = gcx.accumulate_gradients(optax.scale(1.0), 5, reduction=reduction)
    _, states = run(tx, grads[0], grads, [{"weight": weight} for weight in weights])
    is_mean, state = reduction == "mean", states[-1]
    found = np.asarray(gcx.accumulated_gradients(state) if is_mean else state.acc_grads)
    divisor = weights.sum() if reduction == "mean" else 1
    terms = weights[:, None] * oracles.wide(grads) / divisor
    # Each product, sum and quotient rounds once, to half an eps of the largest partial sum.
    bound = 6 * 2.0**-23 * np.abs(terms).sum(axis=0)
    assert np.all(np.abs(found - terms.sum(axis=0)) <= bound)


@pytest.mark.parametrize("weight", [3, 2.5, np.int64(7), np.float16(2), jnp.int32(4), 2**40, 0])
def test_weight_is_a_float32_scalar_whatever_number_it_was(weight):
    tx = gcx.accumulate_gradients(optax.scale(1.0), 2)
    total = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1), weight=weight)[1].total_weight
    assert total.dtype == jnp.float32 and total.shape == () and float(total) == float(weight)


ROUNDED = {"accumulator_dtype": jnp.bfloat16, "rounding": "stochastic"}


def test_stochastic_rounding_of_a_long_sum_is_right_in_the_mean():
    # 1.001 a thousand times: in bfloat16 the sum stops growing at 256, where 1.001 is half an eps.
    params, count, wanted = jnp.zeros(512), 1_000, 1_001.0

    def run(**options):
        tx = gcx.accumulate_gradients(optax.scale(1.0), 2_000, reduction="sum", **ROUNDED | options)
        step = lambda _, state: tx.update(jnp.full(512, 1.001), state, params)[1]  # noqa: E731
        state = jax.lax.fori_loop(0, count, step, tx.init(params))
        assert state.acc_grads.dtype == jnp.bfloat16
        return np.asarray(state.acc_grads, np.float64)

    first, again = run(), run()
    np.testing.assert_array_equal(first, again)
    # Five standard errors of the mean.
    assert abs(first.mean() - wanted) < 5 * first.std() / np.sqrt(first.size)
    assert run(rounding="nearest").max() < 0.6 * wanted


def test_stochastic_rounding_of_a_mean_is_right_in_the_mean():
    tx, grads = gcx.accumulate_gradients(optax.scale(1.0), 3, **ROUNDED), jnp.full(20_000, 1.0015)
    mean = np.float64(run(tx, grads, [grads] * 3)[0][-1])
    assert abs(mean.mean() - 1.0015) < 5 * mean.std() / np.sqrt(mean.size)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_weights_may_be_larger_than_the_accumulator_can_hold(dtype):
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2, accumulator_dtype=dtype)
    weights = [{"weight": weight} for weight in (40_001.0, 40_003.0)]
    updates, _ = run(tx, jnp.zeros(3), [jnp.full(3, 0.5)] * 2, weights)
    np.testing.assert_allclose(updates[-1], -0.5, rtol=2 * float(jnp.finfo(dtype).eps))
