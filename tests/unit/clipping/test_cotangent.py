"""`clip_cotangent`: the identity forward, a clip by norm on the way back. Oracle: float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx
import oracles
import trees
from guard_cases import SHARDS, sharded

SHAPE = (4, 3, 8)
UNITS = {-1: (2,), (1, 2): (1, 2), None: (0, 1, 2)}


@functools.partial(jax.jit, static_argnames="axis")
def clipped(cotangent, max_norm, axis=-1):
    """The clipped cotangent of an array of ones."""
    x = jnp.ones_like(cotangent)
    value, back = jax.vjp(lambda x: gcx.clip_cotangent(x, max_norm, axis=axis), x)
    return back(cotangent)[0] + (value - x)


@pytest.mark.parametrize(
    ("dtype", "scale", "axis"),
    [
        *(("float32", 1.0, axis) for axis in UNITS),
        ("float16", 3e4, -1),
        ("bfloat16", 1e18, -1),
        ("complex64", 1e18, -1),
    ],
)
def test_each_unit_is_clipped_by_itself(dtype, scale, axis):
    sizes, max_norm = np.logspace(-2, 0, 12).reshape(4, 3, 1), scale / 10
    cotangent = jnp.asarray(trees.normal(SHAPE) * (sizes * scale / 4), dtype)
    grad = clipped(cotangent, max_norm, axis)
    assert grad.dtype == cotangent.dtype
    exact = oracles.unit_norms(cotangent, UNITS[axis])
    within = np.broadcast_to(exact <= max_norm, SHAPE)
    assert np.array_equal(np.asarray(grad)[within], np.asarray(cotangent)[within])
    expected = oracles.wide(cotangent) * oracles.clip_factor(exact, max_norm)
    tiny = float(ml_dtypes.finfo(cotangent.real.dtype).smallest_subnormal)
    rtol = 1e-6 if dtype == "float32" else 2 * oracles.eps(cotangent.real.dtype) + 1e-6
    np.testing.assert_allclose(oracles.wide(grad), expected, rtol=rtol, atol=tiny)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_unit_is_nan_and_touches_no_other(bad):
    good = trees.normal(SHAPE)
    expected = np.array(clipped(good, 2.0))
    expected[1, 2] = np.nan
    np.testing.assert_array_equal(clipped(good.at[1, 2, 3].set(bad), 2.0), expected)


def test_traced_max_norm_of_any_value_never_raises():
    cotangent = trees.normal(SHAPE).at[0].set(0.0)
    assert not clipped(cotangent, 0.0).any() and not clipped(cotangent, -1.0).any()
    assert np.isnan(clipped(cotangent, np.nan)[1:]).all()
    assert np.array_equal(clipped(cotangent, np.inf), cotangent)


def test_empty_arrays_and_vectors():
    grads = jax.jit(jax.grad(lambda x: jnp.sum(3.0 * gcx.clip_cotangent(x, 1.0))))
    for shape in ((0, 3), (3, 0), (5,)):
        grad = grads(jnp.ones(shape))
        np.testing.assert_allclose(grad, np.full(shape, 1 / np.sqrt(5)), rtol=1e-6)


# --- inside a model ------------------------------------------------------------------------------


def loss_of(weights, x, max_norm, *, in_scan):
    """The loss of layers with a clip at the end of each."""

    def layer(x, w):
        return gcx.clip_cotangent(jnp.tanh(x @ w), max_norm), None

    if in_scan:
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
    else:
        for w in weights:
            x, _ = layer(x, w)
    return jnp.sum(x**3)


def test_rematerialised_layers_of_a_scan_are_clipped_at_each_of_many_examples():
    weights, x = trees.normal((3, 8, 8)), trees.normal((4, 3, 8), scale=0.3)
    found, expected = (
        jax.jit(jax.vmap(jax.grad(functools.partial(loss_of, in_scan=in_scan)), (None, 0, 0)))(
            weights, x, jnp.array([0.1, 0.5, 1.0, 9.0])
        )
        for in_scan in (True, False)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-4)


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_clipped_gradient():
    # loss = sum(x^3): the gradient of a long token is c x^2 / |x^2|, of a short one 3 x^2.
    def grad(x):
        return jax.grad(lambda x: jnp.sum(gcx.clip_cotangent(x, 1.0) ** 3))(x)

    def by_hand(x):
        g = 3 * x**2
        return g / jnp.maximum(jnp.sqrt(jnp.sum(g * g, -1, keepdims=True)), 1.0)

    x = jnp.array([[1.0, 2.0], [0.1, 0.2]])
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jacobian(grad)(x), jax.jacfwd(by_hand)(x), rtol=1e-5)


# --- devices -------------------------------------------------------------------------------------


@jax.jit
def grads_of(x, weight):
    return jax.grad(lambda x: jnp.sum(weight * gcx.clip_cotangent(x, 1.0)))(x)


TOKENS = np.ones((8, 4, 6), np.float32), trees.normal((8, 4, 6))
GATHERING = ("all-gather", "all-to-all")
# How the tokens are sharded, and the collectives that this must not cost.
LAYOUTS = {
    "batch and time": (P("data", "model", None), ("all-reduce", *GATHERING)),
    "features": (P("data", None, "model"), GATHERING),
}


@compat.needs_eight_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("spec", "forbidden"), LAYOUTS.values(), ids=LAYOUTS)
def test_sharded_tokens_are_not_gathered_and_only_features_are_summed(spec, forbidden, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    placed = jax.device_put(TOKENS, NamedSharding(mesh, spec))
    np.testing.assert_allclose(grads_of(*placed), grads_of(*TOKENS), rtol=1e-6)
    text = grads_of.lower(*placed).compile().as_text()
    assert not any(collective in text for collective in forbidden)


@compat.needs_eight_devices
def test_inside_shard_map_each_device_clips_its_own_tokens():
    found = sharded(SHARDS, SHARDS)(grads_of)(*TOKENS)
    np.testing.assert_allclose(found, grads_of(*TOKENS), rtol=1e-6)
