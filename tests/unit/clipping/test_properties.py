"""What holds of norms and clips for any gradient."""

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

# Numbers within the range of invariant 4, elements from 3e-17 and norms up to 4e21.
sizes = st.floats(2.0**-54, 2.0**68, width=32) | st.floats(2.0**-10, 4.0, width=32)
numbers = sizes | sizes.map(lambda x: -x) | st.sampled_from([0.0, 1.0, -1.0])
thresholds = st.floats(2.0**-50, 2.0**66, width=32)


def vectors(shape):
    return hypothesis.extra.numpy.arrays(np.float32, shape, elements=numbers)


gradients = st.fixed_dictionaries({"w": vectors((3, 2)), "b": vectors((4,)), "s": vectors(())})

CLIPS = {
    "global": (gcx.clip_by_global_norm, oracles.clip_by_global_norm),
    "leaf": (gcx.clip_by_leaf_norm, oracles.clip_by_leaf_norm),
    "block rms": (gcx.clip_by_block_rms, oracles.clip_by_block_rms),
}
_COMPILED = {
    make: jax.jit(lambda g, t, make=make: make(t).update(g, None)[0]) for make, _ in CLIPS.values()
}


@pytest.mark.parametrize(("clip", "exact"), CLIPS.values(), ids=CLIPS)
@hypothesis.given(grads=gradients, threshold=thresholds)
def test_clip_is_exact_and_small_gradients_are_unchanged(clip, exact, grads, threshold):
    """That clips are idempotent, keep the direction and commute with scaling follows from this."""
    leaves, found = list(grads.values()), _COMPILED[clip](grads, jnp.float32(threshold))
    clipped = [np.asarray(found[name]) for name in grads]  # JAX sorts the keys
    for found, wanted in zip(clipped, exact(leaves, threshold), strict=True):
        # A component below the smallest normal number may be taken for zero.
        np.testing.assert_allclose(found, wanted, rtol=8 * EPS, atol=1.2e-38)
    for found, wanted in zip(clipped, exact(clipped, threshold), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2 * EPS + 1e-6, atol=1.2e-38)  # invariant 3
    within = exact(leaves, threshold * (1 - 4 * EPS))
    if all(np.array_equal(x, oracles.wide(given)) for x, given in zip(within, leaves, strict=True)):
        assert all(x.tobytes() == given.tobytes() for x, given in zip(clipped, leaves, strict=True))
