"""Watching: norms unit by unit with names, what became of each step, and the incidents."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import gradclip_jax as gcx

PARAMS = {
    "decoder": {"layers": {"attn": np.ones((3, 2), "f"), "mlp": {"wi": np.ones((3, 2, 2), "f")}}},
    "embed": np.full((4, 3), 0.5, "f"),
}
STACKED = gcx.granularities.layer({"decoder": 1, "embed": 0})


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype("f"), tree)


def norm64(*arrays):
    return np.sqrt(sum(np.sum(np.abs(np.asarray(x, np.complex128)) ** 2) for x in arrays))


def run(tx, stream, params=PARAMS, losses=None):
    """The state after a stream of gradients, in one scan."""
    losses = np.full(len(stream), 3.0, "f") if losses is None else np.float32(losses)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *stream)

    def step(state, given):
        grads, loss = given
        return tx.update(grads, state, params, value=loss)[1], None

    return jax.jit(lambda s, xs: jax.lax.scan(step, s, xs)[0])(tx.init(params), (stacked, losses))


def expected_norms(tree):
    layers = tree["decoder"]["layers"]
    return {
        **{f"decoder/layers_{i}/attn": norm64(layers["attn"][i]) for i in range(3)},
        **{f"decoder/layers_{i}/mlp/wi": norm64(layers["mlp"]["wi"][i]) for i in range(3)},
        "embed": norm64(tree["embed"]),
    }


def test_stacked_layers_have_norms_of_their_own_by_name():
    tx = gcx.watch(optax.sgd(0.1), granularity=STACKED)
    grads = random_like(PARAMS)
    updates, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    found = gcx.metrics(state)
    # The update as it is added to the parameters, where a sum is rounded.
    updates = jax.tree.map(lambda p, u: (p + np.asarray(u)) - p, PARAMS, updates)
    for key, tree in (
        ("gradient_norm", grads),
        ("update_norm", updates),
        ("parameter_norm", PARAMS),
    ):
        expected = expected_norms(tree)
        ours = {k.partition("/")[2]: v for k, v in found.items() if k.startswith(key + "/")}
        assert ours.keys() == expected.keys()
        for name, norm in expected.items():
            np.testing.assert_allclose(ours[name], norm, rtol=1e-6)
        np.testing.assert_allclose(found[key], norm64(*jax.tree.leaves(tree)), rtol=1e-6)
    for name, norm in expected_norms(updates).items():
        ratio = norm / expected_norms(PARAMS)[name]
        np.testing.assert_allclose(found[f"update_ratio/{name}"], ratio, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("granularity", "names"),
    [
        ("global", []),
        ("leaf", ["a/w", "b"]),
        (gcx.granularities.group({"a": "body", "b": "head"}), ["body", "head"]),
        (gcx.granularities.layer(1), ["a/w_0", "a/w_1", "b_0", "b_1"]),
        (gcx.granularities.axis(0), ["a/w_0", "a/w_1", "a/w_2", "b"]),
    ],
)
def test_any_granularity_has_names_and_their_norms(granularity, names):
    tree = {"a": {"w": np.float32([[1, 2, 3], [4, 5, 6]])}, "b": np.float32([7, 8])}
    tx = gcx.watch(optax.identity(), granularity=granularity)
    _, state = tx.update(tree, tx.init(tree), tree)
    assert gcx.diagnostics.unit_names(state) == names
    found = gcx.metrics(state)
    assert {k for k in found if k.startswith("gradient_norm/")} == {
        f"gradient_norm/{name}" for name in names
    }
    squares = [float(found[f"gradient_norm/{name}"]) ** 2 for name in names] or [204]
    assert sum(squares) == pytest.approx(204, rel=1e-6)
    assert found["gradient_norm"] == pytest.approx(204**0.5, rel=1e-6)
    assert found["update_ratio"] == pytest.approx(1.0, rel=1e-6)


def test_a_bare_array_has_a_name():
    tx = gcx.watch(optax.sgd(0.1))
    _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.ones(2)), jnp.ones(2))
    assert gcx.metrics(state)["gradient_norm/array"] == 5


def test_the_largest_share_names_its_leaf():
    tx = gcx.watch(optax.sgd(0.1), of=("gradient",))
    grads = {"a": jnp.array([3.0]), "b": jnp.array([1.0]), "c": jnp.array([0.0])}
    _, state = tx.update(grads, tx.init(grads))
    found = gcx.metrics(state)
    assert found["largest_share"] == pytest.approx(0.9, rel=1e-6)
    assert gcx.diagnostics.unit_names(state)[int(found["largest_share_index"])] == "a"
    assert "update_norm" not in found and "parameter_norm" not in found


def test_parameters_that_are_zero_have_a_ratio_of_zero():
    tx = gcx.watch(optax.sgd(1.0))
    params = {"w": jnp.zeros(2), "b": jnp.ones(2)}
    _, state = tx.update({"w": jnp.ones(2), "b": jnp.ones(2)}, tx.init(params), params)
    found = gcx.metrics(state)
    assert found["update_ratio/w"] == 0 and found["update_ratio/b"] == 1


def test_a_held_step_says_so_and_repeats_nothing():
    tx = gcx.watch(gcx.accumulate_gradients(optax.sgd(1.0), 2))
    params = {"w": jnp.ones(1)}
    state, rows = tx.init(params), []
    for size in (2.0, 4.0, 8.0):
        _, state = tx.update({"w": jnp.array([size])}, state, params)
        found = gcx.metrics(state)
        rows.append([float(found[k]) for k in ("has_updated", "gradient_norm", "update_norm")])
    assert rows == [[0, 2, 0], [1, 4, 3], [0, 8, 0]]
    assert gcx.incidents(state) == []  # to hold is no incident


def test_inside_an_accumulation_it_counts_the_steps_that_were_taken():
    tx = gcx.accumulate_gradients(gcx.watch(optax.sgd(1.0)), 2)
    params = {"w": jnp.ones(1)}
    state, steps, norms = tx.init(params), [], []
    for size in (2.0, 4.0, 8.0):
        params, state = gcx.apply_gradients(tx, {"w": jnp.array([size])}, state, params)
        steps.append(int(gcx.metrics(state)["watch_step"]))
        norms.append(float(gcx.metrics(state)["update_norm"]))
    assert steps == [0, 1, 1]
    assert norms == [-1, 3, -1]  # a held micro-batch does not reach it: nothing was measured


@pytest.mark.parametrize("inside", [False, True])
def test_a_skipped_window_is_one_incident_and_later_held_steps_are_none(inside):
    if inside:
        inner = gcx.accumulate_gradients(gcx.skip_large_norm(optax.sgd(1.0), 10.0), 2)
    else:
        inner = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.sgd(1.0), 2))
    bad = 100.0 if inside else np.nan
    tx = gcx.watch(inner, spike_threshold=np.inf)
    state = run(tx, [{"w": np.float32([x])} for x in (1, bad, 1, 1, 1)], {"w": np.ones(1, "f")})
    assert [(x.step, "skipped" in x.kinds) for x in gcx.incidents(state)] == [(1, True)]
    assert gcx.metrics(state)["incident_step"] == 1


def test_a_step_without_measurement_reports_minus_one_and_no_incident():
    tx = gcx.watch(optax.sgd(1.0))
    params = {"w": jnp.ones(1)}
    _, state = tx.update({"w": jnp.array([2.0])}, tx.init(params), params)
    updates, state = tx.update({"w": jnp.array([np.inf])}, state, params, measure=False)
    found = gcx.metrics(state)
    assert np.isinf(updates["w"][0]) and found["watch_step"] == 2
    keys = ("gradient_norm", "update_norm/w", "update_ratio", "largest_share")
    assert all(found[key] == -1 for key in keys)
    assert gcx.incidents(state) == []


# Incidents

QUIET = [random_like(PARAMS, seed) for seed in range(70)]


def spoilt(index, value):
    grads = jax.tree.map(np.copy, QUIET[0])
    grads["decoder"]["layers"]["mlp"]["wi"][index] *= value
    return grads


def level64(values, floor):
    """Mean and variance: averages, with weight 1 / 64 after the first 64 values.

    A change below the mean counts as at most one standard deviation.
    """
    mean = variance = 0.0
    for count, value in enumerate(values, 1):
        weight = 1 / min(count, 64)
        change = max(value - mean, -max(np.sqrt(variance), floor))
        variance = (1 - weight) * (variance + weight * change**2)
        mean += weight * (value - mean)
    return mean, variance


def test_nan_infinity_spikes_and_losses_are_told_with_their_place():
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(1e-3)), granularity=STACKED)
    stream = [*QUIET, spoilt(1, 1e4), spoilt((2, 0), np.nan), spoilt((0, 0, 0), np.inf), QUIET[1]]
    rng = np.random.default_rng(0)
    losses = [*(3 + 0.1 * rng.standard_normal(73)), 9.0]
    spike, nan, infinity, loss = gcx.incidents(run(tx, stream, losses=losses))
    assert (spike.step, spike.kinds) == (70, ("norm", "leaf"))
    assert spike.leaf == "decoder/layers_1/mlp/wi" and spike.share > 0.99
    assert spike.norm == pytest.approx(norm64(*jax.tree.leaves(stream[70])), rel=1e-6)
    floor = np.log(2) / (6 * 1.35)
    mean, variance = level64(np.log([norm64(*jax.tree.leaves(grads)) for grads in QUIET]), floor)
    expected = np.exp(mean + 6 * 1.35 * max(np.sqrt(variance), floor))
    assert spike.norm_threshold == pytest.approx(expected, rel=1e-4)
    assert (nan.step, nan.kinds, nan.leaf) == (71, ("nan", "skipped"), "decoder/layers_2/mlp/wi")
    assert np.isnan(nan.norm)
    assert (infinity.kinds, infinity.leaf) == (("infinity", "skipped"), "decoder/layers_0/mlp/wi")
    assert infinity.norm == np.inf
    assert (loss.step, loss.kinds, loss.loss) == (73, ("loss",), 9.0)


def noisy(steps, change=lambda i, name, x: x, noise=0.05, names=("big", "mid", "small")):
    """Gradients of one number each, whose sizes differ by a factor of 10."""
    rng, stream = np.random.default_rng(0), []
    for i in range(steps):
        level, own = np.exp(0.3 * rng.standard_normal()), np.exp(noise * rng.standard_normal(9))
        sizes = {name: level * own[j] / 10**j for j, name in enumerate(names)}
        stream.append({k: np.float32([change(i, k, x)]) for k, x in sizes.items()})
    return stream


ONES = {name: np.ones(1, "f") for name in ("big", "mid", "small")}


def watched(stream, tx=None, **options):
    """The incidents of a run of SGD, each leaf by itself."""
    tx = gcx.watch(optax.sgd(1e-3) if tx is None else tx, max_incidents=64, **options)
    return gcx.incidents(run(tx, stream, ONES))


@pytest.mark.parametrize("at", [20, 80])
def test_a_leaf_that_rises_is_named_with_its_true_factor_though_the_norm_is_usual(at):
    factor = 30 if at == 20 else 10
    stream = noisy(at + 5, lambda i, k, x: x * factor if (i, k) == (at, "small") else x)
    (incident,) = watched(stream)
    assert (incident.step, incident.kinds, incident.leaf) == (at, ("leaf",), "small")
    assert incident.leaf_rise == pytest.approx(factor, rel=0.3)
    assert "times its usual value relative to the other leaves" in str(incident)
    assert watched(stream, spike_threshold=np.inf) == []


def test_clean_noise_is_no_incident():
    assert watched(noisy(3000, noise=0.5)) == []


@pytest.mark.parametrize(("at", "found"), [(14, []), (17, [17])])
def test_there_is_no_threshold_before_step_16(at, found):
    stream = noisy(at + 1, lambda i, k, x: x * 1e3 if i == at else x)
    assert [x.step for x in watched(stream)] == found


@pytest.mark.parametrize("at", [16, 40, 100])
def test_an_early_loss_far_above_all_earlier_ones_is_an_incident(at):
    rng = np.random.default_rng(at)
    # Falls from 100 to 0.3 within 30 steps.
    losses = (0.3 + 100 * np.exp(-np.arange(at + 2) / 4)) * np.exp(
        0.1 * rng.standard_normal(at + 2)
    )
    losses[at] = 10 * losses.max() if at < 20 else 695.0
    state = run(gcx.watch(optax.sgd(1e-3)), noisy(at + 2), ONES, losses)
    assert [(x.step, x.kinds) for x in gcx.incidents(state)] == [(at, ("loss",))]


@pytest.mark.parametrize("length", [1, 40])
def test_a_leaf_whose_gradient_becomes_zero_is_named_once(length):
    dead = lambda i, k, x: 0 * x if k == "mid" and 100 <= i < 100 + length else x  # noqa: E731
    found = [x for x in watched(noisy(160, dead)) if "zero" in x.kinds]
    assert [x.leaf for x in found] == ["mid"] * (length > 1)  # a single zero may be a coincidence
    if found:
        assert found[0].step < 110
        assert str(found[0]).endswith("the gradient of mid has become zero; loss 3")


def test_a_leaf_that_is_often_zero_is_not_dead():
    rng = np.random.default_rng(1)
    is_zero = rng.random(2000) < 0.5
    stream = noisy(2000, lambda i, k, x: 0 * x if k == "mid" and is_zero[i] else x)
    assert watched(stream) == []
    stream = noisy(2000, lambda i, k, x: 0 * x if k == "mid" and (is_zero[i] or i > 1500) else x)
    assert [(x.kinds, x.leaf) for x in watched(stream)] == [(("zero",), "mid")]


def test_a_whole_gradient_of_zero_is_an_incident_at_once():
    (incident,) = watched(noisy(60, lambda i, k, x: 0 * x if i == 40 else x))
    assert (incident.step, incident.kinds) == (40, ("zero",))
    assert str(incident) == "step 40: applied, gradient zero; loss 3"


@pytest.mark.parametrize("rate", [1.01, 1.03])
def test_a_slow_drift_of_a_leaf_is_noticed_within_a_factor_of_30(rate):
    drift = lambda i, k, x: x * rate ** max(i - 300, 0) if k == "mid" else x  # noqa: E731
    found = [x for x in watched(noisy(700, drift)) if "drift" in x.kinds]
    assert found[0].leaf == "mid" and rate ** (found[0].step - 300) < 30
    assert "gradient norm of mid has slowly risen" in str(found[0])


def test_a_leaf_that_changes_early_in_training_has_not_drifted():
    early = lambda i, k, x: x * 12 ** np.clip((i - 70) / 80, 0, 1) if k == "mid" else x  # noqa: E731
    assert not [x for x in watched(noisy(700, early)) if "drift" in x.kinds]


def test_one_step_of_a_hundredfold_learning_rate_is_noticed_at_that_step():
    def rate(count):
        return jnp.where(count == 70, 1e-1, 1e-3)

    (incident,) = watched(noisy(75), optax.sgd(rate))
    assert (incident.step, incident.kinds) == (70, ("update",))
    assert incident.update_norm > incident.update_threshold
    assert "update norm" in str(incident) and " above " in str(incident)


def test_a_parameter_that_jumped_is_named():
    tx = gcx.watch(optax.sgd(1e-3))
    stream = noisy(40)

    def step(carry, given):
        params, state = carry
        i, grads = given
        params = params | {"mid": jnp.where(i == 30, -1e20, params["mid"])}
        _, state = tx.update(grads, state, params)
        return (params, state), None

    stacked = jax.tree.map(lambda *xs: np.stack(xs), *stream)
    carry = (ONES, tx.init(ONES))
    (_, state), _ = jax.lax.scan(step, carry, (jnp.arange(40), stacked))
    first = gcx.incidents(state)[0]
    assert (first.step, first.leaf) == (30, "mid") and "parameter" in first.kinds
    assert "parameter norm of mid" in str(first)


def test_a_streak_keeps_its_first_and_its_last_incident_with_a_count():
    tx = gcx.watch(optax.sgd(1.0), of=("gradient",), max_incidents=4)
    sizes = [1.0, np.inf, *[np.nan] * 50]
    state = run(tx, [{"w": np.float32([x])} for x in sizes], {"w": np.ones(1, "f")})
    cause, first, last = gcx.incidents(state)
    assert (cause.step, cause.kinds) == (1, ("infinity",))
    assert (first.step, first.streak) == (2, 1)
    assert (last.step, last.streak, last.first_step) == (51, 50, 2)
    assert str(last).endswith("; 50 times since step 2")
    assert gcx.metrics(state)["incident_count"] == 51


@pytest.mark.parametrize(
    ("wrap", "kinds"),
    [
        (lambda tx: optax.apply_if_finite(tx, 5), ("nan", "unchanged")),
        (lambda tx: gcx.skip_nonfinite(tx), ("nan", "skipped")),
    ],
)
def test_a_step_that_any_wrapper_skipped_did_not_change_the_parameters(wrap, kinds):
    tx = gcx.watch(wrap(optax.sgd(0.1)))
    params = {"w": jnp.ones(1)}
    _, state = tx.update({"w": jnp.array([np.nan])}, tx.init(params), params)
    (incident,) = gcx.incidents(state)
    assert incident.kinds == kinds and gcx.metrics(state)["has_updated"] == 0
    _, state = tx.update({"w": jnp.array([1.0])}, state, params)
    assert gcx.metrics(state)["has_updated"] == 1


def test_held_steps_of_optax_multi_steps_are_not_steps():
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    tx = gcx.watch(inner)
    params = {"w": jnp.ones(1)}
    state, rows = tx.init(params), []
    for size in (2.0, 4.0, 8.0):
        _, state = tx.update({"w": jnp.array([size])}, state, params)
        rows.append(int(gcx.metrics(state)["has_updated"]))
    assert rows == [0, 1, 0] and gcx.incidents(state) == []


def test_a_watch_inside_a_guard_repeats_no_norm_of_an_earlier_step():
    tx = gcx.skip_nonfinite(gcx.watch(optax.sgd(0.1)))
    params = {"w": jnp.ones(1)}
    _, state = tx.update({"w": jnp.array([2.0])}, tx.init(params), params)
    assert gcx.metrics(state)["gradient_norm"] == 2
    _, state = tx.update({"w": jnp.array([np.nan])}, state, params)
    found = gcx.metrics(state)
    assert found["gradient_norm"] == found["update_norm/w"] == found["update_ratio"] == -1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_update_norm_is_that_of_what_is_added(dtype):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal(1000), dtype)}
    grads = {"w": jnp.asarray(rng.standard_normal(1000), dtype)}
    tx = gcx.watch(optax.sgd(2e-4 if dtype == "float16" else 1e-3))

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    after, state = step(grads, tx.init(params), params)
    added = np.float64(after["w"]) - np.float64(params["w"])
    assert gcx.metrics(state)["update_norm"] == pytest.approx(norm64(added), rel=1e-3)


def test_jax_debug_nans_does_not_stop_a_finite_run():
    params = {"w": jnp.ones(2)}
    guarded = gcx.watch(gcx.skip_large_norm(optax.sgd(0.1), 10.0))
    with jax.debug_nans(True):
        state = guarded.init(params)
        for size in (1.0, 1e3):
            _, state = jax.jit(guarded.update)({"w": jnp.full(2, size)}, state, params)
            gcx.metrics(state)
        _, state = guarded.update({"w": jnp.ones(2)}, state, params, measure=False)
        gcx.metrics(state)
    assert [x.kinds for x in gcx.incidents(state)] == [("norm", "skipped")]


def test_an_integer_loss_is_a_loss():
    tx = gcx.watch(optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    _, state = tx.update(params, tx.init(params), params, value=3)
    assert gcx.incidents(state) == []
    with pytest.raises(TypeError, match="watch: `value` must be"):
        tx.update(params, state, params, value=1j)


def test_a_finite_update_with_squares_that_overflow_is_not_called_nonfinite():
    tx = gcx.watch(optax.scale(1e30))
    params = {"a": np.ones(1, "f"), "b": np.ones(1, "f")}
    grads = {"a": jnp.float32([1.0]), "b": jnp.float32([0.0])}
    _, state = tx.update(grads, tx.init(params), params)
    (incident,) = gcx.incidents(state)
    assert (incident.kinds, incident.leaf) == (("update",), "a")
    assert "update norm above 1e25 in a" in str(incident)


def test_an_incident_is_strict_json():
    import json

    tx = gcx.watch(optax.sgd(1.0), of=("gradient",))
    state = run(tx, [{"w": np.float32([x])} for x in (1, np.inf, np.nan)], {"w": np.ones(1, "f")})
    for incident in gcx.incidents(state):
        text = json.dumps(incident.to_dict(), allow_nan=False)
        row = json.loads(text)
        assert row["step"] == incident.step and row["sentence"] == str(incident)
        np.testing.assert_equal(float(row["norm"]), incident.norm)


def test_the_loss_is_the_extra_argument_that_guards_take():
    tx = gcx.watch(optax.sgd(1e-3), of=("gradient",))
    grads = {"w": jnp.ones(1)}
    _, state = tx.update(grads, tx.init(grads), grads, value=None, loss=jnp.float32(np.inf))
    assert [x.kinds for x in gcx.incidents(state)] == [("loss",)]
    with pytest.raises(TypeError, match="`loss` must be omitted if `value` is passed, got both"):
        tx.update(grads, state, grads, value=jnp.ones(()), loss=jnp.ones(()))


def test_a_spike_hides_no_other_and_a_lasting_rise_is_learned():
    tx = gcx.watch(optax.sgd(1e-3), of=("gradient",), max_incidents=1024)
    norms = [1 + 0.01 * (i % 7) for i in range(70)] + [1e4, 1.0, 1.0, 20.0] + [30.0] * 2000
    state = run(tx, [{"w": np.float32([x])} for x in norms], {"w": np.ones(1, "f")})
    found = gcx.incidents(state)
    # The spikes at 70 and 73 and the first steps of the new level are one streak.
    assert found[0].step == 70 and found[1].first_step == 70 and found[1].streak >= 3
    assert found[-1].step < 100  # the new level is usual soon


def test_the_guard_inside_says_by_what_threshold_it_skipped():
    tx = gcx.watch(gcx.skip_large_norm(optax.sgd(1e-3), 4.2))
    params = {"wi": np.ones(2, "f"), "wo": np.ones(1, "f")}
    grads = {"wi": np.float32([3.1e5, 0]), "wo": np.float32([5e4])}
    _, state = tx.update(grads, tx.init(params), params, value=3.2)
    (incident,) = gcx.incidents(state)
    assert incident.norm_threshold == pytest.approx(4.2)
    text = "step 0: skipped, gradient norm 3.1e5 above 4.2; 97 % of it in wi; loss 3.2"
    assert str(incident) == text


def grads_of(wi, wo):
    return {"wi": np.full((2, 3), wi, "f"), "wo": np.full(2, wo, "f")}


MATRICES = {"wi": np.ones((2, 3), "f"), "wo": np.ones(2, "f")}


def test_of_a_guard_against_nonfinite_steps_it_says_the_cause_of_each_skip():
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
    one_bad = grads_of(1, 1)
    one_bad["wi"][1, 2] = np.inf
    stream = [grads_of(1, 1), grads_of(1, np.nan), one_bad, grads_of(1, 1), grads_of(1e20, 1)]
    state = run(tx, stream, MATRICES, [3, 3, 3, np.nan, 3])
    nan, infinity, loss, squares = gcx.incidents(state)
    assert (nan.step, nan.kinds, nan.leaf) == (1, ("nan", "skipped"), "wo")
    assert (nan.bad_elements, nan.share) == (2, 1.0)
    assert (infinity.step, infinity.kinds, infinity.leaf) == (2, ("infinity", "skipped"), "wi")
    assert (loss.step, loss.kinds) == (3, ("loss", "skipped"))
    assert (squares.kinds, squares.leaf) == (("update", "skipped"), "wi")
    assert squares.norm == pytest.approx(6**0.5 * 1e20, rel=1e-5)
    assert str(nan) == "step 1: skipped, gradient norm NaN; 2 non-finite elements in wo; loss 3"


def test_of_a_guard_against_spikes_it_says_values_and_thresholds():
    tx = gcx.watch(gcx.skip_spikes(optax.sgd(1.0), norm=100.0, loss=4.0, update=50.0))
    stream = [grads_of(1, 1), grads_of(80, 0), grads_of(1, 1), grads_of(0, 40), grads_of(1, 1)]
    norm, loss, update = gcx.incidents(run(tx, stream, MATRICES, [3, 3, 5, 3, 3]))
    assert norm.kinds == ("norm", "skipped") and norm.norm_threshold == 100
    assert norm.norm == pytest.approx(80 * 6**0.5, rel=1e-6)
    assert loss.kinds == ("loss", "skipped") and (loss.loss, loss.loss_threshold) == (5, 4)
    assert update.kinds == ("update", "skipped") and update.update_threshold == 50
    assert update.update_norm == pytest.approx(40 * 2**0.5, rel=1e-6)
    assert str(update) == (
        "step 3: skipped, gradient norm 57; 100 % of it in wo; update norm 57 above 50; loss 3"
    )


def test_each_skip_of_nested_guards_is_one_incident():
    inner = gcx.skip_large_norm(optax.sgd(1.0), 10.0)
    stream = [grads_of(1, 1), grads_of(np.nan, 1), grads_of(90, 1), grads_of(1, 1)]
    tx = gcx.watch(gcx.skip_nonfinite(inner), spike_threshold=np.inf)
    state = run(tx, stream, MATRICES)
    assert [(x.step, x.kinds[0]) for x in gcx.incidents(state)] == [(1, "nan"), (2, "norm")]


def test_the_last_incidents_are_kept_oldest_first():
    tx = gcx.watch(optax.sgd(1.0), of=("gradient",), max_incidents=3)
    bad = [np.inf if i in (1, 11, 21, 31, 41) else 1.0 for i in range(50)]
    state = run(tx, [{"w": np.float32([x])} for x in bad], {"w": np.ones(1, "f")})
    assert [x.step for x in gcx.incidents(state)] == [21, 31, 41]
    assert gcx.metrics(state)["incident_count"] == 5
    assert state.incidents.rows.shape == (3, len(gcx.diagnostics.Incident._fields))


def test_an_update_that_is_not_finite_is_an_incident():
    tx = gcx.watch(optax.scale(1e38))
    params = {"w": np.ones(1, "f")}
    _, state = tx.update({"w": jnp.float32([1e5])}, tx.init(params), params)
    (incident,) = gcx.incidents(state)
    assert incident.kinds == ("update",) and "update norm above 1e25 in w" in str(incident)


def say(step, *kinds, norm=3.1, bound=4.2, **fields):
    return str(gcx.diagnostics.Incident(step, kinds, norm, bound, **fields))


def test_an_incident_reads_as_a_person_would_say_it():
    two = {"leaf": "h_7/wi", "share": 0.75, "second_leaf": "h_7/wo", "second_share": 0.25}
    assert say(3, "norm", norm=3.1e5) == "step 3: applied, gradient norm 3.1e5 above 4.2"
    assert say(3, "loss", loss=50.0, loss_threshold=4.1, **two) == (
        "step 3: applied, gradient norm 3.1; 75 % of it in h_7/wi, 25 % in h_7/wo; "
        "loss 50 above 4.1"
    )
    assert say(4, "nan", "skipped", norm=np.nan, bad_elements=8, loss=np.nan, **two) == (
        "step 4: skipped, gradient norm NaN; 8 non-finite elements, 75 % of them in h_7/wi, "
        "25 % in h_7/wo; loss NaN"
    )
    assert say(5, "infinity", "held", norm=np.inf, bad_elements=1, leaf="b") == (
        "step 5: held, gradient norm inf; 1 non-finite element in b"
    )
    assert say(0, "norm", "clipped", norm=1e-7, bound=1e-8).startswith(
        "step 0: clipped, gradient norm 1e-7 above 1e-8"
    )


# Where it runs


def test_seeds_are_watched_side_by_side():
    tx = gcx.watch(optax.sgd(0.1))
    params = {"w": np.ones((2, 3), "f")}
    grads = {"w": np.float32([[3, 4, 0], [np.nan, 0, 0]])}
    state = jax.vmap(tx.init)(params)
    _, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    found = gcx.metrics(state)
    np.testing.assert_array_equal(found["gradient_norm/w"], [5, np.nan])
    with pytest.raises(
        ValueError,
        match="incidents: `state` must be the state of one run, got one that was vmapped over 2",
    ):
        gcx.incidents(state)
    second = jax.tree.map(lambda x: x[1], state)
    assert [x.kinds for x in gcx.incidents(second)] == [("nan",)]


def test_in_shard_map_norms_are_those_of_the_whole_and_the_loss_is_the_mean():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = {"w": PartitionSpec("data"), "b": PartitionSpec()}
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
    params = {"w": np.ones((16, 3), "f"), "b": np.ones(3, "f")}
    grads = random_like(params)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, specs, PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    def step(params, grads, losses):
        return tx.update(grads, tx.init(params), params, value=losses[0])[1]

    state = step(params, grads, np.full(len(jax.devices()), 3.0, "f"))
    found = gcx.metrics(state)
    np.testing.assert_allclose(found["gradient_norm/w"], norm64(grads["w"]), rtol=1e-6)
    np.testing.assert_allclose(found["update_norm"], 0.1 * norm64(*grads.values()), rtol=1e-6)
    grads["w"][11, 1] = np.nan
    losses = np.arange(len(jax.devices()), dtype="f")
    (incident,) = gcx.incidents(step(params, grads, losses))
    assert incident.leaf == "w" and incident.loss == pytest.approx(losses.mean())


def test_a_device_with_other_parameters_is_named():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    tx = gcx.watch(optax.sgd(0.1), replica_axis="data", check_every=2)
    params = {"w": np.ones((4, 3), "f"), "b": np.ones(3, "f")}
    every = PartitionSpec("data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(every, PartitionSpec()), out_specs=PartitionSpec()
    )
    def step(factor, state):
        # Typed as replicated, and not the same on all devices.
        local = jax.lax.axis_index("data") * 0 + factor[0]
        same = jax.tree.map(lambda p: jax.lax.psum(p * local, "data") / 8, params)
        return tx.update(jax.tree.map(jnp.ones_like, same), state, same)[1]

    def spoil(state, factors):
        update = jax.pmap(lambda p, s: tx.update(p, s, p)[1], axis_name="data", in_axes=(0, None))
        copies = jax.tree.map(lambda p: factors.reshape(-1, *[1] * p.ndim) * p, params)
        return jax.tree.map(lambda x: x[0], update(copies, state))

    assert gcx.incidents(step(np.ones(8, "f"), tx.init(params))) == []
    state = spoil(tx.init(params), np.ones(8, "f"))
    assert gcx.incidents(state) == []
    factors = np.float32([1, 1, 1, 1.02, 1, 1, 1, 1])
    assert gcx.incidents(spoil(state, factors)) == []  # the second step is not checked
    (incident,) = gcx.incidents(spoil(tx.init(params), factors))
    assert incident.kinds == ("replica",) and incident.device == 3
    assert "the parameters on device 3 differ from those on the others" in str(incident)


@pytest.mark.parametrize("factor", [-1.0, 0.0])
def test_a_device_that_applied_another_gradient_is_named(factor):
    tx = gcx.watch(optax.sgd(0.1), replica_axis="data", check_every=1)
    params = {"w": np.arange(1.0, 13.0, dtype="f").reshape(4, 3), "b": np.ones(3, "f")}
    factors = np.ones(len(jax.devices()), "f")
    factors[5] = factor

    @functools.partial(jax.pmap, axis_name="data", in_axes=(0, None))
    def two_steps(factor, params):
        state = tx.init(params)
        for _ in range(2):
            grads = jax.tree.map(lambda p: p * factor, params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return state

    (incident,) = gcx.incidents(jax.tree.map(lambda x: x[0], two_steps(factors, params)))
    assert incident.step == 1 and incident.kinds == ("replica",) and incident.device == 5


def test_colliding_names_are_escaped_and_a_newline_breaks_nothing():
    tree = {"a/b": np.ones(1, "f"), "a": {"b": np.ones(2, "f")}, "c\nd": np.ones(1, "f")}
    tx = gcx.watch(optax.sgd(0.1))
    _, state = tx.update(tree, tx.init(tree), tree)
    names = gcx.diagnostics.unit_names(state)
    assert len(set(names)) == 3 and {"a/b", "a~1b"} <= set(names)
    assert len([k for k in gcx.metrics(state) if k.startswith("gradient_norm/")]) == 3
    haiku = {"mlp/~/linear_0": {"w": np.ones(2, "f")}}
    assert gcx.diagnostics.unit_names(tx.init(haiku)) == ["mlp/~/linear_0/w"]


def test_names_of_stacked_layers_in_nnx_and_equinox():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.lin = nnx.Param(jnp.ones((2, 3)))

    tx = gcx.watch(optax.sgd(0.1), granularity=gcx.granularities.layer(1))
    params = nnx.state(Model(), nnx.Param)
    assert gcx.diagnostics.unit_names(tx.init(params)) == ["lin_0", "lin_1"]
    lists = {"layers": [{"weight": np.ones((2, 3), "f")}, {"weight": np.ones((2, 3), "f")}]}
    assert gcx.diagnostics.unit_names(tx.init(lists)) == [
        *("layers/0/weight_0", "layers/0/weight_1", "layers/1/weight_0", "layers/1/weight_1"),
    ]


NO_SCATTER = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="JAX 0.7 writes no row of an array under explicit axes"
)


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=NO_SCATTER)])
def test_layers_that_are_sharded_have_norms_of_the_whole(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    grads = random_like({"h": np.ones((8, 4)), "out": np.ones((2, 8)), "b": np.ones(3)})
    params = {
        "h": place(grads["h"], "x"),
        "out": place(grads["out"], None, "x"),
        "b": place(grads["b"]),
    }
    tx = gcx.watch(optax.sgd(0.1), granularity=gcx.granularities.layer({"h": 1, "out": 0, "b": 0}))
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    found = gcx.metrics(state)
    for i in range(8):
        np.testing.assert_allclose(found[f"gradient_norm/h_{i}"], norm64(grads["h"][i]), rtol=1e-6)
    np.testing.assert_allclose(found["gradient_norm/out"], norm64(grads["out"]), rtol=1e-6)


def test_a_state_of_init_is_that_of_every_step_and_may_be_donated():
    tx = gcx.watch(gcx.skip_nonfinite(optax.adam(0.1)), granularity=STACKED)
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, value=1.0)[1], donate_argnums=1)
    state = tx.init(PARAMS)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for grads in (QUIET[0], spoilt(0, np.nan), QUIET[1]):
        state = update(grads, state, PARAMS)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    assert update._cache_size() == 1


def test_metrics_of_the_variables_of_nnx_are_the_same_inside_jit():
    from flax import nnx

    state = gcx.watch(optax.sgd(0.1)).init({"w": np.ones(2, "f")})
    boxed = jax.tree.map(nnx.Variable, state)  # as `nnx.Optimizer` keeps them
    assert jax.eval_shape(gcx.metrics, boxed).keys() == gcx.metrics(state).keys()


def test_metrics_inside_and_outside_jit_are_the_same():
    tx = gcx.watch(optax.sgd(0.1), granularity=STACKED)

    @jax.jit
    def step(grads, state):
        state = tx.update(grads, state, PARAMS)[1]
        return state, gcx.metrics(state)

    state, inside = step(QUIET[0], tx.init(PARAMS))
    outside = gcx.metrics(state)
    assert inside.keys() == outside.keys()
    for key, value in inside.items():
        np.testing.assert_allclose(value, outside[key], rtol=1e-6)


def test_a_checkpoint_holds_arrays_only_and_names_come_from_the_structure(tmp_path):
    from flax import serialization

    tx = gcx.watch(optax.sgd(0.1), granularity=STACKED)
    state = run(tx, [QUIET[0], spoilt(1, np.inf)])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    restored = serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))
    assert [str(x) for x in gcx.incidents(restored)] == [str(x) for x in gcx.incidents(state)]
    assert gcx.diagnostics.unit_names(restored) == gcx.diagnostics.unit_names(state)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: gcx.watch(optax.sgd),
            TypeError,
            "watch: `inner` must be an `optax.GradientTransformation`, got",
        ),
        (
            lambda: gcx.watch(optax.sgd(0.1), of=("gradient", "moment")),
            ValueError,
            "watch: `of` must be one of 'gradient', 'update', 'parameter', got 'moment'.",
        ),
        (
            lambda: gcx.watch(optax.sgd(0.1), spike_threshold=0),
            ValueError,
            "watch: `spike_threshold` must be a number > 0, got 0. OLMo-core uses 6; pass inf for none.",
        ),
        (
            lambda: gcx.watch(optax.sgd(0.1), max_incidents=0),
            ValueError,
            "watch: `max_incidents` must be an integer >= 1, got 0.",
        ),
        (
            lambda: gcx.watch(optax.sgd(0.1), max_incidents=None),
            TypeError,
            "watch: `max_incidents` must be",
        ),
        (lambda: gcx.watch(optax.sgd(0.1), of=None), TypeError, "watch: `of` must be"),
        (lambda: gcx.watch(optax.sgd(0.1), of="update"), TypeError, "watch: `of` must be"),
        (
            lambda: gcx.watch(optax.sgd(0.1)).update(
                PARAMS, gcx.watch(optax.sgd(0.1), of=("gradient",)).init(PARAMS), PARAMS
            ),
            ValueError,
            "watch: `state` must be the state of this `watch`",
        ),
        (
            lambda: gcx.watch(optax.sgd(0.1)).update(
                PARAMS, gcx.watch(optax.sgd(0.1)).init(PARAMS["decoder"]), PARAMS
            ),
            ValueError,
            "watch: `state` must be the state of this `watch`",
        ),
        (
            lambda: gcx.watch(optax.sgd(0.1)).update(
                PARAMS, gcx.watch(optax.sgd(0.1)).init(PARAMS)
            ),
            ValueError,
            "watch: `params` must be passed",
        ),
        (
            lambda: gcx.watch(optax.sgd(0.1), of=("gradient",)).update(
                PARAMS, gcx.watch(optax.sgd(0.1), of=("gradient",)).init(PARAMS), value=jnp.ones(2)
            ),
            TypeError,
            "watch: `value` must be a real scalar, got float32[2].",
        ),
        (
            lambda: gcx.incidents(optax.sgd(0.1).init(PARAMS)),
            TypeError,
            "incidents: `state` must be a state that keeps incidents, got tuple. "
            "Put `gcx.watch` around the optimizer.",
        ),
        (
            lambda: jax.jit(gcx.incidents)(gcx.watch(optax.sgd(0.1)).init(PARAMS)),
            TypeError,
            "incidents: `state` must be known on the host, got a tracer.",
        ),
    ],
)
def test_a_wrong_argument_is_named(build, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        build()


def test_what_is_not_watched_is_not_measured():
    def reads_params(of):
        tx = gcx.watch(optax.sgd(0.1), of=of)
        closed = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
        params = closed.jaxpr.invars[-len(jax.tree.leaves(PARAMS)) :]
        return any(x is v for eqn in closed.jaxpr.eqns for x in eqn.invars for v in params)

    assert not reads_params(("gradient",)) and reads_params(("gradient", "update"))
