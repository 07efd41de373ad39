"""`clip_cotangent`: the identity forward, a clip by norm on the way back. Oracle: float64 NumPy."""

import contextlib
import functools

import chex
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
UNITS = {-1: (2,), (1, 2): (1, 2), None: (0, 1, 2), 0: (0,)}


@functools.partial(jax.jit, static_argnames=("axis", "nonfinite"))
def pulled_back(x, probe, cotangent, max_norm, axis=-1, nonfinite="propagate"):
    """The value, the clipped cotangent and the norms."""

    def clip(x, probe):
        return gcx.clip_cotangent(x, max_norm, axis=axis, nonfinite=nonfinite, norm_probe=probe)

    value, back = jax.vjp(clip, x, probe)
    return value, *back(cotangent)


def clipped(cotangent, max_norm, axis=-1, **options):
    over = UNITS[axis]
    shape = [n for i, n in enumerate(cotangent.shape) if i not in over]
    wide = np.asarray(cotangent).dtype in (np.float64, np.complex128)
    probe = jnp.zeros(shape, jnp.float64 if wide else jnp.float32)
    x = jnp.ones_like(cotangent)
    value, *found = pulled_back(x, probe, cotangent, max_norm, axis, **options)
    assert np.array_equal(value, x) and value.dtype == x.dtype
    return found


@pytest.mark.parametrize(
    ("dtype", "scale", "axis"),
    [
        *(("float32", 1.0, axis) for axis in UNITS),
        ("float16", 3e4, -1),
        ("float16", 1e-3, -1),
        ("bfloat16", 1e18, -1),
        ("float32", 1e18, -1),
        ("float32", 1e-12, -1),
        ("complex64", 1e18, -1),
        ("float64", 1.0, -1),
    ],
)
def test_each_unit_is_clipped_by_itself_and_tells_its_norm(dtype, scale, axis):
    sizes, max_norm = np.logspace(-2, 0, 12).reshape(4, 3, 1), scale / 10
    with compat.x64() if dtype == "float64" else contextlib.nullcontext():
        cotangent = jnp.asarray(trees.normal(SHAPE) * (sizes * scale / 4), dtype)
        grad, norms = clipped(cotangent, max_norm, axis)
    exact = oracles.unit_norms(cotangent, UNITS[axis])
    tolerance = 1e-14 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(norms, exact.squeeze(UNITS[axis]), rtol=tolerance)
    assert grad.dtype == cotangent.dtype
    within = np.broadcast_to(exact <= max_norm, SHAPE)
    assert np.array_equal(np.asarray(grad)[within], np.asarray(cotangent)[within])
    eps = oracles.eps(cotangent.real.dtype)
    bound = max_norm * (1 + 2 * eps + tolerance)
    assert np.all(oracles.unit_norms(grad, UNITS[axis]) <= bound)
    expected = oracles.wide(cotangent) * oracles.clip_factor(exact, max_norm)
    tiny = float(ml_dtypes.finfo(cotangent.real.dtype).smallest_subnormal)
    rtol = tolerance if dtype == "float32" else 2 * eps + tolerance
    np.testing.assert_allclose(oracles.wide(grad), expected, rtol=rtol, atol=tiny)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_a_bad_unit_is_nan_or_zero_and_touches_no_other(bad, nonfinite):
    good = trees.normal(SHAPE)
    cotangent = good.at[1, 2, 3].set(bad)
    grad, norms = clipped(cotangent, 2.0, nonfinite=nonfinite)
    expected, exact = clipped(good, 2.0, nonfinite=nonfinite)
    rest = np.ones(SHAPE[:2], bool)
    rest[1, 2] = False
    assert np.array_equal(np.asarray(grad)[rest], np.asarray(expected)[rest])
    assert np.array_equal(np.asarray(norms)[rest], np.asarray(exact)[rest])
    assert not np.isfinite(norms[1, 2])
    lost = np.isnan if nonfinite == "propagate" else np.logical_not
    assert lost(np.asarray(grad)[1, 2]).all()


def test_traced_max_norm_of_any_value_never_raises():
    cotangent = trees.normal(SHAPE).at[0].set(0.0)
    assert not clipped(cotangent, 0.0)[0].any()
    assert not clipped(cotangent, -1.0)[0].any()
    assert np.isnan(clipped(cotangent, np.nan)[0][1:]).all()
    assert np.array_equal(clipped(cotangent, np.inf)[0], cotangent)
    assert np.array_equal(clipped(cotangent, 3)[0][0], cotangent[0])  # an integer; zeros stay


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (5,)])
def test_empty_arrays_and_vectors(shape):
    x = jnp.ones(shape)
    grad = jax.grad(lambda x: jnp.sum(3.0 * gcx.clip_cotangent(x, 1.0)))(x)
    expected = np.full(shape, 1 / np.sqrt(5))
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


# --- inside a model ------------------------------------------------------------------------------

WIDTH, LAYERS = 8, 5


def layer(x, inputs):
    """A layer with a clip at its end."""
    w, max_norm, probe = inputs
    return gcx.clip_cotangent(jnp.tanh(x @ w), max_norm, norm_probe=probe), None


def loss_of(probes, weights, x, max_norm, *, in_scan):
    bounds = jnp.full(LAYERS, max_norm)
    if in_scan:
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, (weights, bounds, probes))
    else:
        for inputs in zip(weights, bounds, probes, strict=True):
            x, _ = layer(x, inputs)
    return jnp.sum(x**3)


def test_rematerialised_layers_of_a_scan_are_clipped_at_each_of_many_examples():
    x, limits = trees.normal((4, 3, WIDTH), scale=0.3), jnp.array([0.1, 0.5, 1.0, 9.0])
    weights, probes = trees.normal((LAYERS, WIDTH, WIDTH)), jnp.zeros((LAYERS, 3))
    grad = jax.grad(functools.partial(loss_of, in_scan=True), argnums=(0, 1))
    norms, grads = jax.jit(jax.vmap(grad, (None, None, 0, 0)))(probes, weights, x, limits)
    one_by_one = jax.jit(jax.grad(functools.partial(loss_of, in_scan=False), argnums=(0, 1)))
    for i, limit in enumerate(limits):
        exact, expected = one_by_one(probes, weights, x[i], limit)
        np.testing.assert_allclose(grads[i], expected, rtol=2e-4, atol=1e-4)
        np.testing.assert_allclose(norms[i], exact, rtol=2e-4, atol=1e-5)
    assert (norms > limits[:, None, None]).any() and (norms < limits[:, None, None]).any()


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_clipped_gradient():
    # loss = sum(x^3): the gradient of a long token is c x^2 / |x^2|, of a short one 3 x^2.
    def grad(x):
        return jax.grad(lambda x: jnp.sum(gcx.clip_cotangent(x, 1.0) ** 3))(x)

    def by_hand(x):
        g = 3 * x**2
        return g / jnp.maximum(jnp.sqrt(jnp.sum(g * g, -1, keepdims=True)), 1.0)

    x = jnp.array([[1.0, 2.0], [0.1, 0.2]])
    direction = jnp.array([[1.0, -1.0], [2.0, 0.5]])
    expected = jax.jvp(by_hand, (x,), (direction,))[1]
    np.testing.assert_allclose(jax.jvp(grad, (x,), (direction,))[1], expected, rtol=1e-5)
    reverse = jax.grad(lambda x: jnp.vdot(grad(x), direction))(x)
    expected = jax.grad(lambda x: jnp.vdot(by_hand(x), direction))(x)
    np.testing.assert_allclose(reverse, expected, rtol=1e-5)


# --- devices -------------------------------------------------------------------------------------

needs_eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


@functools.partial(jax.jit, static_argnames="axis")
def grads_of(x, weight, probe, axis=-1):
    def loss(x, probe):
        return jnp.sum(weight * gcx.clip_cotangent(x, 1.0, axis=axis, norm_probe=probe))

    return jax.grad(loss, argnums=(0, 1))(x, probe)


# Values, weights and probes of 8 x 4 tokens.
TOKENS = np.ones((8, 4, 6), np.float32), trees.normal((8, 4, 6)), np.zeros((8, 4), np.float32)
GATHERING = ("all-gather", "all-to-all")
# How the tokens are sharded, and the collectives that this must not cost.
LAYOUTS = {
    "batch": (P("data", None, None), ("all-reduce", *GATHERING)),
    "batch and time": (P("data", "model", None), ("all-reduce", *GATHERING)),
    "features": (P("data", None, "model"), GATHERING),
}


@needs_eight
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("spec", "forbidden"), LAYOUTS.values(), ids=LAYOUTS)
def test_sharded_tokens_are_not_gathered_and_only_features_are_summed(spec, forbidden, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    specs = (spec, spec, P(*spec[:2]))  # a probe has no features
    placed = jax.device_put(TOKENS, tuple(NamedSharding(mesh, one) for one in specs))
    chex.assert_trees_all_close(grads_of(*placed), grads_of(*TOKENS), rtol=1e-6)
    text = grads_of.lower(*placed).compile().as_text()
    assert not any(collective in text for collective in forbidden)


@needs_eight
def test_inside_shard_map_each_device_clips_its_own_tokens():
    found = sharded(SHARDS, SHARDS)(grads_of)(*TOKENS)
    chex.assert_trees_all_close(found, grads_of(*TOKENS), rtol=1e-6)
