"""Each optimizer of Optax beside the one of this package that takes its place."""

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx

STEPS, EVERY = 20, 4
STOP = 10  # in the middle of a window
MAX_NORM = 0.1  # low, so that most steps are clipped


def of_optax(name):
    tx = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(1e-2))
    if name == "guarded":
        tx = optax.apply_if_finite(tx, max_consecutive_errors=3)
    if name == "accumulated":
        tx = optax.MultiSteps(tx, EVERY).gradient_transformation()
    return tx


def of_ours(name):
    tx = optax.chain(gcx.clip_by_global_norm(MAX_NORM), optax.adam(1e-2))
    if name == "guarded":
        tx = gcx.skip_nonfinite(tx)
    if name == "accumulated":
        tx = gcx.accumulate_gradients(tx, EVERY)
    if name == "both":
        tx = gcx.skip_nonfinite(gcx.accumulate_gradients(tx, EVERY))
    return tx


NAMES = ["alone", "guarded", "accumulated"]


def check_same(found, expected, rtol=1e-5, atol=1e-6):
    """Two trees hold the same numbers, all finite, to float32 rounding of 20 steps."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        assert np.isfinite(np.asarray(y, np.float64)).all()
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol
        )


MESH = Mesh(jax.devices(), ("data",))
EVERYWHERE = NamedSharding(MESH, P())  # a copy on each device


def on_all_devices(x):
    """The array with its rows spread over all devices."""
    return jax.device_put(x, NamedSharding(MESH, P("data")))
