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
from guard_cases import RULES, each_rule, feed


def test_the_norm_of_all_shards_decides():
    params = {"s": jnp.zeros(16), "w": jnp.zeros(2)}
    grads = {"s": jnp.full(16, 3.0), "w": jnp.array([0.0, 5.0])}  # norm 13, 3 * sqrt(2) a device
    step = cases.on_shards(gcx.skip_spikes(optax.sgd(1.0), norm=13.0))
    for factor, skips in ((1.01, 1), (0.99, 0)):
        _, _, streak = step(optax.tree.scale(factor, grads), params)
        assert streak.tolist() == [skips] * 8


@pytest.mark.parametrize("guard", [gcx.skip_nonfinite, lambda tx: gcx.skip_spikes(tx, norm=1.0)])
def test_the_verdict_costs_one_all_reduce_of_a_number_in_shard_map(guard):
    tx = guard(optax.sgd(1.0))

    @cases.sharded(({"a": cases.SHARDS, "b": cases.WHOLE},), cases.SHARDS)
    def step(grads):
        return tx.update(grads, tx.init(grads))[0]["a"]

    text = hlo.compiled(step, {"a": jnp.ones(64), "b": jnp.ones((64, 4))})
    assert hlo.all_reduced(text) == [1] and collectives(text) == {"all-reduce": 1}


@pytest.mark.parametrize(
    ("norm", "threshold", "taken"),
    [
        (1.0, 1.0, True),
        (np.nextafter(np.float32(1), np.float32(2)), 1.0, False),
        (2.0**62, np.inf, True),
        (np.inf, np.inf, False),
        (np.nan, np.inf, False),
    ],
)
def test_a_step_is_taken_up_to_the_threshold(norm, threshold, taken):
    tx = gcx.skip_spikes(optax.sgd(1.0), norm=threshold)
    updates, state = tx.update(jnp.array([norm, 0.0], jnp.float32), tx.init(jnp.zeros(2)))
    assert (state.consecutive_skips == 0) == taken
    assert updates.tolist() == [-norm if taken else 0.0, 0.0]
    np.testing.assert_equal(np.asarray(state.grad_norm), np.float32(norm))
    found = gcx.metrics(state)
    assert found["skip_threshold"] == threshold
    counts = int(found["skipped_large_norm"]), int(found["skipped_nonfinite"])
    assert counts == ((0, 0) if taken else (1, 0) if np.isfinite(norm) else (0, 1))


def test_a_schedule_counts_all_steps():
    tx = gcx.skip_spikes(optax.sgd(1.0), norm=lambda count: 10.0 - count)
    skipped, state = feed(tx, [9.5, 9.5, np.nan, 6.5, 6.5, 6.5])
    assert skipped.tolist() == [False, True, True, False, True, True]
    assert gcx.metrics(state)["skip_threshold"] == 5.0


@each_rule
@pytest.mark.sampled
def test_a_rule_skips_no_constant_norm_and_adapts_to_a_lasting_rise(rule):
    noise = np.exp(0.1 * np.random.default_rng(0).standard_normal(500))
    norms = np.stack([np.full(500, 0.7), noise * np.repeat([1.0, 10.0], 250)])
    skipped, state = feed(gcx.skip_spikes(optax.sgd(0.1), norm=rule), norms)
    # A rule that aims at the 0.9 quantile skips one norm of ten: that is its definition.
    is_quantile = rule is RULES["quantile"]
    assert skipped[0].mean() <= (0.15 if is_quantile else 0)
    is_slow = rule is RULES["ema"]  # its average follows clipped norms
    assert skipped[1, 250] and skipped[1, 250:].argmin() <= (90 if is_slow else 35)
    assert skipped[1, 400:].mean() <= (0.2 if is_quantile else 0.15)
    assert state.guard_failed.tolist() == [0, int(is_slow)]


# Loss and norm


QUICK = {
    "zscore": gcx.thresholds.zscore(warmup_steps=4),
    "mean_std": gcx.thresholds.mean_std(4.0, window=8, warmup_steps=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("norm", QUICK.values(), ids=QUICK)
@pytest.mark.parametrize("loss", QUICK.values(), ids=QUICK)
def test_a_lasting_rise_of_norm_or_loss_is_learned_in_31_skips(norm, loss):
    """In each stream, a pattern repeats: a rise of the norm, of the loss, of both, or none."""
    patterns = ["n", "l", "b", "n.", "l.", "b."]
    rows = 1 + 0.1 * np.random.default_rng(0).random((len(patterns), 120, 2))
    for row, pattern in zip(rows, patterns, strict=True):
        for i in range(20, 120):
            fault = pattern[i % len(pattern)]
            row[i] *= 100.0 if fault in "nb" else 1.0, 100.0 if fault in "lb" else 1.0
    skipped, _ = feed(
        gcx.skip_spikes(optax.sgd(0.1), norm=norm, loss=loss), *np.moveaxis(rows, -1, 0)
    )
    streaks = ["".join("x" if x else " " for x in row).split() for row in skipped]
    assert max(len(streak) for row in streaks for streak in row) <= 31


RECORDED = json.loads((Path(__file__).parents[2] / "data" / "spike_guards.json").read_text())
PUBLISHED = {  # window, values before the first threshold, divisor of the variance
    "levanter": {"window": 17, "warmup_steps": 8, "ddof": 0},
    "maxtext": {"window": 16, "warmup_steps": 7, "ddof": 1},  # and OLMo-core
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_guards_are_reproduced_step_by_step(name):
    rule = functools.partial(gcx.thresholds.mean_std, 4.0, **PUBLISHED[name])
    streams = [RECORDED["streams"][stream] for stream in ("spikes", "rise")]
    norms, losses = ([stream[key] for stream in streams] for key in ("norms", "losses"))
    tx = gcx.skip_spikes(optax.scale(1.0), norm=rule(), loss=rule())
    skipped, _ = feed(tx, norms, losses)
    for row, stream in zip(skipped, streams, strict=True):
        assert np.flatnonzero(row).tolist() == stream["skipped"][name]


def test_the_counts_say_whether_it_was_the_loss_or_the_norm():
    tx = gcx.skip_spikes(optax.sgd(0.1), norm=10.0, loss=-1.0)
    losses, norms = [-2.0, -0.5, -2.0, 3.0, np.nan], [1.0, 1.0, 20.0, 20.0, 1.0]
    skipped, state = feed(tx, norms, losses)
    assert skipped.tolist() == [False, True, True, True, True]
    found = {key: float(value) for key, value in gcx.metrics(state).items()}
    assert found["skipped_large_loss"] == found["skipped_large_norm"] == 2
    assert found["skipped_nonfinite"] == 1 and found["consecutive_skips"] == 4
    assert found["loss_threshold"] == -1.0 and found["skip_threshold"] == 10.0


def test_both_histories_are_blind_to_a_step_that_is_not_finite():
    rule = gcx.thresholds.mean_std(4.0, window=8, warmup_steps=3)
    tx = gcx.skip_spikes(optax.sgd(0.1), norm=rule, loss=rule)
    _, clean = feed(tx, [2.0, 2.1, 1.9], [1.0, 1.1, 0.9])
    _, state = feed(tx, [2.0, 9.0, 2.1, np.inf, 1.9], [1.0, np.nan, 1.1, 7.0, 0.9])
    rules, clean_rules = (x.inner_guards[0].rule_state.rules for x in (state, clean))
    chex.assert_trees_all_equal(rules, clean_rules)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_mean_loss_of_all_devices_decides(check_vma):
    axis_name = None if check_vma else "data"
    tx = gcx.skip_spikes(optax.sgd(1.0), loss=4.4, axis_name=axis_name)

    @cases.sharded((cases.SHARDS, cases.SHARDS), cases.WHOLE, check_vma=check_vma)
    def step(grads, losses):
        _, state = tx.update(grads, tx.init(grads), value=losses[0])
        return gcx.metrics(state)["skipped_large_loss"]

    assert step(jnp.ones(8), jnp.arange(1.0, 9.0)) == 1  # mean 4.5
    assert step(jnp.ones(8), jnp.arange(0.8, 8.8)) == 0
