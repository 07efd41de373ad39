"""What is read on the host: bad leaves by path, and a suggested max_norm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from oracles import wide
from trees import TREES, build


def test_bad_leaves_are_named_by_path_the_worst_first():
    tree = {
        "fine": jnp.ones(3),
        "enc": [{"w": jnp.array([[np.nan, 1.0], [np.inf, -np.inf]])}, jnp.array([1.0, np.nan])],
        "s": jnp.float32(np.nan),
        "none": None,
    }
    found = gcx.diagnostics.nonfinite_leaves(tree)
    assert found == {"['enc'][0]['w']": 3, "['enc'][1]": 1, "['s']": 1}
    assert list(found)[0] == "['enc'][0]['w']"
    assert all(type(count) is int for count in found.values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "complex64"])
def test_every_dtype_is_counted(dtype):
    bad = jnp.array([1.0, np.nan, np.inf, 2.0], dtype)
    assert gcx.diagnostics.nonfinite_leaves(bad) == {"": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_a_finite_tree_has_no_bad_leaves(name):
    assert gcx.diagnostics.nonfinite_leaves(build(name)) == {}


def test_integers_and_float0_are_finite():
    tree = {"n": jnp.arange(3), "b": jnp.array([True]), "z": np.zeros(2, jax.dtypes.float0)}
    assert gcx.diagnostics.nonfinite_leaves(tree) == {}


def test_numpy_leaves_and_python_numbers_are_counted():
    tree = {"a": np.array([np.nan, 1.0]), "b": float("inf"), "c": 3}
    assert gcx.diagnostics.nonfinite_leaves(tree) == {"['a']": 1, "['b']": 1}


def test_a_whole_optimizer_state_can_be_searched():
    params = {"w": jnp.ones(2)}
    tx = optax.adam(0.1)
    _, state = tx.update({"w": jnp.array([1e20, 1.0])}, tx.init(params))
    assert gcx.diagnostics.nonfinite_leaves(state) == {"[0].nu['w']": 1}


def test_a_key_of_a_random_generator_is_finite():
    assert gcx.diagnostics.nonfinite_leaves({"key": jax.random.key(0)}) == {}


@pytest.mark.parametrize("percentile", [0.0, 12.5, 50.0, 90.0, 100.0])
def test_the_suggestion_is_a_percentile_of_what_is_finite(percentile):
    norms = np.random.default_rng(0).lognormal(size=(40, 3)).astype(np.float32)
    holes = norms.copy()
    holes[5], holes[7, 1] = np.nan, np.inf
    kept = wide(holes[np.isfinite(holes)])
    suggestion = gcx.diagnostics.suggest_max_norm(jnp.asarray(holes), percentile)
    assert type(suggestion) is float
    assert suggestion == np.percentile(kept, percentile)
    assert gcx.diagnostics.suggest_max_norm(norms.tolist(), percentile) == np.percentile(
        norms.astype("d"), percentile
    )


def test_the_suggestion_is_the_median():
    norms = np.random.default_rng(1).lognormal(size=1000)
    max_norm = gcx.diagnostics.suggest_max_norm(norms)
    assert np.mean(norms <= max_norm) == 0.5
