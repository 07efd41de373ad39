"""Of what the norm is taken: global, group, leaf, layer, row or filter, element."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import oracles
import trees
from clip_cases import assert_close, assert_same_bits, step

# --- layers stacked in a leaf; test_grid.py has more ------------------------------------------


def test_stacked_rms_is_that_of_a_layer_and_empty_layers_pass():
    x = trees.normal((3, 4, 5)) * np.float32([[[0.1]], [[1.0]], [[10.0]]])
    grads = {"x": x, "a": jnp.zeros((0, 3)), "b": jnp.zeros((2, 0))}
    updates, state = step(gcx.clip_by_block_rms(0.5, num_layer_axes=1), grads)
    exact = [oracles.clip_by_block_rms([layer], 0.5)[0] for layer in x]
    np.testing.assert_allclose(updates["x"], exact, rtol=1e-6)
    np.testing.assert_allclose(state.grad_norm, oracles.vector_norm(x), rtol=1e-6)
    assert updates["a"].shape == (0, 3) and updates["b"].shape == (2, 0)


def test_the_rms_of_a_block_is_compared_with_that_of_its_parameters():
    clip = gcx.clip_by_block_rms(gcx.thresholds.relative_to_params(0.1))
    updates, _ = step(clip, jnp.full((3, 4), 5.0), jnp.full((3, 4), 2.0))
    np.testing.assert_allclose(updates, 0.2, rtol=1e-6)


# --- groups ---------------------------------------------------------------------------------


def grouped_grads():
    return {
        "enc": {"w": trees.normal((4, 5), seed=1), "b": trees.normal((5,), "bfloat16", seed=2)},
        "dec": {"w": trees.normal((4, 5), seed=3), "b": trees.normal((5,), seed=4)},
        "fp8": trees.normal((6,), "float8_e4m3fn", seed=5),
    }


FULL_LABELS = {"enc": {"w": "enc", "b": "enc"}, "dec": {"w": "dec", "b": "dec"}, "fp8": "raw"}
GROUP_OF_LEAF = ["dec", "dec", "enc", "enc", "raw"]  # in the order of jax.tree.leaves


PREFIX = {"enc": "enc", "dec": "dec", "fp8": "raw"}


def label_by_path(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: PREFIX[path[0].key], params)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("labels", [FULL_LABELS, PREFIX, label_by_path])
@pytest.mark.sampled
def test_labels_are_a_tree_a_prefix_or_a_function(labels, num_devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: num_devices)
    jax.clear_caches()  # on one device, leaves of one type and group are stacked
    grads, bounds = grouped_grads(), {"enc": 1.0, "dec": 0.5}
    updates, state = step(gcx.clip_by_group_norm(bounds, labels), grads)
    assert_close(updates, oracles.clip_by_group_norm(trees.leaves(grads), GROUP_OF_LEAF, bounds))
    assert state.clip_threshold == bounds


def test_a_group_without_a_threshold_is_neither_changed_nor_measured():
    grads = grouped_grads()
    grads["fp8"] = grads["fp8"].at[2].set(math.nan)
    clip = gcx.clip_by_group_norm({"enc": 1.0}, FULL_LABELS)
    updates, state = step(clip, grads)
    assert np.isfinite(updates["enc"]["w"]).all() and np.isfinite(state.grad_norm["enc"])
    # And the other way round: a NaN in a measured group leaves the others alone.
    grads["enc"]["w"] = grads["enc"]["w"].at[0, 0].set(math.nan)
    spoiled, _ = step(clip, grads)
    np.testing.assert_array_equal(np.float32(spoiled["enc"]["b"]), np.full(5, math.nan))
    for found in (updates, spoiled, step(gcx.clip_by_group_norm({}, FULL_LABELS), grads)[0]):
        assert_same_bits((found["fp8"], found["dec"]), (grads["fp8"], grads["dec"]))


# --- rows and filters -----------------------------------------------------------------------


def test_units_over_any_axis():
    # Default units of leaves with fewer axes are Optax's: test_clip.py.
    rows = [((2, 2, 2, 3, 4), None, (0, 1, 2, 3))]
    rows += [((4, 2, 3), axis, axis) for axis in ((0,), (2,), (0, 2), (-1, 1), ())]
    grads, params = ([trees.normal(row[0], seed=seed) for row in rows] for seed in (1, 2))
    clips = [gcx.adaptive_grad_clip(0.3, axis=axis) for _, axis, _ in rows]

    @jax.jit
    def update(grads, params):
        rows = zip(clips, grads, params, strict=True)
        return [clip.update(x, None, param)[0] for clip, x, param in rows]

    exact = oracles.adaptive_grad_clip(grads, params, 0.3, 1e-3, [axes for *_, axes in rows])
    assert_close(update(grads, params), exact)


# --- prefix trees ---------------------------------------------------------------------------


PREFIX_TREES = {
    "num_layer_axes": gcx.clip_by_leaf_norm(gcx.thresholds.ema(), num_layer_axes={"w": 1, "b": 0}),
    "labels": gcx.clip_by_group_norm(1.0, {"w": "a", "b": "b"}),
    "granularity": gcx.watch(
        optax.sgd(1.0), granularity=gcx.granularities.group({"w": "a", "b": "b"}), of=()
    ),
}


@pytest.mark.parametrize("tx", PREFIX_TREES.values(), ids=PREFIX_TREES)
def test_map_params_of_optax_accepts_transformations_with_prefix_trees(tx):
    tx, params = optax.chain(tx, optax.trace(0.9)), {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
    doubled = optax.tree.map_params(tx, lambda x: 2 * x + 1, tx.init(params))
    np.testing.assert_array_equal(doubled[1].trace["w"], jnp.ones((4, 2)))


# --- reactions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reaction", "factors"),
    [
        (lambda norm, threshold: (1 + threshold / norm) / 2, [0.6, 1.0]),
        (lambda norm, threshold: threshold - norm, [0.0, 0.5]),
    ],
)
def test_a_reaction_of_ones_own_is_held_within_zero_and_one(reaction, factors):
    rows = np.float32([[3.0, 4.0], [0.3, 0.4]])
    clip = gcx.clip_by_norm(1.0, granularity=gcx.granularities.axis(-1), reaction=reaction)
    np.testing.assert_allclose(step(clip, rows)[0], rows * np.array(factors)[:, None], rtol=1e-6)


def test_a_reaction_of_ones_own_gets_no_threshold_that_is_infinite():
    rule = gcx.thresholds.Rule(jnp.zeros_like, lambda norm, state, _: (jnp.inf * (norm + 1), state))
    for threshold in (jnp.inf, rule):
        clip = gcx.clip_by_norm(threshold, reaction=lambda n, t: t / n * jnp.tanh(n / t))
        assert step(clip, np.float32([3.0, 4.0]))[0].tolist() == [3.0, 4.0]


def test_a_rule_receives_all_norms_at_once_and_returns_two_values():
    rule = gcx.thresholds.Rule(lambda norm: (), lambda norm, *_: (2 * jnp.median(norm), ()))
    clipped, _ = step(gcx.clip_by_leaf_norm(rule), [jnp.ones(1), jnp.ones(1), jnp.full(1, 9.0)])
    assert [x.item() for x in clipped] == [1, 1, 2]
    rule = gcx.thresholds.Rule(jnp.zeros_like, lambda norm, *_: norm)
    with pytest.raises(TypeError, match=r"next state, got float32\[2\]. Return a tuple"):
        step(gcx.clip_by_leaf_norm(rule), [jnp.ones(2), jnp.ones(3)])
