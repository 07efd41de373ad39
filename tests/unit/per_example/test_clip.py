"""Clipped means: factors, masks, bad examples, dtypes, donated buffers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import array, assert_close, gradients, norms, weighted_mean

import gradclip_jax as gcx

EXAMPLES, TOKENS, WIDTH = 3, 3, 16


def loss(p, x):
    """Two layers over tokens; NaN inside for an example of which a row is below -5."""
    return jnp.sum(jnp.sin(jnp.sqrt(x + 5) @ p["a"]) @ p["b"])


PARAMS = {"a": array(WIDTH, WIDTH, seed=3), "b": array(WIDTH, WIDTH, seed=4)}
BATCH = array(EXAMPLES, TOKENS, WIDTH, seed=1)


@functools.cache
def oracle():
    return gradients(loss, PARAMS, BATCH)


def weighted(p, example):
    x, weight = example
    return loss(p, x), weight


def clipped(max_norm=1.0, batch=BATCH, params=PARAMS, weights=None, **options):
    """Gradient first, statistics second."""
    fun = loss if weights is None else weighted
    run = gcx.per_example.value_and_grad(fun, max_norm, has_weight=fun is weighted, **options)
    (_, stats), grads = jax.jit(run)(params, batch if weights is None else (batch, weights))
    return grads, stats


def expected(factors, divisor=EXAMPLES):
    mean = weighted_mean(oracle()[1], np.asarray(factors))
    return jax.tree.map(lambda g: g * EXAMPLES / divisor, mean)


def test_value_and_gradient_return_as_value_and_grad_does():
    def with_aux(p, x):
        return loss(p, x), {"top": jnp.max(x)}

    run = jax.jit(gcx.per_example.value_and_grad(with_aux, jnp.inf, has_aux=True))
    (value, stats), grads = run(PARAMS, BATCH)
    values, written = oracle()
    np.testing.assert_allclose(value, values.mean(), rtol=1e-5)
    np.testing.assert_allclose(stats.value, values, rtol=1e-5)
    np.testing.assert_allclose(stats.aux["top"], BATCH.max((1, 2)), rtol=1e-6)
    assert_close(grads, jax.tree.map(lambda g: g.mean(0), written))


def test_other_factors_of_the_norm_for_a_threshold_that_may_be_traced():
    def reaction(norm, threshold):
        return threshold / (norm + 0.01)

    @jax.jit
    def run(max_norm):
        return gcx.per_example.value_and_grad(loss, max_norm, reaction=reaction)(PARAMS, BATCH)

    # Infinity disables every reaction.
    for max_norm, wanted in ((50.0, 50.0 / (norms(oracle()[1]) + 0.01)), (np.inf, np.ones(3))):
        (_, stats), grads = run(max_norm)
        np.testing.assert_allclose(stats.factor, wanted, rtol=1e-5)
        assert_close(grads, expected(wanted))


def test_the_mean_of_narrow_losses_is_summed_in_float32():
    def loss(w, x):
        return (jnp.dot(w, x) * 250).astype("float16"), 100.0

    run = gcx.per_example.value_and_grad(loss, 1.0, num_microbatches=32, has_weight=True)
    (value, _), _ = jax.jit(run)(jnp.ones(4, "float16"), jnp.ones((1024, 4), "float16"))
    assert value.dtype == "float16" and float(value) == 1000


def test_groups_are_clipped_by_their_own_norms():
    max_norms = {"first": 1.0, "last": jnp.inf}
    grads, stats = clipped(max_norms, param_labels={"a": "first", "b": "last"})
    written = oracle()[1]
    for label, leaf in (("first", "a"), ("last", "b")):
        np.testing.assert_allclose(stats.norm[label], norms(written[leaf]), rtol=1e-5)
    factors = np.minimum(1, 1 / norms(written["a"]))
    assert_close(grads["a"], weighted_mean(written["a"], factors))
    assert_close(grads["b"], written["b"].mean(0))


def test_weights_multiply_and_mask_even_a_bad_example():
    batch = BATCH.copy()
    batch[1] = np.nan
    grads, stats = clipped(1.0, batch, weights=np.array([2.0, 0.0, 1.0]))
    factors = np.minimum(1, 1 / norms(oracle()[1])) * [2, 0, 1]
    assert_close(grads, expected(factors, divisor=3))
    assert np.isnan(stats.norm[1]) and np.isfinite(stats.norm[::2]).all()


def test_weight_of_a_dropped_example_divides_the_gradient_but_not_the_value():
    batch = BATCH.copy()
    batch[1] = np.nan
    run = gcx.per_example.value_and_grad(loss, 1.0, nonfinite="zero")
    (value, _), grads = jax.jit(run)(PARAMS, batch)
    np.testing.assert_allclose(value, oracle()[0][::2].mean(), rtol=1e-5)
    assert_close(grads, expected(np.minimum(1, 1 / norms(oracle()[1])) * [1, 0, 1]))


def test_batch_without_examples_has_gradients_of_zero():
    grads, stats = clipped(1.0, BATCH[:0])
    assert stats.norm.shape == (0,)
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


def test_examples_that_are_not_real_leave_no_trace_in_one_program_for_all_numbers():
    def with_aux(p, example):
        return loss(p, example[0]), (example[1], jnp.max(example[0]))

    @jax.jit
    def run(count, *batch):
        options = {"num_microbatches": EXAMPLES, "num_real_microbatches": count}
        run = gcx.per_example.value_and_grad(
            with_aux, 1.0, has_aux=True, has_weight=True, **options
        )
        return run(PARAMS, batch)

    values, written = oracle()
    norm, tops = norms(written), BATCH.max((1, 2))
    factor = np.minimum(1, 1 / norm)
    for count in (0, 1, 3):
        # A NaN of an example that is not real would be seen even with weight 0.
        is_real = np.arange(EXAMPLES) < count
        batch = np.where(is_real[:, None, None], BATCH, np.nan).astype(np.float32)
        (value, stats), grads = run(count, batch, np.where(is_real, np.float32([2, 1, 3]), np.nan))
        weights = np.where(is_real, [2.0, 1, 3], 0)
        total = weights.sum() or 1.0
        np.testing.assert_allclose(value, values @ weights / total, rtol=1e-5)
        assert_close(grads, weighted_mean(written, factor * weights * EXAMPLES / total))
        for ours, exact in zip(stats, (values, norm, factor, weights, tops), strict=True):
            np.testing.assert_allclose(ours, np.where(is_real, exact, 0), rtol=1e-5)
    assert run._cache_size() == 1


def test_parameters_and_examples_may_be_at_any_position():
    def spread(x, a, scale, b, y):
        return loss({"a": a, "b": b}, x + y) * scale

    run = gcx.per_example.value_and_grad(spread, 1.0, argnums=(3, 1), batch_argnums=(0, -1))
    (_, stats), (b, a) = jax.jit(run)(BATCH, PARAMS["a"], 1.0, PARAMS["b"], np.zeros_like(BATCH))
    assert_close({"a": a, "b": b}, expected(np.minimum(1, 1 / norms(oracle()[1]))))
    np.testing.assert_allclose(stats.norm, norms(oracle()[1]), rtol=1e-5)


def test_unused_and_frozen_leaves_have_no_gradient_and_masked_ones_stay_as_they_are():
    def partly_frozen(p, x):
        return loss({"a": p["a"], "b": jax.lax.stop_gradient(p["b"])}, x)

    other = {"unused": np.ones(3, np.float32), "masked": optax.MaskedNode(), "none": None}
    run = jax.jit(gcx.per_example.value_and_grad(partly_frozen, 1.0))
    (_, stats), grads = run({**PARAMS, **other}, BATCH)
    assert not np.any(grads["unused"]) and not np.any(grads["b"])
    assert grads["masked"] == optax.MaskedNode() and grads["none"] is None
    written = oracle()[1]["a"]
    np.testing.assert_allclose(stats.norm, norms(written), rtol=1e-5)
    assert_close(grads["a"], weighted_mean(written, np.minimum(1, 1 / norms(written))))


@pytest.mark.slow
def test_parameters_without_a_leaf_have_gradients_of_norm_zero():
    params = {"none": None}
    run = gcx.per_example.value_and_grad(lambda p, x: jnp.sum(x), 1.0)
    (value, stats), grads = run(params, BATCH)
    np.testing.assert_allclose(value, BATCH.sum((1, 2)).mean(), rtol=1e-4)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert not np.any(stats.norm)


def test_random_keys_of_examples_are_used_once():
    def dropout(w, example):
        key, x = example
        kept = jax.random.bernoulli(key, np.float32(0.5), (TOKENS, WIDTH))
        return jnp.sum(jnp.sin(jnp.where(kept, x, 0) @ w))

    keys = jax.random.split(jax.random.key(0), EXAMPLES)
    values, grads = gradients(dropout, PARAMS["a"], (keys, BATCH))
    run = jax.jit(gcx.per_example.value_and_grad(dropout, 1e-3))
    (_, stats), ours = run(PARAMS["a"], (keys, BATCH))
    np.testing.assert_allclose(stats.value, values, rtol=1e-5)
    assert_close(ours, weighted_mean(grads, 1e-3 / norms(grads)))
