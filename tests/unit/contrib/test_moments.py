"""Clips with moments of the gradient: against the papers, the authors' numbers, and bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx
import recorded
from clip_cases import assert_differentiable_after_zeros_and_bad_steps, recordings, train

pytestmark = pytest.mark.slow

EPS = float(np.finfo(np.float32).eps)

CLIPS = {
    "acclip": gcx.contrib.acclip(),
    "acclip_2": gcx.contrib.acclip(alpha=2.0),
    "spam": gcx.contrib.spam_clip(50.0, warmup_steps=5, reset_every=None),
    "stable_spam": gcx.contrib.stable_spam_clip(),
}
each_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
ALL = CLIPS | {"stable_adamw": gcx.contrib.stable_adamw(1e-3, eps=1e-20, weight_decay=0.1)}


def gradients(steps=60, *, seed=0):
    """Two leaves, normal noise, with spikes of 1,000 times the usual size, and an element of 0."""
    rng = np.random.default_rng(seed)
    leaves = [rng.standard_normal((60, 4, 3)), 0.1 * rng.standard_normal((60, 5))]
    leaves[0][30, 1, 2] *= 1000
    leaves[1][45, 3] *= 1000
    leaves[1][:, 4] = 0
    return [leaf[:steps] for leaf in leaves]


def assert_close(actual, exact, *, ulps):
    """Within so many eps of the largest magnitude of the same step."""
    exact = np.asarray(exact)
    scale = np.abs(exact).reshape(len(exact), -1).max(axis=1)
    error = np.abs(actual - exact).reshape(len(exact), -1).max(axis=1)
    assert np.all(error <= ulps * EPS * scale), f"{np.max(error / scale) / EPS:.1f} eps"


# acclip


@recordings("acclip")
def test_acclip_gives_what_the_code_gives(run):
    given = run.given
    tx = gcx.contrib.acclip(*given["betas"], alpha=given["alpha"], eps=given["eps"])
    updates, state, _ = train(tx, run.leaves)
    for i, theirs in enumerate(recorded.by_leaf(run.gave["update"])):
        assert_close(updates[i], theirs, ulps=20)
        last = [
            recorded.numbers(run.gave[name][i]) for name in ("momentum_last", "tau_pow_alpha_last")
        ]
        assert_close(state.first[i][-1:], last[0][None], ulps=20)
        np.testing.assert_allclose(state.second[i][-1], last[1], rtol=40 * EPS)


# spam_clip


@recordings("spam")
def test_spam_gives_what_the_authors_code_gives(run):
    given = run.given
    every = given["DeltaT"] if given["DeltaT"] < len(run.leaves[0]) else None
    arguments = given["threshold"], given["betas"][1], given["grad_accu_steps"], every
    tx = gcx.contrib.spam_clip(*arguments)
    updates, state, _ = train(tx, run.leaves)
    changed = run.gave["changed_steps"]
    for i, theirs in enumerate(recorded.by_leaf(run.gave["clipped_at_changed_steps"])):
        full = run.leaves[i].copy()
        full[changed] = theirs
        moment = recorded.numbers(run.gave["exp_avg_sq_after_last"][i])
        # An element that was zero all the time they clip to zero for ever, and we do not clip.
        dead = np.zeros(full.shape[1:], bool)
        if run.raw["name"] == "dead_rows_lock_up" and i == 0:
            dead[0] = True
            assert (full[30:, dead] == 0).all() and (moment[dead] == 0).all()
            np.testing.assert_array_equal(updates[i][30, dead], np.float32(run.leaves[i][30, dead]))
            assert (state.second[i][-1][dead] > 0).all()
        assert_close(updates[i][:, ~dead], full[:, ~dead], ulps=8)
        np.testing.assert_allclose(state.second[i][-1][~dead], moment[~dead], rtol=60 * EPS)


# stable_spam_clip


def test_stable_spam_gives_what_the_authors_code_gives():
    run = recorded.recording("stable_spam", "defaults_no_reset")
    updates, state, _ = train(gcx.contrib.stable_spam_clip(), run.leaves)
    for i, theirs in enumerate(recorded.by_leaf(run.gave["adagn"])):
        assert_close(updates[i], theirs, ulps=20)
    for ours, name in [(state.largest, "m_max"), (state.norm, "m_norm")]:
        np.testing.assert_allclose(ours, recorded.numbers(run.gave[name]), rtol=20 * EPS)
    squares = np.sqrt(recorded.numbers(run.gave["v_norm"]))
    np.testing.assert_allclose(state.root_square, squares, rtol=20 * EPS)


def test_stable_spam_gives_a_norm_of_about_one_whatever_the_unit():
    grads = gradients()[0]
    want, _, _ = train(gcx.contrib.stable_spam_clip(), grads)
    for unit in (1e-4, 1e4, 1e15, 1e22):  # its eps of 1e-8 is seen below that
        updates, state, _ = train(gcx.contrib.stable_spam_clip(), unit * grads)
        assert_close(updates, want, ulps=200 if unit > 1 else 1e-3 / EPS)
        assert all(np.isfinite(x).all() for x in state)


# stable_adamw


@recordings("stableadamw")
def test_stable_adamw_gives_what_the_authors_code_gives(run):
    given = run.given
    tx = gcx.contrib.stable_adamw(
        given["lr"], *given["betas"], given["eps"], given["weight_decay"], given["clip_thresh"]
    )
    start = [jnp.asarray(x, jnp.float32) for x in run.raw["inputs"]["params0"]]
    _, _, params = train(tx, run.leaves, start)
    for i, theirs in enumerate(recorded.by_leaf(run.gave["params"])):
        # One rounding of the parameter a step.
        assert_close(params[i], theirs, ulps=0.6 * len(theirs) + 1)


# any arguments


@pytest.mark.parametrize(
    ("tx", "update"),
    [
        (gcx.contrib.acclip(0.0, 0.0, eps=1.0), 0.5),  # a momentum of 1, a threshold of 1 / 2
        (gcx.contrib.stable_adamw(1.0, 0.0, 0.0, eps=4.0, clipping=0.125), -0.1),  # an RMS of 1 / 4
        (gcx.contrib.stable_adamw(lambda step: 0.5 + step, 0.0, 0.0, eps=1.0), -0.25),
    ],
)
def test_the_first_update_of_ones_is_that_of_the_arguments(tx, update):
    ones = jnp.ones(2)
    np.testing.assert_allclose(tx.update(ones, tx.init(ones), ones)[0], update, rtol=1e-5)


def test_stable_spam_has_a_decay_for_each_average():
    tx = gcx.contrib.stable_spam_clip(0.5, 0.75, 0.25, eps=1.0)
    updates, _, _ = train(tx, np.array([1.0, 3]))
    clipped = (0.25 * 1 + 0.5 * 3) / (1 - 0.5**2)
    norm = (0.1875 * 1 + 0.25 * clipped) / (1 - 0.75**2)
    square = (0.1875 * 1 + 0.75 * clipped**2) / (1 - 0.25**2)
    np.testing.assert_allclose(updates, [0.5, norm / (square**0.5 + 1)], rtol=1e-5)


# any sequence


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["acclip", "acclip_2", "spam"])
def test_a_bad_element_keeps_its_moments(name, bad):
    grads = gradients(30)[1]
    poisoned = grads.copy()
    poisoned[10, 2] = bad
    updates, state, _ = train(CLIPS[name], poisoned)
    want, want_state, _ = train(CLIPS[name], grads)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        if leaf.ndim == 2:
            np.testing.assert_array_equal(leaf[10, 2], leaf[9, 2])
            np.testing.assert_array_equal(np.delete(leaf, 2, 1), np.delete(other, 2, 1))
    assert np.isnan(updates[10, 2])  # the step says so; `skip_nonfinite` then drops it
    np.testing.assert_array_equal(np.delete(updates, 2, 1), np.delete(want, 2, 1))
    assert np.isfinite(updates[11:]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_leaf_keeps_its_averages(bad):
    grads = gradients(30)
    poisoned = [grads[0].copy(), grads[1]]
    poisoned[0][10, 1, 1] = bad
    updates, state, _ = train(CLIPS["stable_spam"], poisoned)
    assert np.isnan(updates[0][10]).all()
    assert all(np.isfinite(x).all() for x in state)
    for values in state:
        assert values[10, 0] == values[9, 0]
    without, _, _ = train(CLIPS["stable_spam"], [np.delete(grads[0], 10, 0)])
    assert_close(np.delete(updates[0], 10, 0), without[0], ulps=4)
    alone, _, _ = train(CLIPS["stable_spam"], [grads[1]])
    assert_close(updates[1], alone[0], ulps=4)


@pytest.mark.parametrize("size", [1e20, 1e25])
@each_clip
def test_a_gradient_whose_square_overflows_does_not_stay(clip, size):
    grads = np.ones((20, 3))
    grads[8, 0] = size
    updates, state, _ = train(clip, grads)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert np.isfinite(updates).all()


@each_clip
def test_a_level_that_shifts_is_followed(clip):
    grads = np.random.default_rng(0).standard_normal((3000, 5))
    grads[1000:] *= 30
    updates, _, _ = train(clip, grads)
    late, before = np.abs(updates[-500:]).mean(), np.abs(updates[500:1000]).mean()
    # Stable-SPAM makes the norm one, whatever it was; the others let the new level through.
    assert late > (0.5 if clip is CLIPS["stable_spam"] else 10) * before


@pytest.mark.parametrize("tx", ALL.values(), ids=ALL)
def test_low_precision_is_that_of_the_updates_alone(tx):
    low = [jnp.asarray(x, jnp.bfloat16) for x in gradients(40)]
    wide = [x.astype(jnp.float32) for x in low]
    start = [jnp.ones(x.shape[1:]) for x in wide]
    found, _, _ = train(tx, low, start)
    want, _, _ = train(tx, wide, start)
    # Stable-SPAM rounds a spike twice: clipped, and normalised.
    tolerance = 2.0**-7 if tx is ALL["stable_spam"] else 2.0**-8
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == jnp.bfloat16 and np.isfinite(theirs).all()
        np.testing.assert_allclose(
            ours.astype(np.float32), theirs, rtol=tolerance, atol=1e-6 * np.abs(theirs).max()
        )


@pytest.mark.parametrize("clip", [*CLIPS.values(), gcx.contrib.acclip(alpha=0.5)])
def test_derivatives_are_finite_at_zero_and_after_steps_that_are_not_finite(clip):
    assert_differentiable_after_zeros_and_bad_steps(clip)


def test_complex_gradients_are_clipped_by_magnitude():
    grads = gradients(40)[1]
    turned = (grads * np.exp(0.7j)).astype(np.complex64)
    for name in ("acclip", "spam"):
        want, _, _ = train(CLIPS[name], grads)
        found, _, _ = train(CLIPS[name], jnp.asarray(turned))
        np.testing.assert_allclose(
            found, want * np.exp(0.7j), rtol=1e-5, atol=1e-6 * np.abs(want).max()
        )
