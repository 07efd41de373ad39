"""Guards against spikes: thresholds, what a rule learns, and that nothing locks up."""

import functools
import json
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import guard_cases as cases
import hlo
from accumulation_cases import collectives
from guard_cases import FROZEN, RULES, each_rule, feed


def test_the_norm_of_all_shards_decides():
    params = {"s": jnp.zeros(16), "w": jnp.zeros(2)}
    grads = {"s": jnp.full(16, 3.0), "w": jnp.array([0.0, 5.0])}  # norm 13, 3 * sqrt(2) a device
    for bound, skips in ((12.9, 1), (13.1, 0)):
        tx = gcx.skip_large_norm(optax.sgd(1.0), bound)
        _, _, streak = cases.on_shards(tx)(grads, params)
        assert streak.tolist() == [skips] * 8


@pytest.mark.parametrize("guard", [gcx.skip_nonfinite, lambda tx: gcx.skip_large_norm(tx, 1.0)])
def test_the_verdict_costs_one_all_reduce_of_a_number_in_shard_map(guard):
    tx = guard(optax.sgd(1.0))

    @cases.sharded(({"a": cases.SHARDS, "b": cases.WHOLE},), cases.SHARDS)
    def step(grads):
        return tx.update(grads, tx.init(grads))[0]["a"]

    text = hlo.compiled(step, {"a": jnp.ones(64), "b": jnp.ones((64, 4))})
    assert hlo.all_reduced(text) == [1] and collectives(text) == {"all-reduce": 1}


@pytest.mark.parametrize(
    ("norm", "max_norm", "taken"),
    [
        (1.0, 1.0, True),
        (np.nextafter(np.float32(1), np.float32(2)), 1.0, False),
        (2.0**70, np.inf, True),
        (np.inf, np.inf, False),
        (np.nan, np.inf, False),
    ],
)
def test_a_step_is_taken_up_to_the_threshold(norm, max_norm, taken):
    tx = gcx.skip_large_norm(optax.sgd(1.0), max_norm)
    updates, state = tx.update(jnp.array([norm, 0.0], jnp.float32), tx.init(jnp.zeros(2)))
    assert (state.consecutive_skips == 0) == taken
    assert updates.tolist() == [-norm if taken else 0.0, 0.0]
    np.testing.assert_equal(np.asarray(state.grad_norm), np.float32(norm))
    assert state.skip_threshold == max_norm
    counts = int(state.skipped_large_norm), int(state.skipped_nonfinite)
    assert counts == ((0, 0) if taken else (1, 0) if np.isfinite(norm) else (0, 1))


def test_a_schedule_counts_all_steps():
    tx = gcx.skip_large_norm(optax.sgd(1.0), lambda count: 10.0 - count, relearn_after=1)
    skipped, state = feed(tx, [9.5, 9.5, np.nan, 6.5, 6.5, 6.5])
    assert skipped.tolist() == [False, True, True, False, True, True]
    assert state.skip_threshold == 5.0
    capped = gcx.thresholds.capped(lambda count: 10.0 - count, 20.0)
    _, state = feed(gcx.skip_large_norm(optax.sgd(1.0), capped, relearn_after=1), np.full(6, 20.0))
    assert state.skip_threshold == 5.0  # it has no level to learn anew


def test_a_threshold_may_follow_the_parameters():
    rule = gcx.thresholds.relative_to_params(0.1)
    tx, params = gcx.skip_large_norm(optax.sgd(1.0), rule), jnp.array([30.0, 40.0])
    for size, skips in ((4.9, 0), (5.1, 1)):
        _, state = tx.update(jnp.array([size, 0.0]), tx.init(params), params)
        found = gcx.metrics(state)
        assert found["skipped_large_norm"] == found["consecutive_skips"] == skips
        assert found["skip_threshold"] == 5.0


@each_rule
def test_a_constant_norm_from_step_0_is_not_skipped_for_good(rule):
    skipped, _ = feed(gcx.skip_large_norm(optax.sgd(0.1), rule), np.full(300, 0.7))
    # A rule that aims at the 0.9 quantile skips one norm of ten: that is its definition.
    assert skipped.mean() <= (0.15 if rule is RULES["quantile"] else 0)


@pytest.mark.parametrize("relearn_after", [1, 3, 25])
def test_the_level_is_learned_anew_after_so_many_skips(relearn_after):
    tx = gcx.skip_large_norm(optax.sgd(0.1), FROZEN, relearn_after=relearn_after)
    skipped, state = feed(tx, [1.0] + (relearn_after + 3) * [100.0])
    assert skipped.tolist() == [False] + relearn_after * [True] + 3 * [False]
    assert state.skipped_large_norm == relearn_after and state.signals["norm"] == 100.0


def test_a_norm_that_is_not_finite_does_not_count_towards_learning_anew():
    tx = gcx.skip_large_norm(optax.sgd(0.1), FROZEN, relearn_after=2)
    skipped, state = feed(tx, [1.0, np.nan, np.inf, np.nan, 9.0, np.nan, 9.0])
    assert skipped.tolist() == [False] + 6 * [True]
    assert state.spikes_in_a_row == 2 and state.consecutive_skips == 6
    assert state.skipped_nonfinite == 4 and state.skipped_large_norm == 2


def test_a_fixed_number_is_not_learned_anew_but_the_flag_tells():
    tx = gcx.skip_large_norm(optax.sgd(0.1), 1.0, relearn_after=3, max_consecutive_skips=10)
    skipped, state = feed(tx, np.full(50, 2.0))
    assert skipped.all() and state.guard_failed


# Loss and norm


RECORDED = json.loads((Path(__file__).parents[2] / "data" / "spike_guards.json").read_text())
PUBLISHED = {  # window, values before the first threshold, divisor of the variance
    "levanter": {"window": 17, "warmup_steps": 8, "ddof": 0},
    "maxtext": {"window": 16, "warmup_steps": 7, "ddof": 1},  # and OLMo-core
}


def published(name):
    rule = functools.partial(gcx.thresholds.mean_std, 4.0, **PUBLISHED[name])
    return gcx.skip_spikes(optax.scale(1.0), norm=rule(), loss=rule())


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("stream", ["spikes", "rise"])
def test_published_guards_are_reproduced_step_by_step(name, stream):
    recorded = RECORDED["streams"][stream]
    skipped, _ = feed(published(name), recorded["norms"], recorded["losses"])
    assert np.flatnonzero(skipped).tolist() == recorded["skipped"][name]


def test_the_counts_say_whether_it_was_the_loss_or_the_norm():
    tx = gcx.skip_spikes(optax.sgd(0.1), norm=10.0, loss=-1.0)
    losses, norms = [-2.0, -0.5, -2.0, 3.0, np.nan], [1.0, 1.0, 20.0, 20.0, 1.0]
    skipped, state = feed(tx, norms, losses)
    assert skipped.tolist() == [False, True, True, True, True]
    found = {key: float(value) for key, value in gcx.metrics(state).items()}
    assert found["skipped_large_loss"] == found["skipped_large_norm"] == 2
    assert found["skipped_nonfinite"] == 1 and found["consecutive_skips"] == 4
    assert found["loss_threshold"] == -1.0 and found["skip_threshold"] == 10.0


def test_a_lasting_rise_of_a_negative_loss_is_learned():
    noise = 0.1 * np.random.default_rng(0).standard_normal(200)
    losses = -3.0 + noise + np.r_[np.zeros(100), np.full(100, 50.0)]
    for rule in (
        gcx.thresholds.mean_std(6.0, window=50, warmup_steps=10),
        gcx.thresholds.zscore(6.0),
    ):
        tx = gcx.skip_spikes(optax.sgd(0.1), loss=rule)
        skipped = np.flatnonzero(feed(tx, np.ones(200), losses)[0])
        assert skipped[0] == 100 and skipped[-1] <= 126


def test_both_histories_are_blind_to_a_step_that_is_not_finite():
    rule = gcx.thresholds.mean_std(4.0, window=8, warmup_steps=3)
    tx = gcx.skip_spikes(optax.sgd(0.1), norm=rule, loss=rule)
    _, clean = feed(tx, [2.0, 2.1, 1.9], [1.0, 1.1, 0.9])
    _, state = feed(tx, [2.0, 9.0, 2.1, np.inf, 1.9], [1.0, np.nan, 1.1, 7.0, 0.9])
    chex.assert_trees_all_equal(state.signals, clean.signals)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_mean_loss_of_all_devices_decides(check_vma):
    axis_name = None if check_vma else "data"
    tx = gcx.skip_spikes(optax.sgd(1.0), loss=4.4, axis_name=axis_name)

    @cases.sharded((cases.SHARDS, cases.SHARDS), cases.WHOLE, check_vma=check_vma)
    def step(grads, losses):
        _, state = tx.update(grads, tx.init(grads), value=losses[0])
        return state.skipped_large_loss, state.loss

    skipped, loss = step(jnp.ones(8), jnp.arange(1.0, 9.0))
    assert skipped == 1 and loss == 4.5


def test_a_fixed_loss_is_never_learned_and_holds_no_other_rule_back():
    tx = gcx.skip_spikes(optax.sgd(0.1), norm=FROZEN, loss=5.0, relearn_after=3)
    # Two skips for the loss and one for the norm are three: the norm is then learned anew.
    skipped, state = feed(tx, [1, 1, 1, 9, 9, 9, 1], [1, 8, 8, 1, 8, 1, 1])
    assert skipped.tolist() == [False, True, True, True, True, False, False]
    assert state.signals["norm"] == 9.0 and state.spikes_in_a_row == 0


def test_no_step_above_the_bound_of_a_capped_rule_is_applied():
    rule = gcx.thresholds.capped(gcx.thresholds.mean_std(window=8, warmup_steps=2), 10.0)
    tx = gcx.skip_large_norm(optax.sgd(1.0), rule, relearn_after=3)
    state = tx.init(jnp.zeros(1))
    for norm in [1.0] * 3 + [1000.0] * 9 + [5.0] * 4:
        updates, state = tx.update(jnp.array([norm]), state)
        assert abs(updates[0]) <= 10
    assert updates[0] == -5  # between its mean and its bound: learned anew
