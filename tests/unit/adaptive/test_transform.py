"""The published methods: against the authors' numbers, and as lines over the grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx
import recorded
import rule_oracles as oracles
from clip_cases import recordings, train
from gradclip_jax import thresholds

EPS = float(np.finfo(np.float32).eps)


# against the authors


# The rules give the authors' numbers in test_rules.py.
CLIPS = {
    "autoclip": (gcx.autoclip(20.0, window=8), thresholds.percentile(20.0, 8)),
    "zclip": (gcx.zclip(2.0, 0.9, 8, 3.0), thresholds.capped(thresholds.zscore(2.0, 0.9, 8), 3.0)),
}


@pytest.mark.parametrize(("tx", "rule"), CLIPS.values(), ids=CLIPS)
def test_a_clip_by_a_learned_threshold_is_a_clip_of_the_whole_tree_by_a_rule(tx, rule):
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((40, 3)), jnp.float32)
    found, wanted = (train(x, grads) for x in (tx, gcx.clip_by_global_norm(rule)))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def norms_of(leaves):
    """Of each step, one for each leaf."""
    return np.stack([np.linalg.norm(x.reshape(len(x), -1), axis=1) for x in leaves], axis=1)


@recordings("adagc")
def test_adagc_gives_what_the_authors_code_gives(run):
    given = run.given
    leaves = [leaf.copy() for leaf in run.leaves]
    if run.raw["name"] == "zero_gradient_in_warmup_locks":
        leaves[1][3] = 0.0
    norms = norms_of(leaves)
    arguments = (given["clip_ratio"], given["beta"], given["start_clip_steps"], given["max_norm"])
    tx = gcx.adagc(arguments[0], arguments[3], arguments[1], arguments[2])
    updates, states, _ = train(tx, leaves)
    clipped, level = norms_of(updates), states.rules[0].average
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
