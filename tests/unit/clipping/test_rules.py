"""Threshold rules and clips that use them: the papers, the authors' numbers, and bad input."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx
import recorded
from clip_cases import recordings, train
from gradclip_jax import thresholds

EPS = float(np.finfo(np.float32).eps)
UNBOUNDED = float(np.finfo(np.float32).max)

# Small windows and short warm-ups, so that a test of 200 steps sees all that a rule can do.
RULES = {
    "percentile": thresholds.percentile(30.0, window=20),
    "mean_std": thresholds.mean_std(4.0, window=20, warmup_steps=10),
    "zscore": thresholds.zscore(2.5, 0.9, warmup_steps=10),
    "ema": thresholds.ema(1.5, 0.9, warmup_steps=10, warmup_max=5.0),
    "quantile": thresholds.quantile(0.5, 0.2, 1.0),
    "capped": thresholds.capped(thresholds.zscore(2.5, 0.9, warmup_steps=10), 3.0),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def clip_by(rule):
    """A clip of one number, whose norm of order 1 it is itself, in all of float32."""
    return gcx.clip_by_norm(rule, ord=1)


@functools.partial(jax.jit, static_argnums=0)
def _follow(rule, norms):
    tx = clip_by(rule)

    def step(state, norm):
        state = tx.update(norm, state)[1]
        return state, (state.clip_threshold, state.rules[0][rule.name])

    return jax.lax.scan(step, tx.init(norms[0]), norms)[1]


def follow(rule, norms):
    """Thresholds and states of all steps, as NumPy arrays; one compilation for each 1,000 steps."""
    norms = np.asarray(norms, np.float32)
    steps = len(norms)
    padded = np.ones(-(-steps // 1000) * 1000, np.float32)
    padded[:steps] = norms
    return jax.tree.map(lambda x: np.asarray(x)[:steps], _follow(rule, jnp.asarray(padded)))


def is_unbounded(thresholds):
    """Where a rule sets no threshold."""
    return thresholds == np.float32(UNBOUNDED)


def until_zero(run):
    """The steps before the first norm that is zero or no number: there the codes differ."""
    counts = run.norms > 0
    return len(counts) if counts.all() else int(np.argmin(counts))


def lognormal(steps, *, seed=0, spread=0.3):
    return np.exp(spread * np.random.default_rng(seed).standard_normal(steps))


# percentile


@recordings("autoclip", "spiky_p50", "constant_p10")
def test_percentile_gives_what_the_authors_code_gives(run):
    until = min(until_zero(run), 100)
    rule = thresholds.percentile(run.given["clip_percentile"], 100)
    found, _ = follow(rule, run.norms[:100])
    # Between two neighbours that are far apart the rounding of the place, at most
    # 150 * eps, is a part of their distance; here no two are further apart than a value itself.
    theirs = recorded.numbers(run.gave["threshold"])
    np.testing.assert_allclose(found[:until], theirs[:until], rtol=40 * EPS)


# zscore


@recordings("zclip", "spiky_cap1", "nan", "inf")
def test_zscore_gives_what_the_authors_code_gives(run):
    given = [run.given[name] for name in ("z_thresh", "alpha", "warmup_steps")]
    found, _ = follow(thresholds.zscore(*given), run.norms)
    theirs = recorded.numbers(run.gave["threshold"])
    until = until_zero(run)
    clipped = ~is_unbounded(found)
    if run.raw["name"] == "level_shift":  # stuck from 60 on; we relearn after 25 steps of that
        until = 85
    np.testing.assert_array_equal(clipped[:until], ~np.isnan(theirs[:until]))
    both = clipped[:until]
    np.testing.assert_allclose(found[:until][both], theirs[:until][both], rtol=300 * EPS)


def test_zscore_does_not_depend_on_the_scale_of_the_norms():
    norms = np.r_[lognormal(50, spread=0.1), 3.0, 30.0]
    expected, _ = follow(thresholds.zscore(), norms)
    found, _ = follow(thresholds.zscore(), 2.0**-30 * norms)
    assert np.all(expected[50:] < 2.0)
    np.testing.assert_allclose(found[50:], 2.0**-30 * expected[50:], rtol=1e-5)


# After constant norms the paper's threshold would be their level for ever.
@pytest.mark.parametrize(("relearn_after", "spread"), [(1, 0.1), (25, 0.0)])
def test_zscore_takes_a_new_level_for_spikes_that_long(relearn_after, spread):
    norms = np.r_[lognormal(50, spread=spread), np.full(100, 30.0)]
    found, _ = follow(thresholds.zscore(relearn_after=relearn_after), norms)
    assert np.all(found[50 : 50 + relearn_after] < 2.0)
    assert is_unbounded(found[50 + relearn_after + 10 :]).all()


# mean_std


@recordings("levanter_skip_step")
def test_mean_std_gives_what_levanter_gives(run):
    window = run.given["rolling_interval_length"]
    rule = thresholds.mean_std(run.given["sigma_factor"], window, window // 2)
    theirs = recorded.numbers(run.gave["norm_threshold"])
    until = min(until_zero(run), len(theirs) - 1)
    if run.raw["name"] == "constant_16":  # theirs is 1.000006: the first rise is anything at all
        until = 51
        theirs[:until] = 1 + 6 * 0.001
    found, _ = follow(rule, run.norms)
    assert is_unbounded(found[: window // 2]).all()
    # float32 on both sides; the root of a variance of a few eps is off by a few times sqrt(eps).
    used = slice(window // 2, until)
    np.testing.assert_allclose(found[used], theirs[used], rtol=20 * EPS)
    taken = (run.norms <= found)[:until]
    np.testing.assert_array_equal(taken, np.array(run.gave["step_factor"][:until], bool))


# signed values


SIGNED = {name: RULES[name] for name in ("percentile", "mean_std", "zscore")}


@jax.jit
def loss_thresholds(losses):
    """The threshold of each rule at each step, for losses that may be negative."""

    def step(states, loss):
        pairs = {k: rule.update(loss, states[k], None) for k, rule in SIGNED.items()}
        return {k: state for k, (_, state) in pairs.items()}, {k: x for k, (x, _) in pairs.items()}

    return jax.lax.scan(step, {k: rule.init(losses[0]) for k, rule in SIGNED.items()}, losses)[1]


def test_negative_losses_shift_the_threshold_by_their_offset():
    losses = np.abs(np.random.default_rng(0).standard_normal(60))
    losses[50] = 40.0
    found = [loss_thresholds(np.float32(x + losses)) for x in (5.0, 0.0, -5.0)]
    base, *others = jax.device_get(found)
    for name, (found, offset) in itertools.product(SIGNED, zip(others, (-5, -10), strict=True)):
        bounded = ~is_unbounded(base[name])
        np.testing.assert_array_equal(bounded, ~is_unbounded(found[name]))
        shifted = base[name][bounded] + offset
        np.testing.assert_allclose(found[name][bounded], shifted, atol=1e-4)
        assert found[name][50] < offset + 45.0


# quantile


@recordings("quantile", "nan_median", "inf_median")
def test_quantile_gives_what_the_authors_code_gives(run):
    given = run.given
    rule = thresholds.quantile(
        given["target_quantile"], given["learning_rate"], given["initial_estimate"]
    )
    until = until_zero(run)
    _, after = follow(rule, run.norms)
    theirs = recorded.numbers(run.gave["estimate_after"])
    # Theirs is float32, too: each of 150 factors rounds, and so does the last exponential.
    np.testing.assert_allclose(after[:until], theirs[:until], rtol=150 * EPS)


def test_quantile_comes_back_from_either_end():
    # Without bounds it would be 0 after 1,040 small norms, and stay 0.
    norms = np.r_[np.full(2500, 1e-36), np.full(1500, 1.0), np.full(2500, 1e36), np.ones(1500)]
    found, _ = follow(thresholds.quantile(), norms)
    assert found[2499] == np.float32(1e-30) and found[6499] == np.float32(1e30)
    assert 0.9 < found[3999] < 1.2 and 0.9 < found[7999] < 1.2


# any sequence


@st.composite
def streams(draw):
    """200 norms: levels that shift, spikes, zeros, NaN and infinities anywhere."""
    levels = draw(st.lists(st.floats(-3, 3), min_size=1, max_size=4))
    norms = 10.0 ** np.repeat(levels, -(-200 // len(levels)))[:200]
    norms *= lognormal(200, seed=draw(st.integers(0, 99)), spread=draw(st.sampled_from([0, 0.3])))
    odd = st.tuples(
        st.integers(0, 199),
        st.integers(1, 40),
        st.sampled_from([0.0, math.nan, math.inf, 1e-30, 1e3, 1e30]),
    )
    for start, length, value in draw(st.lists(odd, max_size=6)):
        norms[start : start + length] = value
    return norms


@pytest.mark.slow
@each_rule
@hypothesis.given(norms=streams(), log_level=st.floats(-3, 3))
@hypothesis.settings(max_examples=40)
def test_no_stream_makes_a_rule_nan_and_every_rule_finds_the_level_again(rule, norms, log_level):
    # Spikes of 1e30 take an average of decay 0.9 about 700 steps, or 1,400 the squared ones.
    level = 10.0**log_level * (1.0 if rule is not RULES["capped"] else 1e-3)
    steady = level * lognormal(2000, spread=0.1)
    found, states = follow(rule, np.r_[norms, steady, 100 * level])
    assert not any(np.isnan(x).any() for x in jax.tree.leaves((found, states)))
    assert np.all(found[:200][norms > 0] > 0)
    # Nothing is clipped to less than half of what is usual, and what is unusual is clipped.
    assert np.all(found[-101:-1] > 0.5 * level)
    assert found[-1] < 20 * level


@each_rule
def test_zeros_and_bad_norms_leave_the_state_as_it_was(rule):
    norms = lognormal(120)
    places, odd = np.r_[0, 5, np.arange(20, 120)], [math.nan, math.inf, 0.0]
    with_odd = np.insert(norms, places, np.resize(odd, len(places)))
    found, states = follow(rule, with_odd)
    fine = np.isfinite(with_odd) & (with_odd > 0)
    want, want_states = follow(rule, norms)
    if rule is RULES["ema"]:  # it counts the steps of its warm-up, whose norm may be zero
        want_states = want_states._replace(step_count=np.isfinite(with_odd).cumsum()[fine])
    np.testing.assert_array_equal(found[fine], want)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[fine], y), states, want_states)


@pytest.mark.slow
@each_rule
def test_a_rule_is_differentiable_after_zeros_and_steps_that_are_not_finite(rule):
    clip = clip_by(rule)
    sizes = jnp.array([0.0, 1.0, 0.0, *np.full(12, 2.0), 50.0, 0.0, 3.0, 2.0, 50.0])
    bad = jnp.zeros(len(sizes)).at[5].set(jnp.nan).at[18].set(jnp.inf)

    @jax.jit
    @jax.grad
    def slope(grads):
        def step(state, inputs):
            size, bad = inputs
            clipped, state = clip.update(jnp.where(bad == 0, size * grads, bad), state)
            return state, jnp.where(bad == 0, clipped.sum(), 0)

        return jax.lax.scan(step, clip.init(grads), (sizes, bad))[1].sum()

    for scale in (0.0, 1.0, 1e-3):
        assert np.isfinite(slope(scale * jnp.array([0.0, 1.0, 2.0]))).all()


# clips with these rules


def norms_of(leaves):
    """Of each step, one for each leaf."""
    return np.stack([np.linalg.norm(x.reshape(len(x), -1), axis=1) for x in leaves], axis=1)


@recordings("adagc", "zero_gradient_in_warmup_locks")
def test_adagc_gives_what_the_authors_code_gives(run):
    given, norms = run.given, norms_of(run.leaves)
    names = "clip_ratio", "max_norm", "beta", "start_clip_steps"
    updates, states, _ = train(gcx.adagc(*(given[name] for name in names)), run.leaves)
    found = norms_of(updates), states.rules[0]["adagc"].average
    theirs = recorded.numbers(run.gave["clipped_norm"]), recorded.numbers(run.gave["gamma_after"])
    # Theirs: 1e-6 in each denominator, and zeros are part of the average.
    for leaf, norm in enumerate(norms.T):
        until = int(np.argmin(norm)) if not norm.all() else len(norm)
        for ours, expected in zip(found, theirs, strict=True):
            np.testing.assert_allclose(ours[:until, leaf], expected[:until, leaf], rtol=5e-5)
