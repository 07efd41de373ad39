"""A run that changes from Optax to this package, or back, goes on with the same numbers."""

import collections
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

pytestmark = pytest.mark.slow  # compiles many programs; .ci/run and the workflow run it

PARAMS = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.array([0.5, -0.5])}
EVERY = 3


def schedule(step):
    return 0.1 / (1 + step)


def multi_steps(inner, every, **options):
    return optax.MultiSteps(inner, every, **options).gradient_transformation()


accumulate = gcx.accumulate_gradients


# Pairs of the same optimizer in Optax and here; tests/conformance/test_fuzz.py draws more.
INJECTED = optax.linear_schedule(2.0, 0.1, 20)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
PAIRS = {
    "masked": (
        optax.chain(optax.masked(optax.clip(0.5), {"w": True, "b": False}), CLIPPED),
        optax.chain(optax.masked(gcx.clip_by_value(0.5), {"w": True, "b": False}), CLIPPED),
    ),
    "partition": (
        optax.partition({"w": multi_steps(CLIPPED, 3), "b": CLIPPED}, {"w": "w", "b": "b"}),
        optax.partition({"w": accumulate(CLIPPED, 3), "b": CLIPPED}, {"w": "w", "b": "b"}),
    ),
    "inject_hyperparams": (
        optax.chain(optax.inject_hyperparams(optax.clip_by_global_norm)(INJECTED), CLIPPED),
        optax.chain(optax.inject_hyperparams(gcx.clip_by_global_norm)(INJECTED), CLIPPED),
    ),
    "window": (multi_steps(CLIPPED, EVERY), accumulate(CLIPPED, EVERY)),
    "guard": (optax.apply_if_finite(CLIPPED, 9), gcx.skip_nonfinite(CLIPPED)),
    "guard around a window": (
        multi_steps(CLIPPED, EVERY, should_skip_update_fn=optax.skip_not_finite),
        gcx.skip_nonfinite(accumulate(CLIPPED, EVERY)),
    ),
}


def draw_grads(step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda x: jnp.float32(rng.standard_normal(x.shape)), PARAMS)


def run(tx, state, params, steps, bad=()):
    for step in steps:
        grads = draw_grads(step)
        if step in bad:
            grads["b"] = grads["b"].at[0].set(jnp.nan)
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


# A mean kept as a sum is rounded once more; Adam divides by a root of it.
assert_alike = functools.partial(chex.assert_trees_all_close, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS.values(), ids=PAIRS)
def test_a_run_goes_on_here_and_back_there(theirs, ours):
    params, state = run(theirs, theirs.init(PARAMS), PARAMS, range(4))
    expected, expected_state = run(theirs, state, params, range(4, 16))

    # Arrays of NumPy, as from a checkpoint of any kind.
    params, state = jax.tree.map(np.asarray, (params, state))
    converted = gcx.convert_state(ours, state, params, reduction="mean")
    chex.assert_trees_all_equal_shapes_and_dtypes(converted, ours.init(PARAMS))
    found, found_state = run(ours, converted, params, range(4, 11))
    back = gcx.convert_state(theirs, found_state, found, reduction="mean")
    found, found_state = run(theirs, back, found, range(11, 16))
    assert_alike(found, expected)
    assert_alike(found_state, expected_state)


# The skip function of MultiSteps counts nothing that could be carried over.
@pytest.mark.parametrize(("name", "skips"), [("guard", 3), ("guard around a window", 1)])
def test_skips_before_and_after_are_those_of_one_run(name, skips):
    theirs, ours = PAIRS[name]
    bad = {2, 3, 8}
    params, state = run(theirs, theirs.init(PARAMS), PARAMS, range(4), bad)
    expected, _ = run(theirs, state, params, range(4, 12), bad)
    converted = gcx.convert_state(ours, state, params, reduction="mean")
    found, found_state = run(ours, converted, params, range(4, 12), bad)
    assert_alike(found, expected)
    assert gcx.metrics(found_state)["skipped_nonfinite"] == skips


SUM = accumulate(optax.sgd(0.1), EVERY)
SCALED = accumulate(gcx.dynamic_loss_scale(optax.sgd(0.1)), EVERY)
THEIRS = multi_steps(optax.sgd(0.1), EVERY)
SPIKES = functools.partial(gcx.skip_spikes, norm=gcx.thresholds.mean_std(warmup_steps=2))
LEARNED = gcx.clip_by_global_norm(gcx.thresholds.ema(warmup_steps=1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (THEIRS, SUM, "^convert_state: `reduction`"),
        (SUM, THEIRS, "^convert_state: `reduction`"),
        (SUM, SCALED, "loss scale"),
        (SCALED, SUM, "loss scale"),
    ],
)
def test_an_open_window_has_to_come_with_its_reduction_and_keep_its_loss_scale(old, new, message):
    convert = functools.partial(gcx.convert_state, new)
    for taken in (0, EVERY):
        params, state = run(old, old.init(PARAMS), PARAMS, range(taken))
        there = convert(state, params)
        assert_alike(there, convert(state, params, reduction="sum"))
        # `MultiSteps` would add to the sum of the last window.
        assert new is not THEIRS or not np.any(there.acc_grads["w"])
    _, state = run(old, old.init(PARAMS), PARAMS, range(1))
    for call in (convert, jax.jit(convert)):  # jit does not know the number of micro-batches
        with pytest.raises(ValueError, match=message):
            call(state, PARAMS)


def test_multi_steps_continues_with_the_mean_of_a_weighted_window():
    grads = [draw_grads(0), draw_grads(1)]
    state = SUM.init(PARAMS)
    for weight, g in zip((1.0, 3.0), grads, strict=True):
        _, state = SUM.update(g, state, PARAMS, weight=weight)
    there = gcx.convert_state(THEIRS, state, PARAMS, reduction="mean")
    assert_alike(there.acc_grads, jax.tree.map(lambda x, y: (x + 3 * y) / 4, *grads))


ADDED = {
    "a named clip": (
        lambda tx: optax.named_chain(("tx", tx)),
        lambda tx: optax.named_chain(("clip", gcx.clip_by_global_norm(1e3)), ("tx", tx)),
    ),
    "a guard inside a window": (
        lambda tx: accumulate(tx, EVERY),
        lambda tx: accumulate(gcx.skip_nonfinite(tx), EVERY),
    ),
    "a guard of another kind": (
        lambda tx: gcx.skip_spikes(tx, norm=1e3),
        lambda tx: gcx.dynamic_loss_scale(tx, init_scale=1.0),
    ),
    "a clip taken out of a window": (
        lambda tx: optax.MultiSteps(optax.chain(optax.clip(1e3), tx), EVERY),
        lambda tx: optax.chain(gcx.clip_by_value(1e3), accumulate(tx, EVERY)),
    ),
}


@pytest.mark.parametrize(("before", "after"), ADDED.values(), ids=ADDED)
def test_what_is_added_starts_anew_and_can_be_taken_away(before, after):
    old, new = before(optax.adam(schedule)), after(optax.adam(schedule))
    params, state = run(old, old.init(PARAMS), PARAMS, range(EVERY + 1))
    expected, _ = run(old, state, params, range(EVERY + 1, 3 * EVERY))
    converted = gcx.convert_state(new, state, params, reduction="mean")
    assert jax.tree.structure(converted) == jax.tree.structure(new.init(PARAMS))
    found, new_state = run(new, converted, params, range(EVERY + 1, 2 * EVERY - 1))
    back = gcx.convert_state(old, new_state, found, reduction="mean")
    found, _ = run(old, back, found, range(2 * EVERY - 1, 3 * EVERY))
    assert_alike(found, expected)


def test_a_guard_with_another_rule_starts_anew_and_arrays_are_cast():
    old = gcx.skip_spikes(optax.adam(0.1), norm=9.0)
    params, state = run(old, old.init(PARAMS), PARAMS, range(3))
    adam = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    new = gcx.skip_spikes(adam, norm=gcx.thresholds.mean_std(50.0))
    there, first = gcx.convert_state(new, state, params), new.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(there, first)
    assert_alike(there.inner_guards, first.inner_guards)
    chex.assert_trees_all_close(there.inner_state, state.inner_state, rtol=2.0**-8)


@pytest.mark.parametrize("name", ["", "mine"])
def test_the_state_of_a_lambda_function_without_a_name_is_not_taken_for_that_of_another(name):
    def clip(factor):
        update = lambda norm, count, _: (factor * norm, count + 1)  # noqa: E731
        rule = gcx.thresholds.Rule(jnp.zeros_like, update, name=name)
        return optax.chain(gcx.clip_by_global_norm(rule), optax.sgd(0.1))

    params, state = run(clip(2.0), clip(2.0).init(PARAMS), PARAMS, range(3))
    there = gcx.convert_state(clip(3.0), state, params)
    assert_alike(there, state if name else clip(3.0).init(PARAMS))


def test_history_of_a_clip_is_kept_where_the_clips_are_the_same():
    old = optax.chain(LEARNED, optax.sgd(0.1))
    params, state = run(old, old.init(PARAMS), PARAMS, range(3))
    guarded = gcx.skip_nonfinite(old)
    assert_alike(gcx.convert_state(guarded, state, params).inner_state[0], state[0])
    with_another = optax.chain(LEARNED, gcx.clip_by_leaf_norm(1.0), optax.sgd(0.1))
    there = gcx.convert_state(with_another, state, params)
    assert_alike(there[0], LEARNED.init(PARAMS))
    of_another_kind = optax.chain(gcx.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert_alike(gcx.convert_state(of_another_kind, state, params), of_another_kind.init(PARAMS))


def test_guards_and_clips_are_matched_by_type_and_place():
    old = accumulate(SPIKES(optax.sgd(0.1)), EVERY)
    params, state = run(old, old.init(PARAMS), PARAMS, range(3 * EVERY))
    new = SPIKES(old)
    there = gcx.convert_state(new, state, params)
    assert_alike(there._replace(outer_guards=(), grad_norm=state.grad_norm), state)
    assert_alike(there.outer_guards, new.init(PARAMS).outer_guards)
    assert_alike(gcx.convert_state(old, there, params), state)

    old = optax.chain(LEARNED, SUM)
    params, state = run(old, old.init(PARAMS), PARAMS, range(EVERY))
    new = accumulate(optax.chain(LEARNED, optax.sgd(0.1)), EVERY)
    there = gcx.convert_state(new, state, params)  # its norms were those of micro-batches
    assert_alike(there.inner_state[0], LEARNED.init(PARAMS))

    spikes = functools.partial(gcx.skip_spikes, norm=1e-3)
    new = optax.chain(gcx.skip_spikes(optax.sgd(0.1), norm=9.0), spikes(SUM))
    _, state = run(new, new.init(PARAMS), PARAMS, range(2))
    assert int(state[1].consecutive_skips) == 2
    assert_alike(gcx.convert_state(new, state, PARAMS), state)


def test_an_open_window_is_not_discarded():
    for old in (SUM, THEIRS):
        _, state = run(old, old.init(PARAMS), PARAMS, range(1))
        convert = functools.partial(gcx.convert_state, reduction="mean")
        for call in (convert, jax.jit(convert, static_argnums=0)):
            with pytest.raises(ValueError, match="^convert_state: `state` must be"):
                call(optax.sgd(0.1), state, PARAMS)


def test_states_of_the_version_with_one_state_for_each_guard_are_converted():
    guard = collections.namedtuple(
        "SkipNonfiniteState",
        "grad_norm skipped_nonfinite consecutive_skips guard_failed inner_state",
    )
    window = collections.namedtuple(
        "AccumulationState",
        "mini_step gradient_step inner_opt_state acc_grads total_weight accumulation_steps "
        "micro_batch_count emitted empty_windows loss_sum loss_weight",
    )
    inner = optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(inner, 3))
    state = tx.init(PARAMS)
    for _ in range(4):  # a window, and a micro-batch of the next one
        params, state = gcx.apply_gradients(tx, PARAMS, state, PARAMS, value=jnp.float32(2))
    sums = state.accumulation
    counts = sums.accumulation_steps, sums.micro_batch_count, 0, sums.empty_windows
    old = window(
        *(sums.mini_step, sums.gradient_step, state.inner_state, sums.gradient.total),
        *(sums.gradient.weight, *counts, sums.loss.total, sums.loss.weight),
    )
    skips = state.outer_guards[0].skipped["nonfinite"], state.consecutive_skips, state.guard_failed
    converted = gcx.convert_state(tx, guard(state.grad_norm, *skips, old), PARAMS)
    chex.assert_trees_all_equal(converted._replace(outcome=0), state._replace(outcome=0))


def test_skipped_spikes_of_the_version_with_one_state_for_each_guard_are_counted():
    spikes = collections.namedtuple(
        "SkipSpikesState",
        "grad_norm skip_threshold skipped_large_norm loss_threshold skipped_large_loss "
        "skipped_nonfinite consecutive_skips guard_failed rule_states inner_state",
    )
    tx = gcx.skip_spikes(optax.adam(0.1), norm=4.0, loss=2.0)
    params, state = PARAMS, tx.init(PARAMS)
    for factor, loss in ((1.0, 1.0), (9.0, 1.0), (1.0, 3.0), (jnp.nan, 1.0), (jnp.nan, 1.0)):
        grads = jax.tree.map(lambda x, factor=factor: factor * x, PARAMS)
        params, state = gcx.apply_gradients(tx, grads, state, params, value=jnp.float32(loss))
    skipped, rule_state = state.inner_guards[0]
    thresholds = rule_state.thresholds
    old = spikes(
        *(state.grad_norm, thresholds["norm"], skipped["large_norm"], thresholds["loss"]),
        *(skipped["large_loss"], skipped["nonfinite"], state.consecutive_skips),
        *(state.guard_failed, rule_state.rules, state.inner_state),
    )
    assert [int(x) for x in old[2:7:2]] == [1, 1, 4]
    converted = gcx.convert_state(tx, old, PARAMS)
    chex.assert_trees_all_equal(converted._replace(outcome=0), state._replace(outcome=0))


@pytest.mark.parametrize("name", ["ema", "zscore", "percentile"])
def test_histories_of_thresholds_of_the_version_without_names_of_rules_are_kept(name):
    rule = getattr(gcx.thresholds, name)()
    clip = gcx.clip_by_global_norm(rule)
    tx = gcx.skip_spikes(optax.chain(clip, optax.adam(0.1)), norm=rule)
    state, unnamed = tx.init(PARAMS), lambda named: next(iter(named.values()))
    for _ in range(3):
        _, state = tx.update(PARAMS, state, PARAMS)
    clips, *others = state.inner_state
    guard = state.inner_guards[0]
    spikes = guard.rule_state._replace(
        rules={key: unnamed(x) for key, x in guard.rule_state.rules.items()}
    )
    old = state._replace(
        inner_state=(clips._replace(rules=tuple(map(unnamed, clips.rules))), *others),
        inner_guards=(guard._replace(rule_state=spikes),),
    )
    chex.assert_trees_all_equal(gcx.convert_state(tx, old, PARAMS), state)


def test_the_state_of_a_skip_rule_of_the_version_without_names_of_rules_is_kept():
    rule = gcx.SkipRule(lambda _: jnp.int32(0), lambda *_: (False, ()), lambda n, *_: n + 1)
    tx = gcx.skip_if(optax.adam(0.1), rule)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    guard = state.inner_guards[0]
    old = state._replace(inner_guards=(guard._replace(rule_state=guard.rule_state[rule.name]),))
    chex.assert_trees_all_equal(gcx.convert_state(tx, old, PARAMS), state)


rules = gcx.thresholds


def last_norm():
    return rules.Rule(jnp.zeros_like, lambda norm, last, _: (2 * last + 1, norm))


def count_steps():
    return rules.Rule(jnp.zeros_like, lambda norm, count, _: (9 - count, count + 1))


SAME_SHAPES = {
    "own": (last_norm(), rules.quantile()),
    "two of one's own": (last_norm(), count_steps()),
    "percentile": (rules.percentile(50.0, window=8), rules.mean_std(window=8, warmup_steps=2)),
}


OWNERS = {
    "clip_threshold": gcx.clip_by_global_norm,
    "skip_threshold": lambda rule: gcx.skip_spikes(optax.sgd(0.1), norm=rule),
}


@pytest.mark.parametrize("key", OWNERS)
@pytest.mark.parametrize("name", SAME_SHAPES)
def test_a_rule_of_another_kind_with_the_same_shapes_starts_anew(name, key):
    old, new = map(OWNERS[key], SAME_SHAPES[name])
    _, state = run(old, old.init(PARAMS), PARAMS, range(3))
    states = gcx.convert_state(new, state, PARAMS), new.init(PARAMS)
    found, fresh = (gcx.metrics(run(new, x, PARAMS, [3])[1])[key] for x in states)
    assert found == fresh


def test_a_skip_rule_of_another_name_with_the_same_shapes_starts_anew():
    def rule(name):
        def never(grads, state, params):
            return False, ()

        return gcx.SkipRule(lambda _: jnp.int32(0), never, lambda n, *_: n + 1, name)

    first, same, other = (gcx.skip_if(optax.sgd(0.1), rule(name)) for name in ("", "", "other"))
    _, state = run(first, first.init(PARAMS), PARAMS, [0])
    kept, initial = (gcx.convert_state(tx, state, PARAMS).inner_guards[0] for tx in (same, other))
    assert jax.tree.leaves((kept.rule_state, initial.rule_state)) == [1, 0]
