"""Watching: norms unit by unit with names, what became of each step, and the incidents."""

import functools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gradclip_jax as gcx
from guard_cases import SHARDS, WHOLE, sharded

PARAMS = {
    "decoder": {"layers": {"attn": np.ones((3, 2), "f"), "mlp": {"wi": np.ones((3, 2, 2), "f")}}},
    "embed": np.full((4, 3), 0.5, "f"),
}
STACKED = gcx.granularities.layer({"decoder": 1, "embed": 0})
ONE = {"w": np.ones(1, "f")}


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


def of_sizes(sizes):
    """A stream of gradients of one number each."""
    return [{"w": np.float32([size])} for size in sizes]


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
    trees = {"gradient_norm": grads, "update_norm": updates, "parameter_norm": PARAMS}
    for key, tree in trees.items():
        ours = {k.partition("/")[2]: v for k, v in found.items() if k.startswith(key + "/")}
        assert ours == pytest.approx(expected_norms(tree), rel=1e-6)
        assert found[key] == pytest.approx(norm64(*jax.tree.leaves(tree)), rel=1e-6)
    for name, norm in expected_norms(updates).items():
        ratio = norm / expected_norms(PARAMS)[name]
        assert found[f"update_ratio/{name}"] == pytest.approx(ratio, rel=1e-6)


PAIR = {"a": {"w": np.float32([[1, 2, 3], [4, 5, 6]])}, "b": np.float32([7, 8])}
DENSE = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
TWO_MATRICES = [{"weight": np.ones((2, 3), "f")}, {"weight": np.ones((2, 3), "f")}]
ROWS_OF_TWO = [f"layers/{i}/weight_{j}" for i in range(2) for j in range(2)]
COLLIDING = {"a": {"b": np.ones(2, "f")}, "a/b": np.ones(1, "f"), "c\nd": np.ones(1, "f")}


@pytest.mark.parametrize(
    ("granularity", "tree", "names"),
    [
        ("global", PAIR, []),
        (gcx.granularities.group({"a": "body", "b": "head"}), PAIR, ["body", "head"]),
        (gcx.granularities.axis(0), PAIR, ["a/w_0", "a/w_1", "a/w_2", "b"]),
        (gcx.granularities.layer(1), PAIR, ["a/w_0", "a/w_1", "b_0", "b_1"]),
        (gcx.granularities.layer(1), {"layers": TWO_MATRICES}, ROWS_OF_TWO),
        (gcx.granularities.layer(1), nnx.state(DENSE, nnx.Param), ["kernel_0", "kernel_1"]),
        ("leaf", np.float32([3, 4]), ["array"]),
        ("leaf", {"mlp/~/linear_0": {"w": np.ones(2, "f")}}, ["mlp/~/linear_0/w"]),  # Haiku
        # Names that collide are escaped, and so is a newline.
        ("leaf", COLLIDING, ["a/b", "a~1b", r"c\nd"]),
    ],
)
def test_units_of_any_granularity_and_tree_have_names_and_norms(granularity, tree, names):
    tx = gcx.watch(optax.identity(), granularity=granularity)
    _, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
    assert gcx.diagnostics.unit_names(state) == names
    found = gcx.metrics(state)
    of_units = [float(x) for key, x in found.items() if key.startswith("gradient_norm/")]
    assert {f"gradient_norm/{name}" for name in names} <= found.keys()
    assert len(of_units) == len(names)
    total = norm64(*jax.tree.leaves(tree))
    assert found["gradient_norm"] == pytest.approx(total, rel=1e-6)
    assert not names or norm64(of_units) == pytest.approx(total, rel=1e-6)
    assert found["update_ratio"] == pytest.approx(1.0, rel=1e-6)


def test_each_of_many_leaves_has_its_norm():
    tx = gcx.watch(optax.identity(), of=("gradient",))
    tree = {f"w{i:03}": np.float32([i]) for i in range(130)}
    _, state = jax.jit(tx.update)(tree, tx.init(tree))
    found = gcx.metrics(state)
    assert [found[f"gradient_norm/{name}"] for name in tree] == list(range(130))


def test_the_largest_share_names_its_leaf():
    tx = gcx.watch(optax.sgd(0.1), of=("gradient",))
    grads = {"a": jnp.array([3.0]), "b": jnp.array([1.0]), "c": jnp.array([0.0])}
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    found = gcx.metrics(state)
    assert found["largest_share"] == pytest.approx(0.9, rel=1e-6)
    assert gcx.diagnostics.unit_names(state)[int(found["largest_share_index"])] == "a"
    assert "update_norm" not in found and "parameter_norm" not in found


@pytest.mark.parametrize(
    ("of", "found"), [((), 1), (("update",), 2), (("parameter",), 3), (("parameter", "update"), 3)]
)
def test_the_norm_of_the_parameters_includes_that_of_the_update(of, found):
    tx = gcx.watch(optax.sgd(0.1), of=of)
    _, state = jax.jit(tx.update)(ONE, tx.init(ONE), ONE)
    keys = ["gradient_norm", "update_norm", "parameter_norm", "update_ratio"]
    assert [key in gcx.metrics(state) for key in keys] == [found > i for i in (0, 1, 2, 2)]


def test_parameters_that_are_zero_have_a_ratio_of_zero():
    tx = gcx.watch(optax.sgd(1.0))
    params = {"w": jnp.zeros(2), "b": jnp.ones(2)}
    grads = {"w": jnp.ones(2), "b": jnp.ones(2)}
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    found = gcx.metrics(state)
    assert found["update_ratio/w"] == 0 and found["update_ratio/b"] == 1


SGD = optax.sgd(1.0)
IN_PAIRS = functools.partial(gcx.accumulate_gradients, every=2)


def steps_of(tx, sizes, *keys):
    """These metrics after each gradient of one number, and the incidents."""
    update, state, rows = jax.jit(tx.update), tx.init(ONE), []
    for grads in of_sizes(sizes):
        _, state = update(grads, state, ONE)
        found = gcx.metrics(state)
        np.testing.assert_equal(float(found["gradient_norm/w"]), float(found["gradient_norm"]))
        assert found["update_ratio"] == found["update_norm"]  # the norm of the parameters is 1
        rows.append([float(found[key]) for key in (*keys, "gradient_norm", "update_norm")])
    return rows, gcx.incidents(state)


@pytest.mark.parametrize(
    "inner",
    [gcx.accumulate_gradients(SGD, 2), optax.MultiSteps(SGD, 2).gradient_transformation()],
    ids=["accumulate_gradients", "MultiSteps"],
)
def test_a_held_step_has_no_update_and_is_no_incident(inner):
    rows, incidents = steps_of(gcx.watch(inner), [2, 4, 8], "has_updated")
    assert rows == [[0, 2, 0], [1, 4, 3], [0, 8, 0]] and incidents == []


@pytest.mark.parametrize(
    ("inner", "kinds"),
    [
        (optax.apply_if_finite(SGD, 5), ("nan", "held")),
        (gcx.skip_nonfinite(SGD), ("nan", "skipped")),
    ],
)
def test_a_step_that_any_wrapper_skipped_did_not_change_the_parameters(inner, kinds):
    rows, (incident,) = steps_of(gcx.watch(inner), [np.nan, 1], "has_updated")
    np.testing.assert_array_equal(rows, [[0, np.nan, 0], [1, 1, 1]])
    assert incident.kinds == kinds
    tx, bad = gcx.watch(gcx.skip_nonfinite(SGD)), {"w": np.float32([np.nan])}
    assert gcx.metrics(tx.update(bad, tx.init(bad), bad)[1])["has_updated"] == 0


@pytest.mark.parametrize(
    ("wrap", "sizes", "rows"),
    [
        (IN_PAIRS, [2, 4, 8], [[0, -1, -1], [1, 3, 3], [0, -1, -1]]),
        (gcx.skip_nonfinite, [2, np.nan], [[1, 2, 2], [0, -1, -1]]),
    ],
)
def test_nothing_is_measured_in_a_step_that_a_wrapper_outside_holds_or_skips(wrap, sizes, rows):
    assert steps_of(wrap(gcx.watch(SGD)), sizes, "has_updated") == (rows, [])


def test_a_step_of_some_parameters_is_a_step_though_those_of_a_guard_are_held():
    inner = optax.partition({"a": gcx.accumulate_gradients(SGD, 2), "b": SGD}, {"a": "a", "b": "b"})
    tx, params = gcx.watch(inner), {"a": np.ones(1, "f"), "b": np.ones(1, "f")}
    state = tx.init(params)
    for b in (np.inf, 0.0):
        grads = {"a": np.ones(1, "f"), "b": np.float32([b])}
        _, state = jax.jit(tx.update)(grads, state, params)
        assert gcx.metrics(state)["has_updated"] == 1
    (incident,) = gcx.incidents(state)
    assert "held" not in incident.kinds


@pytest.mark.parametrize("inside", [False, True])
def test_a_skipped_window_is_one_incident_and_later_held_steps_are_none(inside):
    if inside:
        inner = gcx.accumulate_gradients(gcx.skip_large_norm(SGD, 10.0), 2)
    else:
        inner = gcx.skip_nonfinite(gcx.accumulate_gradients(SGD, 2))
    bad = 100.0 if inside else np.nan
    state = run(gcx.watch(inner, spike_threshold=np.inf), of_sizes([1, bad, 1, 1, 1]), ONE)
    assert [(x.step, "skipped" in x.kinds) for x in gcx.incidents(state)] == [(1, True)]
    assert gcx.metrics(state)["incident_step"] == 1


def test_a_step_without_measurement_reports_minus_one_and_no_incident():
    tx = gcx.watch(SGD)
    good, bad = of_sizes([2, np.inf])
    update = jax.jit(tx.update, static_argnames="measure")
    _, state = update(good, tx.init(ONE), ONE)
    updates, state = update(bad, state, ONE, measure=False)
    found = gcx.metrics(state)
    assert np.isinf(updates["w"][0]) and found["watch_step"] == 2
    keys = ("gradient_norm", "update_norm/w", "update_ratio", "largest_share")
    assert all(found[key] == -1 for key in keys)
    assert gcx.incidents(state) == []


def test_what_is_not_watched_is_not_measured():
    def reads_params(of):
        tx = gcx.watch(optax.sgd(0.1), of=of)
        closed = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
        params = closed.jaxpr.invars[-len(jax.tree.leaves(PARAMS)) :]
        return any(x is v for eqn in closed.jaxpr.eqns for x in eqn.invars for v in params)

    assert not reads_params(("gradient",)) and reads_params(("gradient", "update"))


@pytest.mark.parametrize(
    ("dtype", "scale"), [("bfloat16", 1), ("float16", 1), ("float16", 0), ("float16", 1e-4)]
)
def test_the_update_norm_is_that_of_what_is_added(dtype, scale):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(scale * rng.standard_normal(1000), dtype)}
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
    tx = gcx.watch(gcx.skip_large_norm(optax.sgd(0.1), 10.0))
    with jax.debug_nans(True):
        state = tx.init(ONE)
        for grads in of_sizes([1, 1e3]):
            _, state = jax.jit(tx.update)(grads, state, ONE)
            gcx.metrics(state)
        _, state = tx.update(ONE, state, ONE, measure=False)
        gcx.metrics(state)
    assert [x.kinds for x in gcx.incidents(state)] == [("norm", "skipped")]


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


def unchanged(i, name, x):
    return x


def noisy(steps, change=unchanged, noise=0.05, names=("big", "mid", "small")):
    """Gradients of one number each, whose sizes differ by a factor of 10."""
    rng, stream = np.random.default_rng(0), []
    for i in range(steps):
        level, own = np.exp(0.3 * rng.standard_normal()), np.exp(noise * rng.standard_normal(9))
        sizes = {name: level * own[j] / 10**j for j, name in enumerate(names)}
        stream.append({k: np.float32([change(i, k, x)]) for k, x in sizes.items()})
    return stream


def times(factor, start, stop=np.inf, leaf=None):
    """Multiply one leaf, or all of them, by a factor in some of the steps."""
    return lambda i, name, x: x * (factor if start <= i < stop and leaf in (name, None) else 1)


def drifting(rate):
    return lambda i, name, x: x * rate ** max(i - 300, 0) if name == "mid" else x


def often_zero(dead_after=np.inf):
    is_zero = np.random.default_rng(1).random(2000) < 0.5
    return lambda i, name, x: 0 * x if name == "mid" and (is_zero[i] or i > dead_after) else x


def taking_turns(i, name, x):
    """Leave a leaf untrained in every second phase of 50 steps, as in alternating training."""
    return 0 * x if name == "mid" and i >= 250 and i % 100 >= 50 else x


ONES = {name: np.ones(1, "f") for name in ("big", "mid", "small")}


def watched(stream, tx=None, **options):
    """The incidents of a run of SGD, each leaf by itself."""
    tx = gcx.watch(optax.sgd(1e-3) if tx is None else tx, max_incidents=64, **options)
    return gcx.incidents(run(tx, stream, ONES))


@pytest.mark.parametrize(
    ("steps", "change", "options"),
    [
        pytest.param(3000, unchanged, {"noise": 0.5}, id="noise"),
        pytest.param(15, times(1e3, 14), {}, id="spike in the first 16 steps"),
        pytest.param(160, times(0, 100, 101, "mid"), {}, id="one zero of a leaf"),
        pytest.param(2000, often_zero(), {}, id="leaf that is often zero"),
        pytest.param(
            700,
            lambda i, name, x: x * 12 ** np.clip((i - 70) / 80, 0, 1) if name == "mid" else x,
            {},
            id="leaf that rises early in training",
        ),
        pytest.param(
            1400,
            lambda i, name, x: x if name == "mid" else x * 0.997 ** max(i - 600, 0),
            {},
            id="leaf that is constant while the others decrease",
        ),
        pytest.param(
            400, lambda i, name, x: x * 1.03 ** max(i - 100, 0), {}, id="all leaves rise slowly"
        ),
    ],
)
def test_an_ordinary_run_has_no_incident(steps, change, options):
    assert watched(noisy(steps, change, **options)) == []


def test_a_leaf_without_elements_is_not_dead():
    tx, grads = gcx.watch(optax.sgd(0.1)), {"w": np.ones(3, "f"), "prefix": np.ones((0, 3), "f")}
    assert gcx.incidents(run(tx, [grads] * 20, grads)) == []


@pytest.mark.parametrize(
    ("steps", "change", "at", "kinds", "leaf", "words"),
    [
        (18, times(1e3, 17), range(17, 18), ("norm",), "big", "(threshold "),
        (60, times(0, 40, 41), range(40, 41), ("zero",), "big", "applied, gradient zero; loss 3"),
        (160, times(0, 100, 140, "mid"), range(101, 112), ("zero",), "mid", "mid has become zero"),
        (2000, often_zero(1500), range(1501, 1530), ("zero",), "mid", "mid has become zero"),
        (300, times(0, 0, 300), range(16, 17), ("zero",), "big", "applied, gradient zero; loss 3"),
        (300, times(0, 0, 300, "mid"), range(16, 19), ("zero",), "mid", "mid has become zero"),
        (3000, times(0, 10, 3000, "mid"), range(16, 28), ("zero",), "mid", "mid has become zero"),
        (3000, times(0, 40, 3000, "mid"), range(40, 53), ("zero",), "mid", "mid has become zero"),
        (2000, taking_turns, range(250, 270), ("zero",), "mid", "mid has become zero"),
        # Noticed before the drift reaches a factor of 30.
        (550, drifting(1.01), range(300, 550), ("drift",), "mid", "of mid has slowly risen"),
        (415, drifting(1.03), range(300, 415), ("drift",), "mid", "of mid has slowly risen"),
    ],
    ids=[
        *("spike", "zero", "dead leaf", "dead leaf, often zero before"),
        *("zero from the start", "dead from the start", "dead early", "dead late", "turns"),
        *("slow drift", "drift"),
    ],
)
def test_a_fault_is_one_incident_that_names_its_leaf(steps, change, at, kinds, leaf, words):
    (incident,) = watched(noisy(steps, change))
    assert (incident.kinds, incident.leaf) == (kinds, leaf)
    assert incident.step in at and words in str(incident)


@pytest.mark.parametrize(("at", "factor"), [(20, 30), (80, 10)])
def test_a_leaf_that_rises_is_named_with_its_true_factor_though_the_norm_is_usual(at, factor):
    stream = noisy(at + 5, times(factor, at, at + 1, "small"))
    (incident,) = watched(stream)
    assert (incident.step, incident.kinds, incident.leaf) == (at, ("leaf",), "small")
    assert incident.leaf_rise == pytest.approx(factor, rel=0.3)
    assert "times more than those of other leaves" in str(incident)
    assert watched(stream, spike_threshold=np.inf) == []


@pytest.mark.parametrize("at", [16, 40, 100])
def test_an_early_loss_far_above_all_earlier_ones_is_an_incident(at):
    rng = np.random.default_rng(at)
    # Falls from 100 to 0.3 within 30 steps.
    falling = 0.3 + 100 * np.exp(-np.arange(at + 2) / 4)
    losses = falling * np.exp(0.8 * rng.standard_normal(at + 2))
    losses[at] = 10 * losses.max()
    state = run(gcx.watch(optax.sgd(1e-3)), noisy(at + 2), ONES, losses)
    assert [(x.step, x.kinds) for x in gcx.incidents(state)] == [(at, ("loss",))]


def test_units_that_are_rarely_used_and_parameters_that_cross_zero_are_no_incidents():
    rng = np.random.default_rng(0)
    rare = [3, 5] + [3 + int(i) for i in np.cumsum(rng.geometric(0.05, 90))]
    assert watched(noisy(2000, lambda i, k, x: x if k != "mid" or i in rare else 0 * x)) == []
    stream = [x | {"mid": x["mid"] - 0.01 * np.sin(i / 9)} for i, x in enumerate(noisy(1500))]
    start = ONES | {"mid": np.zeros(1, "f")}
    assert gcx.incidents(run(gcx.watch(optax.sgd(1e-3)), stream, start)) == []


@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_dead_leaf_is_reported_once_if_only_some_steps_are_measured(every):
    tx, found = gcx.watch(optax.sgd(1e-3)), []
    updates = [jax.jit(functools.partial(tx.update, measure=x)) for x in (False, True)]
    state = tx.init(ONES)
    for i, grads in enumerate(noisy(30 * every, times(0, 0, 300, "mid"))):
        _, state = updates[i % every == 0](grads, state, ONES)
    (found,) = gcx.incidents(state)
    assert (found.kinds, found.leaf) == (("zero",), "mid")


def test_a_leaf_whose_norm_is_higher_for_good_hides_no_fault_in_another():
    def change(i, k, x):
        return x * (1e8 if k == "big" and i >= 300 else 100 if (i, k) == (315, "small") else 1)

    found = [x for x in watched(noisy(316, change)) if x.step == 315]
    assert [("leaf" in x.kinds, x.leaf) for x in found] == [(True, "small")]


def test_the_leaf_that_rose_most_is_named():
    def change(i, k, x):
        return x * ({"big": 1e4, "mid": 1e3}.get(k, 1) if i == 100 else 1)

    (incident,) = watched(noisy(101, change))
    assert incident.leaf == "big" and 1e3 < incident.leaf_rise < 1e4


def test_a_second_fault_in_the_same_step_does_not_get_the_name_of_the_first():
    (alone,) = watched(noisy(130, times(0, 100, 130, "mid")))

    def change(i, k, x):
        if k == "mid":
            return x * (i < 100)
        return x * 1e3 if (i, k) == (alone.step, "big") else x

    (both,) = watched(noisy(alone.step + 1, change))
    assert (both.leaf, both.kinds) == ("big", ("norm", "leaf", "zero"))
    assert "the gradient of another leaf has become zero" in str(both)


def test_a_loss_that_is_usually_zero_has_no_threshold_of_zero():
    losses = np.zeros(40)
    losses[30:] = 0.01
    assert gcx.incidents(run(gcx.watch(optax.sgd(1e-3)), noisy(40), ONES, losses)) == []


def test_an_outlier_of_a_negative_loss_is_an_incident():
    losses = -100 + np.random.default_rng(0).standard_normal(72)
    losses[70] = -50
    state = run(gcx.watch(optax.sgd(1e-3)), noisy(72), ONES, losses)
    assert [(x.step, x.kinds) for x in gcx.incidents(state)] == [(70, ("loss",))]


def test_one_step_of_a_hundredfold_learning_rate_is_noticed_at_that_step():
    def rate(count):
        return jnp.where(count == 70, 1e-1, 1e-3)

    (incident,) = watched(noisy(75), optax.sgd(rate))
    assert (incident.step, incident.kinds) == (70, ("update",))
    assert incident.update_norm > incident.update_threshold
    assert re.search(r"; update norm \S+ \(threshold \S+\); loss", str(incident))  # of all leaves


@pytest.mark.parametrize(
    ("leaves", "value", "change", "kinds", "words"),
    [
        (("mid",), -1e20, unchanged, ("parameter",), "parameter norm of mid rose 1e20 times"),
        (ONES, 100.0, unchanged, ("jump",), "; parameter norm rose to 1.7e2"),
        (ONES, 100.0, times(1e3, 30, leaf="mid"), ("leaf", "jump"), "; gradient norm of mid rose"),
        (ONES, 1e8, unchanged, ("unchanged", "jump"), "; parameter norm rose to 1.7e8"),
    ],
)
def test_a_parameter_that_jumped_is_named(leaves, value, change, kinds, words):
    tx = gcx.watch(optax.sgd(1e-3))
    update = jax.jit(tx.update)
    state = tx.init(ONES)
    for i, grads in enumerate(noisy(31, change)):
        params = ONES if i < 30 else ONES | dict.fromkeys(leaves, np.float32([value]))
        _, state = update(grads, state, params)
    (incident,) = gcx.incidents(state)
    assert incident.step == 30 and set(kinds) <= set(incident.kinds) and words in str(incident)


@pytest.mark.parametrize("fault", [(), (150,)])
def test_a_call_that_only_flushes_has_no_gradient(fault):
    tx = gcx.watch(gcx.accumulate_gradients(SGD, 4))
    update, state = jax.jit(tx.update), tx.init(ONES)
    padding = dict.fromkeys(ONES, np.float32([np.nan]))
    flush = functools.partial(update, padding, weight=0.0, flush=True)
    for i, grads in enumerate(noisy(160, times(0, 150, 151) if fault else unchanged)):
        _, state = update(grads, state, ONES)
        if i % 42 == 41:
            _, state = flush(state, ONES)
            rows = gcx.metrics(state)
            assert (rows["gradient_norm/big"], rows["has_updated"]) == (-1, 1)
    assert [x.step - 3 for x in gcx.incidents(state)] == list(fault)
    _, state = update(jax.tree.map(lambda x: 1e3 * x, ONES), state, ONES)
    incident = gcx.incidents(flush(state, ONES)[1])[-1]
    assert (incident.norm, incident.kinds) == (None, ("update",))
    assert "applied, no gradient; update norm" in str(incident)


def test_a_streak_keeps_its_first_and_its_last_incident_with_a_count():
    tx = gcx.watch(SGD, of=("gradient",), max_incidents=4)
    state = run(tx, of_sizes([1.0, np.inf, *[np.nan] * 50]), ONE)
    cause, first, last = gcx.incidents(state)
    assert (cause.step, cause.kinds) == (1, ("infinity",))
    assert (first.step, first.streak) == (2, 1)
    assert (last.step, last.streak, last.first_step) == (51, 50, 2)
    assert str(last).endswith("; 50 times since step 2")
    assert gcx.metrics(state)["incident_count"] == 51


def test_the_last_incidents_are_kept_oldest_first():
    tx = gcx.watch(SGD, of=("gradient",), max_incidents=3)
    bad = [np.inf if i in (1, 11, 21, 31, 41) else 1.0 for i in range(50)]
    state = run(tx, of_sizes(bad), ONE)
    assert [x.step for x in gcx.incidents(state)] == [21, 31, 41]
    assert gcx.metrics(state)["incident_count"] == 5


@pytest.mark.slow
def test_a_spike_hides_no_other_and_a_lasting_rise_is_learned():
    tx = gcx.watch(optax.sgd(1e-3), of=("gradient",), max_incidents=1024)
    norms = [1 + 0.01 * (i % 7) for i in range(70)] + [1e4, 1.0, 1.0, 20.0] + [30.0] * 2000
    found = gcx.incidents(run(tx, of_sizes(norms), ONE))
    # The spikes at 70 and 73 and the first steps of the new level are one streak.
    assert found[0].step == 70 and found[1].first_step == 70 and found[1].streak >= 3
    assert found[-1].step < 100  # the new level is usual soon


def test_the_loss_is_the_extra_argument_that_guards_take():
    tx = gcx.watch(optax.sgd(1e-3), of=("gradient",))
    update, state = jax.jit(tx.update), tx.init(ONE)
    _, state = update(ONE, state, ONE, value=3)
    assert gcx.incidents(state) == []
    _, state = update(ONE, state, ONE, value=None, loss=np.float32(np.inf))
    assert [x.kinds for x in gcx.incidents(state)] == [("loss",)]


@pytest.mark.parametrize(("scale", "size"), [(1e38, 1e5), (1e30, 1.0)])
def test_an_update_of_which_the_norm_overflows_is_an_incident(scale, size):
    tx = gcx.watch(optax.scale(scale))
    params = {"a": np.ones(1, "f"), "b": np.ones(1, "f")}
    grads = {"a": jnp.float32([size]), "b": jnp.float32([0.0])}
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    (incident,) = gcx.incidents(state)
    assert (incident.kinds, incident.leaf) == (("update",), "a")
    # Infinite, or finite with squares that overflow.
    assert "update norm above 5e21 in a" in str(incident)


def test_an_incident_is_strict_json():
    tx = gcx.watch(SGD, of=("gradient",))
    for incident in gcx.incidents(run(tx, of_sizes([1, np.inf, np.nan]), ONE)):
        row = json.loads(json.dumps(incident.to_dict(), allow_nan=False))
        assert row["step"] == incident.step and row["sentence"] == str(incident)
        np.testing.assert_equal(float(row["norm"]), incident.norm)


def grads_of(wi, wo):
    return {"wi": np.full((2, 3), wi, "f"), "wo": np.full(2, wo, "f")}


MATRICES = {"wi": np.ones((2, 3), "f"), "wo": np.ones(2, "f")}


def test_of_a_guard_against_nonfinite_steps_it_says_the_cause_of_each_skip():
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
    stream = [grads_of(1, 1), grads_of(1, np.nan), grads_of(1, 1), grads_of(1e20, 1)]
    nan, loss, squares = gcx.incidents(run(tx, stream, MATRICES, [3, 3, np.nan, 3]))
    assert str(nan) == "step 1: skipped, gradient norm NaN; 2 non-finite elements in wo; loss 3"
    assert (loss.step, loss.kinds) == (2, ("loss", "skipped"))
    assert (squares.kinds, squares.leaf) == (("update", "skipped"), "wi")
    assert squares.norm == pytest.approx(6**0.5 * 1e20, rel=1e-5)


def test_of_a_guard_against_spikes_it_says_values_and_thresholds():
    tx = gcx.watch(gcx.skip_spikes(SGD, norm=100.0, loss=4.0))
    stream = [grads_of(1, 1), grads_of(80, 0), grads_of(1, 1), grads_of(1, 1)]
    norm, loss = gcx.incidents(run(tx, stream, MATRICES, [3, 3, 5, 3]))
    assert norm.kinds == ("norm", "skipped") and norm.norm_threshold == 100
    assert norm.norm == pytest.approx(80 * 6**0.5, rel=1e-6)
    assert loss.kinds == ("loss", "skipped") and (loss.loss, loss.loss_threshold) == (5, 4)


def test_each_skip_of_nested_guards_is_one_incident_with_the_threshold_of_its_guard():
    inner = gcx.skip_large_norm(SGD, 10.0)
    stream = [grads_of(1, 1), grads_of(np.nan, 1), grads_of(90, 1), grads_of(1, 1)]
    tx = gcx.watch(gcx.skip_nonfinite(inner), spike_threshold=np.inf)
    nan, norm = gcx.incidents(run(tx, stream, MATRICES))
    assert (nan.step, nan.kinds) == (1, ("nan", "skipped"))
    assert (norm.step, norm.kinds, norm.norm_threshold) == (2, ("norm", "skipped"), 10)


def say(*kinds, norm=3.1, **fields):
    return str(gcx.diagnostics.Incident(3, kinds, norm, **fields))


def test_an_incident_reads_as_a_person_would_say_it():
    two = {"leaf": "h_7/wi", "share": 0.75, "second_leaf": "h_7/wo", "second_share": 0.25}
    assert say("norm", "clipped", norm=5e-7, norm_threshold=1e-8) == (
        "step 3: clipped, gradient norm 5e-7 (threshold 1e-8)"
    )
    assert say("loss", loss=50.0, loss_threshold=4.1, **two) == (
        "step 3: applied, gradient norm 3.1; 75 % of it in h_7/wi, 25 % in h_7/wo; "
        "loss 50 (threshold 4.1)"
    )
    assert say("nan", "skipped", norm=np.nan, bad_elements=8, loss=np.nan, **two) == (
        "step 3: skipped, gradient norm NaN; 8 non-finite elements, 75 % of them in h_7/wi, "
        "25 % in h_7/wo; loss NaN"
    )
    assert say("infinity", "held", norm=np.inf, bad_elements=1, leaf="b") == (
        "step 3: held, gradient norm inf; 1 non-finite element in b"
    )


# Where it runs


@pytest.mark.slow
def test_in_shard_map_norms_are_those_of_the_whole_and_the_loss_is_the_mean():
    specs = {"w": SHARDS, "b": WHOLE}
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)), replica_axis="data")
    params = {"w": np.ones((16, 3), "f"), "b": np.ones(3, "f")}
    grads = random_like(params)

    @sharded((specs, specs, SHARDS), WHOLE)
    def step(params, grads, losses):
        return tx.update(grads, tx.init(params), params, value=losses[0])[1]

    losses = np.arange(len(jax.devices()), dtype="f")
    state = step(params, grads, losses)
    assert gcx.incidents(state) == []
    found = gcx.metrics(state)
    np.testing.assert_allclose(found["gradient_norm/w"], norm64(grads["w"]), rtol=1e-6)
    np.testing.assert_allclose(found["update_norm"], 0.1 * norm64(*grads.values()), rtol=1e-6)
    grads["w"][11, 1] = np.nan
    (incident,) = gcx.incidents(step(params, grads, losses))
    assert incident.leaf == "w" and incident.loss == pytest.approx(losses.mean())


@pytest.mark.slow
def test_a_device_with_other_parameters_is_named_at_the_next_check():
    tx = gcx.watch(optax.sgd(0.1), replica_axis="data", check_every=2)

    @functools.partial(jax.pmap, axis_name="data", in_axes=(0, None))
    def update(factor, state):
        params = {"w": factor * np.ones((4, 3), "f"), "b": factor * np.ones(3, "f")}
        return tx.update(params, state, params)[1]

    def step(factors, state):
        return jax.tree.map(lambda x: x[0], update(factors, state))

    equal, other = np.ones((2, len(jax.devices())), "f")
    other[3] = 1.02
    state = step(equal, tx.init({"w": np.ones((4, 3)), "b": np.ones(3)}))
    assert gcx.incidents(step(other, state)) == []  # the second step is not checked
    (incident,) = gcx.incidents(step(other, tx.init({"w": np.ones((4, 3)), "b": np.ones(3)})))
    assert incident.kinds == ("replica",) and incident.device == 3
    assert "the parameters on device 3 differ from those on the others" in str(incident)


NO_SCATTER = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="JAX 0.7 writes no row of an array under explicit axes"
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=NO_SCATTER)])
def test_layers_that_are_sharded_have_norms_of_the_whole(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    specs = {"h": PartitionSpec("x"), "out": PartitionSpec(None, "x"), "b": PartitionSpec()}
    grads = random_like({"h": np.ones((8, 4)), "out": np.ones((2, 8)), "b": np.ones(3)})
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in grads.items()}
    tx = gcx.watch(optax.sgd(0.1), granularity=gcx.granularities.layer({"h": 1, "out": 0, "b": 0}))
    _, state = jax.jit(tx.update)(placed, tx.init(placed), placed)
    found = gcx.metrics(state)
    for i in range(8):
        np.testing.assert_allclose(found[f"gradient_norm/h_{i}"], norm64(grads["h"][i]), rtol=1e-6)
    np.testing.assert_allclose(found["gradient_norm/out"], norm64(grads["out"]), rtol=1e-6)


def test_metrics_inside_jit_and_of_the_variables_of_nnx_are_those_outside():
    tx = gcx.watch(optax.sgd(0.1), granularity=STACKED)

    @jax.jit
    def step(grads, state):
        state = tx.update(grads, state, PARAMS)[1]
        return state, gcx.metrics(state)

    state, inside = step(QUIET[0], tx.init(PARAMS))
    outside = gcx.metrics(state)
    chex.assert_trees_all_close(inside, outside, rtol=1e-6)
    boxed = jax.tree.map(nnx.Variable, state)  # as `nnx.Optimizer` keeps them
    assert jax.eval_shape(gcx.metrics, boxed).keys() == outside.keys()


def test_a_checkpoint_holds_arrays_only_and_names_come_from_the_structure():
    tx = gcx.watch(optax.sgd(0.1), granularity=STACKED)
    state = run(tx, [QUIET[0], spoilt(1, np.inf)])
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    restored = serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))
    assert [str(x) for x in gcx.incidents(restored)] == [str(x) for x in gcx.incidents(state)]
    assert gcx.diagnostics.unit_names(restored) == gcx.diagnostics.unit_names(state)
