"""What is read on the host: bad leaves by path, and a suggested max_norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from oracles import wide
from trees import build


def test_bad_leaves_are_named_by_path_the_worst_first():
    tree = {
        "fine": jnp.ones(3),
        "enc": [jnp.array([1.0, np.nan]), {"w": jnp.array([[np.nan, 1.0], [np.inf, -np.inf]])}],
        "none": None,
    }
    found = gcx.diagnostics.nonfinite_leaves(tree)
    assert list(found.items()) == [("['enc'][1]['w']", 3), ("['enc'][0]", 1)]
    assert all(type(count) is int for count in found.values())
    every = gcx.diagnostics.nonfinite_leaves(tree, include_finite=True)
    assert list(every.items()) == [("['enc'][0]", 1), ("['enc'][1]['w']", 3), ("['fine']", 0)]


BAD = [1.0, np.nan, np.inf, 2.0]
OF_ADAM = optax.ScaleByAdamState(jnp.int32(1), {"w": jnp.ones(2)}, {"w": jnp.float32(BAD)})


@pytest.mark.parametrize(
    ("tree", "counts"),
    [
        *((jnp.array(BAD, x), {"": 2}) for x in ("float16", "bfloat16", "float8_e5m2")),
        (jnp.array(BAD, "complex64"), {"": 2}),
        ({"a": np.array(BAD), "b": float("inf"), "c": 3}, {"['a']": 2, "['b']": 1}),
        ((OF_ADAM, optax.EmptyState()), {"[0].nu['w']": 2}),
        ([jnp.arange(3), jnp.array([True]), np.zeros(2, jax.dtypes.float0)], {}),
        ({"key": jax.random.key(0)}, {}),
        *((build(name), {}) for name in ("masked", "float8", "zero_size", "extreme")),
    ],
)
def test_leaves_of_any_type_are_counted(tree, counts):
    assert gcx.diagnostics.nonfinite_leaves(tree) == counts


@pytest.mark.parametrize("percentile", [12.5, 50.0, 100.0])
def test_the_suggestion_is_a_percentile_of_what_is_finite(percentile):
    norms = np.random.default_rng(0).lognormal(size=(40, 3)).astype(np.float32)
    holes = norms.copy()
    holes[5], holes[7, 1] = np.nan, np.inf
    kept = wide(holes[np.isfinite(holes)])
    suggestion = gcx.diagnostics.suggest_max_norm(jnp.asarray(holes), percentile)
    assert type(suggestion) is float
    assert suggestion == np.percentile(kept, percentile)
    assert gcx.diagnostics.suggest_max_norm([4.0, 1.0, 2.0, np.inf]) == 2.0  # the median
