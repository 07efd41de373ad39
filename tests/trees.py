"""Example gradient trees by name, one for everything a tree may hold. `build(name)` makes one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

FLOAT8 = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
)
LOW = ("float16", "bfloat16", *FLOAT8)
REAL = ("float32", *LOW)


def normal(shape, dtype="float32", *, seed=0, scale=1.0):
    """Normal numbers in a dtype, complex ones in both parts."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * scale
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        values = values + 1j * rng.standard_normal(shape) * scale
    return jax.device_put(values.astype(dtype))


def _mixed_dtypes() -> Any:
    names = ("float32", "float16", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2")
    return {name: normal((3, 5), name, seed=i) for i, name in enumerate(names)}


def _masked() -> Any:
    return {
        "a": normal((3,)),
        "b": None,
        "c": optax.MaskedNode(),
        "d": (None, [normal((2, 2), seed=1), optax.MaskedNode()]),
    }


TREES: dict[str, Callable[[], Any]] = {
    "mixed_dtypes": _mixed_dtypes,
    "masked": _masked,
    "empty": lambda: {},
    "only_none": lambda: {"a": None, "b": (optax.MaskedNode(), [])},
    "only_zero_size": lambda: [jnp.zeros((0,)), jnp.zeros((3, 0), jnp.bfloat16)],
    "scalars": lambda: {"a": jnp.float32(3.0), "b": jnp.float16(-4.0), "c": jnp.bfloat16(0.5)},
    "stacked": lambda: {"kernel": normal((3, 4, 5), seed=1), "bias": normal((3, 5), seed=2)},
    "float8": lambda: {name: normal((6,), name, seed=i) for i, name in enumerate(FLOAT8)},
    "numpy": lambda: {"a": np.float32([3.0, 4.0]), "b": np.ones((2, 2), ml_dtypes.bfloat16)},
    "zeros": lambda: {"a": jnp.zeros((3, 2)), "b": jnp.zeros((2,), jnp.float16)},
    "extreme": lambda: {
        "huge": jnp.float32([1e38, -2e38]),
        "tiny": jnp.float32([1e-38, 3e-38]),
        "half": jnp.float16([6e4, 6e-8]),
        "ordinary": normal((3,)),
    },
}


def build(name: str) -> Any:
    return TREES[name]()


def leaves(tree: Any) -> list[np.ndarray]:
    """The measured leaves as NumPy arrays, in order: what the oracles take."""
    return [np.asarray(x) for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]
