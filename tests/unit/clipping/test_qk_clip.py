"""`qk_clip`: attention logits bounded through the weights. Oracle: float64 NumPy attention."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
import oracles
import trees
from accumulation_cases import collectives

WIDTH, HEAD_DIM, HEADS, TAU = 12, 4, 8, 10.0
clip = jax.jit(gcx.qk_clip, static_argnames="head_axis")
# Largest logits of the heads: within, at, just beyond and far beyond the threshold.
LOGITS = np.float32([3.0, 10.0, 10.5, 40.0, 1e3, 20.0, 1e-3, 90.0])


def kernel(heads, seed):
    return trees.normal((WIDTH, heads, HEAD_DIM), seed=seed)


def gammas(logits, tau=TAU):
    return np.minimum(1.0, tau / np.maximum(np.float64(logits), tau))


def largest_logits(query, key, x):
    """The largest logit of each query head; query head h reads key head h // group."""
    q, k = (np.einsum("td,dhe->the", x, oracles.wide(w)) for w in (query, key))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return np.einsum("qhe,khe->hqk", q, k).max(axis=(1, 2))


@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("tau", [3.0, 60.0])
def test_no_logit_is_beyond_the_threshold_on_the_same_activations(key_heads, tau):
    scales = np.float32([1, 3, 0.1, 5, 2, 2, 0.5, 1])[:, None]
    query, key, x = (
        kernel(HEADS, 0) * scales,
        kernel(key_heads, 1),
        np.random.default_rng(7).standard_normal((32, WIDTH)),
    )
    before = largest_logits(query, key, x)
    new_query, new_key = clip(query, key, before.astype(np.float32), tau)
    after = largest_logits(new_query, new_key, x)
    # Each head to its own factor: not below what is asked, and no other head pays for it.
    np.testing.assert_allclose(after, before * gammas(before, tau), rtol=1e-6)
    assert np.all(after <= tau * (1 + 1e-6))
    within = before <= tau
    assert np.array_equal(np.asarray(new_query)[:, within], np.asarray(query)[:, within])
    shared_within = within.reshape(key_heads, -1).any(axis=1)
    kept = np.asarray(new_key)[:, shared_within]
    assert np.array_equal(kept, np.asarray(key)[:, shared_within])
    assert np.all(np.abs(new_query) <= np.abs(query)) and np.all(np.abs(new_key) <= np.abs(key))


def test_a_logit_or_threshold_that_says_nothing_changes_nothing():
    weights = kernel(HEADS, 0)
    logits = np.float32([np.nan, 40.0, np.inf, -np.inf, -50.0, 0.0, 9.0, 10.0])
    query, key = clip(weights, weights, logits, TAU)
    rotary, _ = clip(weights, None, logits, TAU)
    for found, factor in ((query, 0.5), (key, 0.5), (rotary, 0.25)):
        expected = np.array(weights)
        expected[:, 1] *= factor
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert np.array_equal(np.delete(found, 1, axis=1), np.delete(weights, 1, axis=1))
    for tau in (0.0, -1.0, np.nan, np.inf):
        for found in clip(weights, weights, LOGITS, tau):
            assert np.array_equal(found, weights)


@pytest.mark.parametrize("logit", [25.0, 3e38])
def test_weights_keep_their_dtype_and_are_rounded_once(logit):
    weights = kernel(HEADS, 0).astype("bfloat16")
    logits = np.full(HEADS, logit, np.float32)
    expected = oracles.wide(weights) * np.sqrt(gammas(logits))[:, None]
    for found in clip(weights, weights, logits, TAU):
        assert found.dtype == weights.dtype
        np.testing.assert_allclose(oracles.wide(found), expected, rtol=oracles.eps("bfloat16"))


def test_kernel_and_bias_are_scaled_alike_on_any_axis():
    query = {"kernel": kernel(4, 0), "bias": trees.normal((4, HEAD_DIM)), "none": None}
    key = {"kernel": kernel(2, 1), "bias": trees.normal((2, HEAD_DIM))}
    logits = np.float32([40.0, 40.0, 1.0, 40.0])
    new_query, new_key = clip(query, key, logits, TAU)
    np.testing.assert_allclose(new_query["bias"][:2], query["bias"][:2] / 2, rtol=1e-6)
    np.testing.assert_allclose(new_key["kernel"][:, 0], key["kernel"][:, 0] / 2, rtol=1e-6)
    first, _ = clip(np.ones((4, 2), "f"), np.ones((2, 2), "f"), logits, TAU, head_axis=0)
    np.testing.assert_allclose(first[:, 0], new_query["bias"][:, 0] / query["bias"][:, 0])


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_heads_ask_no_other_device(kind):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(kind,), devices=jax.devices()[:4])
    given = kernel(HEADS, 0), kernel(4, 1), LOGITS
    expected = clip(*given, TAU)
    heads = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("model"))
    placed = jax.device_put(given, (heads[0], heads[0], heads[1]))
    for found, wanted in zip(clip(*placed, TAU), expected, strict=True):
        assert found.sharding.is_equivalent_to(heads[0], 3)
        assert np.array_equal(found, wanted)
    assert not collectives(clip.lower(*placed, TAU).compile().as_text(), branches=True)
