"""The published methods: against the authors' numbers, and as lines over the grid."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import recorded
import rule_oracles as oracles
from gradclip_jax import thresholds

EPS = float(np.finfo(np.float32).eps)


def steps_of(tx, grads, params, state):
    """The updates of all steps, and the last state."""

    def step(state, grad):
        updates, state = tx.update(grad, state, params)
        return state, updates

    return jax.lax.scan(step, state, grads)[::-1]


jitted = jax.jit(steps_of, static_argnums=0)


def train(tx, grads, params):
    """In pieces of ten steps, which compile once a method."""
    state = tx.init(params)
    pieces = []
    for start in range(0, len(jax.tree.leaves(grads)[0]), 10):
        piece = jax.tree.map(lambda x, start=start: x[start : start + 10], grads)
        updates, state = jitted(tx, piece, params, state)
        pieces.append(updates)
    return jax.tree.map(lambda *xs: np.concatenate(xs), *pieces), state


def recordings(method, *chosen):
    names = chosen or recorded.names(method)
    return pytest.mark.parametrize(
        "run", [recorded.recording(method, name) for name in names], ids=names
    )


# against the authors


@recordings("agc")
def test_agc_gives_what_the_authors_code_gives(run):
    tx = gcx.adaptive_grad_clip(run.given["clip"], run.given["eps"])
    for given, gave in zip(run.raw["inputs"]["steps"], run.gave["steps"], strict=True):
        params, grads = (
            {name: jnp.asarray(x, jnp.float32) for name, x in given[kind].items()}
            for kind in ("params", "grads")
        )
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        for name, theirs in gave["clipped"].items():
            # They divide by max(norm, 1e-6); no unit here is clipped that is as small.
            np.testing.assert_allclose(updates[name], theirs, rtol=8 * EPS)
        np.testing.assert_array_equal(updates["zero_g"], 0.0)
        assert 0 < float(state.clip_fraction) < 1


# The rules give the authors' numbers in test_rules.py.
CLIPS = {
    "autoclip": (gcx.autoclip(20.0, window=8), thresholds.percentile(20.0, 8)),
    "zclip": (
        gcx.zclip(2.0, 0.9, 8, 3.0),
        thresholds.capped(thresholds.zscore(2.0, 0.9, 8), 3.0),
    ),
    "quantile": (gcx.quantile_clip(0.4, 0.1, 2.0), thresholds.quantile(0.4, 0.1, 2.0)),
}


@pytest.mark.parametrize(("tx", "rule"), CLIPS.values(), ids=CLIPS)
def test_a_clip_by_a_learned_threshold_is_a_clip_of_the_whole_tree_by_a_rule(tx, rule):
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((40, 3)), jnp.float32)
    found, wanted = (train(x, grads, grads[0]) for x in (tx, gcx.clip_by_global_norm(rule)))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_zclip_caps_from_the_first_step_on():
    found, _ = train(gcx.zclip(), jnp.full((3, 1), 7.0), jnp.ones(1))
    np.testing.assert_allclose(found, 1.0, rtol=2 * EPS)
    found, _ = train(gcx.zclip(max_norm=None), jnp.full((3, 1), 7.0), jnp.ones(1))
    np.testing.assert_array_equal(found, 7.0)


@recordings("adagc")
def test_adagc_gives_what_the_authors_code_gives(run):
    given = run.given
    leaves = [leaf.copy() for leaf in run.leaves]
    if run.raw["name"] == "zero_gradient_in_warmup_locks":
        leaves[1][3] = 0.0
    norms = np.stack([np.linalg.norm(x.reshape(len(x), -1), axis=1) for x in leaves], axis=1)
    arguments = (given["clip_ratio"], given["beta"], given["start_clip_steps"], given["max_norm"])
    tx = gcx.adagc(arguments[0], arguments[3], arguments[1], arguments[2])
    grads = [jnp.asarray(x, jnp.float32) for x in leaves]

    @jax.jit
    def follow(grads):
        def step(state, grad):
            updates, state = tx.update(grad, state)
            norms = jnp.stack([jnp.linalg.norm(x.ravel()) for x in updates])
            return state, (norms, state.rules[0].average)

        return jax.lax.scan(step, tx.init([x[0] for x in grads]), grads)[1]

    clipped, level = follow(grads)
    want = oracles.adagc(norms, *arguments, zeros=False)
    np.testing.assert_allclose(clipped, want["clipped"], rtol=100 * EPS)
    np.testing.assert_allclose(level, want["level"], rtol=100 * EPS)
    # Theirs: 1e-6 in each denominator, and zeros are part of the average.
    theirs = recorded.numbers(run.gave["clipped_norm"]), recorded.numbers(run.gave["gamma_after"])
    for leaf in range(2):
        zeros = norms[:, leaf] == 0
        until = int(np.argmax(zeros)) if zeros.any() else len(norms)
        np.testing.assert_allclose(clipped[:until, leaf], theirs[0][:until, leaf], rtol=5e-5)
        np.testing.assert_allclose(level[:until, leaf], theirs[1][:until, leaf], rtol=5e-5)


def test_adagc_is_not_locked_by_a_zero_gradient_in_the_warm_up():
    run = recorded.recording("adagc", "zero_gradient_in_warmup_locks")
    assert recorded.numbers(run.gave["clipped_norm"])[10:, 1].max() == 0
    grads = [jnp.asarray(x, jnp.float32) for x in run.leaves]
    grads[1] = grads[1].at[3].set(0.0)
    updates, _ = train(gcx.adagc(warmup_steps=10), grads, [x[0] for x in grads])
    assert np.linalg.norm(updates[1][4:].reshape(-1, 5), axis=1).min() > 0.01


def test_adagc_clips_the_whole_gradient_in_the_warm_up():
    grads = {"a": jnp.full((1, 1), 3.0), "b": jnp.full((1, 1), 4.0)}
    updates, _ = train(gcx.adagc(), grads, {"a": jnp.ones(1), "b": jnp.ones(1)})
    np.testing.assert_allclose([updates["a"][0, 0], updates["b"][0, 0]], [0.6, 0.8], rtol=4 * EPS)


def test_quantile_clip_leaves_half_of_the_steps_alone():
    norms = np.exp(0.5 * np.random.default_rng(0).standard_normal(3000))
    found, _ = train(gcx.quantile_clip(), jnp.asarray(norms, jnp.float32)[:, None], jnp.ones(1))
    kept = np.mean(np.asarray(found)[100:, 0] == norms[100:].astype(np.float32))
    assert 0.47 < kept < 0.53


LEARNERS = {
    "zclip": gcx.zclip(2.0, 0.9, warmup_steps=8, max_norm=3.0),
    "adagc": gcx.adagc(1.05, 1.0, 0.95, warmup_steps=8),
    "stable_spam": gcx.contrib.stable_spam_clip(),
    "stable_adamw": gcx.contrib.stable_adamw(1e-2, weight_decay=0.1, clipping=0.7),
}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_first_choice_alters_only_outliers_at_every_scale(scale):
    norms = scale * np.exp(0.1 * np.random.default_rng(0).standard_normal(500))
    norms[400] *= 20
    found, _ = train(
        gcx.zclip(max_norm=None), jnp.asarray(norms, jnp.float32)[:, None], jnp.ones(1)
    )
    altered = np.asarray(found)[:, 0] != norms.astype(np.float32)
    assert altered[400] and np.mean(altered) < 0.05


def test_adagc_measures_the_layers_of_a_stacked_leaf_one_by_one():
    rng = np.random.default_rng(0)
    stacked = jnp.asarray(rng.standard_normal((40, 3, 5)), jnp.float32)
    stacked = stacked.at[30, 1].multiply(100)
    updates, _ = train(gcx.adagc(num_layer_axes=1, warmup_steps=5), [stacked], [stacked[0]])
    apart = [stacked[:, i] for i in range(3)]
    want, _ = train(gcx.adagc(warmup_steps=5), apart, [x[0] for x in apart])
    for i in range(3):
        np.testing.assert_allclose(updates[0][:, i], want[i], rtol=8 * EPS, atol=1e-7)


def test_a_finite_step_is_no_fault_to_a_search_for_nans():
    clip = gcx.contrib.stable_spam_clip()
    with jax.debug_nans(True):
        update, _ = clip.update(jnp.ones(2), clip.init(jnp.ones(2)))
    np.testing.assert_allclose(update, 2**-0.5, rtol=1e-6)


@pytest.mark.parametrize("tx", LEARNERS.values(), ids=LEARNERS)
def test_state_maps_over_parameters(tx):
    state = tx.init({"b": jnp.ones(3), "w": jnp.ones((2, 16))})
    mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
