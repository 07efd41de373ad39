"""What the supported releases of JAX spell in different ways."""

import contextlib

import jax
import pytest

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])
# A string, because a process calls `jax.distributed.initialize` before it asks for devices.
needs_eight_devices = pytest.mark.skipif("jax.device_count() < 8", reason="needs eight devices")


@contextlib.contextmanager
def x64():
    """64-bit types inside the block, whatever is set outside."""
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable(True):
        yield


def vary(tree, *axes):
    """The same values, typed as ones that may differ along mesh axes: gradients stay local."""
    if hasattr(jax.lax, "pcast"):
        return jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), tree)
    return jax.tree.map(lambda x: jax.lax.pvary(x, axes), tree)


@contextlib.contextmanager
def strict():
    """Nothing is promoted: not dtypes, not ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
