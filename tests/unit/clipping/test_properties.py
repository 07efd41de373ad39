"""What holds of norms and clips for any gradient."""

import math

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import gradclip_jax as gcx
import oracles

pytestmark = pytest.mark.slow

EPS = float(np.finfo(np.float32).eps)

# Numbers within the range of invariant 4, norms from 1e-12 to 1e25.
sizes = st.floats(2.0**-32, 2.0**70, width=32) | st.floats(2.0**-10, 4.0, width=32)
numbers = sizes | sizes.map(lambda x: -x) | st.sampled_from([0.0, 1.0, -1.0])
thresholds = st.floats(2.0**-30, 2.0**66, width=32)
exponents = st.integers(-8, 8)


def vectors(shape):
    return hypothesis.extra.numpy.arrays(np.float32, shape, elements=numbers)


gradients = st.fixed_dictionaries({"w": vectors((3, 2)), "b": vectors((4,)), "s": vectors(())})

CLIPS = {
    "global": (gcx.clip_by_global_norm, lambda g: [oracles.global_norm(list(g.values()))]),
    "leaf": (gcx.clip_by_leaf_norm, lambda g: oracles.leaf_norms(list(g.values()))),
    "block rms": (gcx.clip_by_block_rms, lambda g: [oracles.rms(x) for x in g.values()]),
}
clips = pytest.mark.parametrize(("clip", "norms"), CLIPS.values(), ids=CLIPS)
_COMPILED = {
    make: jax.jit(lambda g, t, make=make: make(t).update(g, None)[0]) for make, _ in CLIPS.values()
}


def apply(make, grads, threshold):
    clipped = _COMPILED[make](grads, jnp.float32(threshold))
    return {name: np.asarray(clipped[name]) for name in grads}  # JAX sorts the keys


@clips
@hypothesis.given(grads=gradients, threshold=thresholds)
def test_norm_is_bounded(clip, norms, grads, threshold):
    for norm in norms(apply(clip, grads, threshold)):
        assert norm <= threshold * (1 + 2 * EPS + 1e-6)  # invariant 3


@clips
@hypothesis.given(grads=gradients, threshold=thresholds)
def test_small_gradients_are_unchanged_and_large_ones_reach_the_bound(
    clip, norms, grads, threshold
):
    clipped = apply(clip, grads, threshold)
    for norm, after in zip(norms(grads), norms(clipped), strict=True):
        if norm >= threshold * (1 + 4 * EPS):
            assert after >= threshold * (1 - 8 * EPS)
    if max(norms(grads)) <= threshold * (1 - 4 * EPS):
        assert all(clipped[name].tobytes() == x.tobytes() for name, x in grads.items())


@hypothesis.given(grads=gradients, threshold=thresholds)
def test_direction_is_kept(grads, threshold):
    clipped = oracles.ravel(list(apply(gcx.clip_by_global_norm, grads, threshold).values()))
    before = oracles.ravel(list(grads.values()))
    norm = oracles.vector_norm(before)
    hypothesis.assume(norm > 0)
    expected = before * oracles.clip_factor(norm, threshold)
    # A component below the smallest normal number may be taken for zero.
    np.testing.assert_allclose(clipped, expected, rtol=8 * EPS, atol=1.2e-38)


@clips
@hypothesis.given(grads=gradients, threshold=thresholds)
def test_clipping_twice_is_clipping_once(clip, norms, grads, threshold):
    once = apply(clip, grads, threshold)
    twice = apply(clip, once, threshold)
    for name, x in once.items():
        np.testing.assert_allclose(twice[name], x, rtol=4 * EPS, atol=1.2e-38)


@clips
@hypothesis.given(
    grads=gradients, threshold=st.floats(2.0**-20, 2.0**20, width=32), exponent=exponents
)
def test_clip_is_equivariant_to_scale(clip, norms, grads, threshold, exponent):
    """clip(c g, c t) = c clip(g, t); c a power of two, so that c g is exact."""
    c = np.float32(2.0**exponent)
    largest = max(float(np.abs(x).max()) for x in grads.values())
    hypothesis.assume(largest * float(c) < 1e24)
    grads = {
        name: np.where(np.abs(x) * min(c, 1) < 1e-25, np.float32(0), x) for name, x in grads.items()
    }
    scaled = apply(clip, {name: c * x for name, x in grads.items()}, c * np.float32(threshold))
    for name, x in apply(clip, grads, threshold).items():
        tiny = 1.2e-38 * max(1.0, float(c))
        np.testing.assert_allclose(scaled[name], c * x, rtol=8 * EPS, atol=tiny)


@pytest.mark.parametrize("ord", [1.0, 2.0, 3.0, math.inf])
@hypothesis.given(x=vectors((8,)), exponent=exponents)
def test_norm_is_right_even_and_homogeneous(ord, x, exponent):
    norm = float(_NORM_OF_ORDER[ord](x))
    assert norm == pytest.approx(oracles.vector_norm(x, ord), rel=4 * EPS, abs=1e-44)
    assert float(_NORM_OF_ORDER[ord](-x)) == norm
    c = np.float32(2.0**exponent)
    hypothesis.assume(1e-11 < norm * float(c) < 1e24)
    x = np.where(np.abs(x) * min(c, 1) < 1e-37, np.float32(0), x)
    assert float(_NORM_OF_ORDER[ord](c * x)) == pytest.approx(norm * float(c), rel=8 * EPS)


_NORM_OF_ORDER = {
    p: jax.jit(lambda x, p=p: gcx.global_norm(x, ord=p)) for p in (1.0, 2.0, 3.0, math.inf)
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@hypothesis.given(data=st.data())
def test_norm_is_bounded_in_low_precision(dtype, data):
    """Invariant 3 on raw bit patterns: every finite number of the dtype, subnormal ones too."""
    kind = np.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * kind.itemsize}")
    raw = data.draw(hypothesis.extra.numpy.arrays(unsigned, (64,)))
    x = raw.view(kind)
    x = np.where(np.isfinite(oracles.wide(x)), x, kind.type(0))
    ratio = data.draw(st.floats(1e-4, 1.0))
    norm = oracles.vector_norm(x)
    hypothesis.assume(1e-10 < norm < 1e24)
    clipped = apply(gcx.clip_by_global_norm, {"x": x}, norm * ratio)["x"]
    assert clipped.dtype == kind
    bound = float(np.float32(norm * ratio))
    assert oracles.vector_norm(clipped) <= bound * (1 + 2 * oracles.eps(dtype))


@hypothesis.given(
    x=vectors((16,)), low=st.floats(-10, -0.125, width=32), width=st.floats(0.125, 10, width=32)
)
def test_clamp_is_right(x, low, width):
    high = np.float32(low + width)
    clamped = np.asarray(_CLAMP(x, np.float32(low), high))
    np.testing.assert_array_equal(clamped, np.clip(x, np.float32(low), high))


_CLAMP = jax.jit(lambda x, low, high: gcx.clip(high, min_value=low).update(x, None)[0])
