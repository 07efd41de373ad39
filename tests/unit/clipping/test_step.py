"""One clipping step: `clip_grad_norm`, and what the state has to tell."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compat
import gradclip_jax as gcx
import hlo
import oracles
import trees
from clip_cases import assert_close


def big():
    return {"a": jnp.ones((500, 300)), "b": jnp.ones((200_000,))}


SIZE = 149_900  # of the smaller leaf of `big`, whose last few older JAX adds up apart


# --- clip_grad_norm -------------------------------------------------------------------------


@pytest.mark.parametrize("ord", [1.0, 2.0, math.inf])
def test_clip_grad_norm_is_right(ord):
    names = ("mixed_dtypes", "masked", "stacked", "numpy")
    grads = {name: trees.build(name) for name in names}
    clipped, norm = jax.jit(lambda g: gcx.clip_grad_norm(g, 0.5, ord=ord))(grads)
    leaves = trees.leaves(grads)
    assert float(norm) == pytest.approx(oracles.global_norm(leaves, ord), rel=1e-6)
    assert jax.tree.structure(clipped) == jax.tree.structure(grads)
    assert_close(trees.leaves(clipped), oracles.clip_by_global_norm(leaves, 0.5, ord))


def test_known_norm_is_used_and_not_computed_again():
    grads = {"a": jnp.float32([3.0]), "b": jnp.float32([4.0])}
    clipped, norm = gcx.clip_grad_norm(grads, 1.0, norm=10.0)
    assert norm == 10.0 and norm.dtype == jnp.float32
    np.testing.assert_allclose(clipped["b"], [0.4], rtol=1e-6)
    for bad in (math.nan, math.inf):  # whatever `global_norm` gives, also outside of jit
        clipped, norm = gcx.clip_grad_norm(grads, 1.0, norm=gcx.global_norm(jnp.float32([1, bad])))
        assert np.isnan(clipped["a"]).all()
        np.testing.assert_equal(float(norm), bad)
    text = hlo.compiled(lambda g, n: gcx.clip_grad_norm(g, 1.0, norm=n), big(), 10.0)
    for operation in ("reduce", "reduce-window", "dot"):
        assert hlo.count(text, operation, branches=True) == 0
    # That of the factor on CPU, none of a norm that is taken again.
    assert hlo.count(text, "conditional", branches=True) <= 1


def test_a_second_eager_call_compiles_nothing(caplog):
    grads = {"a": jnp.ones((3, 5)), "b": jnp.ones(7, jnp.bfloat16)}
    clip = gcx.clip_by_group_norm({"a": 1.0, "b": 1.0}, {"a": "a", "b": "b"})
    state = clip.init(grads)
    for _ in range(2):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("DEBUG", logger="jax"):
            gcx.clip_grad_norm(grads, 1.0)
            clip.update(grads, state)
    assert not [r for r in caplog.records if "XLA compil" in r.getMessage()]


@pytest.mark.parametrize(
    "clip",
    [
        gcx.clip_by_global_norm(1.0),
        gcx.clip_by_group_norm({"x": 1.0, "y": 1.0}, {"a": "x", "b": "y"}),
        gcx.clip_by_block_rms(1.0),
        gcx.adagc(),
    ],
    ids=["global", "group", "block rms", "adagc"],
)
def test_clipping_and_reading_the_norms_of_the_state_take_each_norm_once(clip):
    def step(grads, state):
        updates, state = clip.update(grads, state)
        return updates, gcx.metrics(state)

    text = hlo.compiled(step, big(), clip.init(big()))
    assert hlo.reductions_of(text, SIZE) == 2  # one for each leaf


@pytest.mark.parametrize("width", [contextlib.nullcontext, compat.x64], ids=["32 bit", "64 bit"])
def test_threshold_of_any_dtype(width):
    grads = {"a": jnp.float32([3.0, 4.0]), "b": jnp.bfloat16([12.0])}
    with compat.strict(), width():
        norms = [jnp.asarray(6.5, dtype) for dtype in ("float32", "float16", "bfloat16")]
        for value in (*norms, *map(np.asarray, norms), 6.5):
            clipped, _ = gcx.clip_grad_norm(grads, value, norm=jnp.asarray(13.0, "bfloat16"))
            np.testing.assert_allclose(clipped["a"], [1.5, 2.0], rtol=1e-6)
            assert clipped["a"].dtype == jnp.float32 and clipped["b"].dtype == jnp.bfloat16


def test_64_bit_trees_are_clipped_in_64_bits():
    grads = {"a": np.float64([3.0, 4.0]), "b": np.complex128([12.0j]), "c": np.float16([0.0])}
    clip = gcx.clip_by_global_norm
    with compat.x64(), compat.strict():
        tree = jax.tree.map(jnp.asarray, grads)
        for max_norm in (0.1, jnp.float32(0.1)):
            exact = oracles.clip_by_global_norm(list(grads.values()), float(max_norm))
            clipped, norm = gcx.clip_grad_norm(tree, max_norm)
            assert norm.dtype == jnp.float64 and norm == 13.0
            transformed, state = clip(max_norm).update(tree, clip(max_norm).init(tree))
            assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state))
            for found in (clipped, transformed):
                for got, wanted, given in zip(found.values(), exact, grads.values(), strict=True):
                    assert got.dtype == given.dtype
                    np.testing.assert_allclose(got, wanted, rtol=1e-15)
        # A float32 tree stays one, whatever the threshold.
        clipped, norm = gcx.clip_grad_norm(jnp.float32([3.0, 4.0]), np.float64(1.0))
        assert clipped.dtype == norm.dtype == jnp.float32


# --- the state ------------------------------------------------------------------------------


def test_state_before_the_first_step_tells_of_no_clipping():  # later ones: test_grid.py
    first = gcx.clip_by_global_norm(2.0).init(jnp.zeros(2))
    assert first == (0.0, float(np.finfo(np.float32).max), 1.0, 0.0, ())
    assert all(x.dtype == jnp.float32 and x.shape == () for x in jax.tree.leaves(first))
