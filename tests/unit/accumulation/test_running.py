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


def test_the_weighted_sum_of_every_dtype_is_exact_to_float32():
    weights = np.float32([3, 0, 1000, 7])
    dtypes = ("float32", "bfloat16", "float16", "complex64", "float8_e4m3fn")
    grads = [{x: trees.normal((5,), x, seed=i) for x in dtypes} for i in range(len(weights))]
    tx = gcx.accumulate_gradients(optax.scale(1.0), 5)
    _, states = run(tx, grads[0], grads, [{"weight": weight} for weight in weights])
    assert float(states[-1].total_weight) == weights.sum()
    for dtype, found in states[-1].acc_grads.items():
        terms = weights[:, None] * np.stack([oracles.wide(g[dtype]) for g in grads])
        # Each product and sum rounds once, to half an eps of the largest partial sum.
        bound = 6 * 2.0**-23 * np.abs(terms).sum(axis=0)
        assert np.all(np.abs(found - terms.sum(axis=0)) <= bound)


@pytest.mark.parametrize("weight", [3, 2.5, np.int64(7), np.float16(2), jnp.int32(4), 2**40, 0])
def test_weight_is_a_float32_scalar_whatever_number_it_was(weight):
    tx = gcx.accumulate_gradients(optax.scale(1.0), 2)
    total = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1), weight=weight)[1].total_weight
    assert total.dtype == jnp.float32 and total.shape == () and float(total) == float(weight)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_weights_may_be_larger_than_the_accumulator_can_hold(dtype):
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2, accumulator_dtype=dtype)
    weights = [{"weight": weight} for weight in (40_001.0, 40_003.0)]
    updates, _ = run(tx, jnp.zeros(3), [jnp.full(3, 0.5)] * 2, weights)
    np.testing.assert_allclose(updates[-1], -0.5, rtol=2 * float(jnp.finfo(dtype).eps))
