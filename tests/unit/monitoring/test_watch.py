"""Rows of `watch`: norms by unit with names, and what became of each step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gradclip_jax as gcx
from accumulation_cases import taken
from gradclip_jax.monitoring._layout import Names, Outcome
from guard_cases import SHARDS, WHOLE, saturated, sharded

SGD = optax.sgd(1.0)


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype("f"), tree)


def norm64(*arrays):
    return np.sqrt(sum(np.sum(np.abs(np.asarray(x, np.complex128)) ** 2) for x in arrays))


def rows_of(tx, stream, params, **options):
    """The rows and names after a stream of `(gradients, extra arguments)`."""
    update, state = jax.jit(tx.update), tx.init(params)
    for grads, extra in stream:
        _, state = update(grads, state, params, **extra)
    monitor = gcx.Monitor(params, **options)
    return monitor.read(state).rows, monitor.names


def rows_of_sizes(tx, *stream):
    """The rows after gradients of one number each, with or without extra arguments."""
    stream = [x if isinstance(x, tuple) else (x, {}) for x in stream]
    stream = [({"w": np.float32([size])}, extra) for size, extra in stream]
    return rows_of(tx, stream, {"w": np.ones(1, "f")})[0]


def fates(rows):
    """The flags of each row without those that say what was measured."""
    names = [{x.name for x in Outcome(int(bits))} for bits in rows.outcome]
    return [{x.lower() for x in flags if not x.startswith("HAS_")} for flags in names]


def test_stacked_layers_have_norms_of_their_own_by_name():
    layers = {"attn": np.ones((3, 2), "f"), "mlp": {"wi": np.ones((3, 2, 2), "f")}}
    params = {"decoder": layers, "embed": np.full((4, 3), 0.5, "f")}
    granularity = gcx.granularities.layer({"decoder": 1, "embed": 0})
    tx, grads = gcx.watch(optax.sgd(0.1), granularity=granularity), random_like(params)
    rows, names = rows_of(tx, [(grads, {})], params, granularity=granularity)

    def expected(tree):
        stacks = {"attn": tree["decoder"]["attn"], "mlp/wi": tree["decoder"]["mlp"]["wi"]}
        norms = {f"decoder/{k}[{i}]": norm64(x[i]) for k, x in stacks.items() for i in range(3)}
        norms["embed"] = norm64(tree["embed"])
        assert list(norms) == list(names.units)
        return [norm64(*jax.tree.leaves(tree)), *norms.values()]

    # The update as it is added to the parameters, where a sum is rounded.
    updates = jax.tree.map(lambda p, g: (p - np.float32(0.1) * g) - p, params, grads)
    trees = grads, updates, params
    np.testing.assert_allclose(rows.norms[0], [expected(x) for x in trees], rtol=1e-6)


@pytest.mark.parametrize("axis", [None, 0])
def test_small_leaves_are_reduced_as_stacks(axis):
    granularity = "leaf" if axis is None else gcx.granularities.axis(axis)
    params = [np.ones(x, "f") for x in ((3,), (2, 3), (2**10 + 1,), (3,), (2, 3))]
    params += [np.float32(1)] * 2 * (axis is None)
    grads, tx = random_like(params), gcx.watch(SGD, granularity=granularity)

    @sharded((WHOLE, WHOLE), WHOLE)  # otherwise `jit` may shard the leaves
    def step(grads, params):
        return gcx.last_row(tx.update(grads, tx.init(params), params)[1])

    found = gcx.Monitor(params, granularity=granularity).read(step(grads, params)).rows.norms[0, 0]
    expected = [norm64(*grads), *(np.linalg.norm(np.atleast_1d(x), axis=axis) for x in grads)]
    np.testing.assert_allclose(found, np.hstack(expected), rtol=1e-6)
    programs = [str(jax.make_jaxpr(step)(n * grads, n * params)) for n in (2, 5)]
    assert programs[0].count("reduce_sum") == programs[1].count("reduce_sum")


PAIR = {"a": {"w": np.float32([[1, 2, 3], [4, 5, 6]])}, "b": np.float32([7, 8])}


@pytest.mark.parametrize(
    ("granularity", "tree", "names"),
    [
        ("global", PAIR, []),
        (gcx.granularities.group({"a": "body", "b": "head"}), PAIR, ["body", "head"]),
        (gcx.granularities.axis(0), PAIR, ["a/w[0]", "a/w[1]", "a/w[2]", "b"]),
        (gcx.granularities.layer(1), [PAIR["b"]], ["0[0]", "0[1]"]),
        ("leaf", {"a": {"w": PAIR["b"]}, "a/w": 3 * PAIR["b"]}, ["a/w", "a/w (2)"]),
        ("leaf", {"none": np.ones((0, 2), "f"), "value": np.ones(1, "f")}, ["value"]),
    ],
)
def test_units_of_any_granularity_and_tree_have_names_and_norms(granularity, tree, names):
    tx = gcx.watch(optax.identity(), granularity=granularity, of=())
    rows, found = rows_of(tx, [(tree, {})], tree, granularity=granularity)
    assert list(found.units) == names
    norms, total = rows.norms[0, 0], norm64(*jax.tree.leaves(tree))
    assert len(norms) == 1 + len(names) and not rows.norms[0, 1:].any()
    assert norms[0] == pytest.approx(total, rel=1e-6)
    assert not names or norm64(norms[1:]) == pytest.approx(total, rel=1e-6)


def test_the_checksum_differs_for_other_units_and_taps():
    names = [Names(("a", "b")), Names(("b", "a")), Names(("a",), (), ("b",)), Names(("a",), ("b",))]
    assert len({x.checksum for x in names}) == 4 and names[3].checksum == Names(("a",)).checksum


@pytest.mark.parametrize(("of", "measured"), [((), 1), (("gradient",), 1), (("update",), 3)])
def test_the_norms_of_the_update_and_of_the_parameters_are_measured_together(of, measured):
    tx, params = gcx.watch(SGD, of=of), {"w": jnp.ones(1)}
    rows = rows_of_sizes(tx, 3)
    flags = Outcome.HAS_GRADIENT, Outcome.HAS_UPDATE, Outcome.HAS_PARAMETER
    assert [bool(rows.has(x)[0]) for x in flags] == [i < measured for i in range(3)]
    assert rows.norms[0, :, 0].tolist() == [3, 3 * (measured > 1), measured > 2]
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params).jaxpr
    is_read = any(jaxpr.invars[-1] in eqn.invars for eqn in jaxpr.eqns)
    assert is_read == (measured > 1)


@pytest.mark.parametrize(
    ("inner", "sizes", "expected"),
    [
        (
            gcx.skip_nonfinite(
                gcx.skip_spikes(optax.chain(gcx.clip_by_global_norm(2.0), SGD), norm=10.0),
                max_consecutive_skips=2,
            ),
            [1, 0, 3, 11, np.nan, np.nan],
            [
                "applied",
                "applied",
                "applied clipped",
                "skipped skipped_large_norm",
                "skipped skipped_nonfinite guard_failed",
                "skipped skipped_nonfinite guard_failed",
            ],
        ),
        (
            gcx.accumulate_gradients(gcx.skip_spikes(SGD, norm=10.0), 2),
            [1, 3, 1, 100, 1],
            ["accumulated", "applied", "accumulated", "skipped skipped_large_norm", "accumulated"],
        ),
        (optax.MultiSteps(SGD, 2).gradient_transformation(), [2, 1], ["accumulated", "applied"]),
        (optax.apply_if_finite(SGD, 5), [np.nan, 1], ["skipped skipped_nonfinite", "applied"]),
    ],
)
def test_the_outcome_says_what_became_of_a_step(inner, sizes, expected):
    rows = rows_of_sizes(gcx.watch(inner), *sizes)
    assert fates(rows) == [set(x.split()) for x in expected]
    assert not rows.norms[~rows.has(Outcome.APPLIED), 1].any()


def test_a_step_of_some_parameters_is_a_step_though_those_of_an_accumulation_are_not():
    inner = optax.partition({"a": gcx.accumulate_gradients(SGD, 2), "b": SGD}, {"a": "a", "b": "b"})
    params = {"a": np.ones(1, "f"), "b": np.ones(1, "f")}
    assert fates(rows_of(gcx.watch(inner), [(params, {})], params)[0]) == [{"applied"}]


def test_thresholds_and_causes_of_all_guards_are_in_the_row():
    tx = gcx.watch(gcx.skip_spikes(gcx.skip_spikes(SGD, norm=10.0, loss=4.0), norm=100.0))
    rows = rows_of_sizes(tx, *((x, {"value": 3.0}) for x in (1, 50, 500)), (1, {"value": 5.0}))
    assert rows.limits.tolist() == [[10, 4]] * 4  # the smallest
    large = {"skipped", "skipped_large_norm"}
    assert fates(rows) == [{"applied"}, large, large, {"skipped", "skipped_large_loss"}]


def test_norms_around_a_loss_scale_are_those_of_unscaled_gradients():
    tx = gcx.watch(gcx.dynamic_loss_scale(SGD, init_scale=1024.0))
    rows = rows_of_sizes(tx, 3 * 1024)
    assert rows.norms[0, :2].tolist() == [[3, 3], [3, 3]]


def test_factors_of_each_clip_and_group_are_in_the_row():
    groups = gcx.clip_by_group_norm({"body": 1.0, "head": 8.0}, {"a": "body", "b": "head"})
    inner = optax.chain(gcx.clip_by_global_norm(10.0), groups, SGD)
    params = {"a": np.float32([4]), "b": np.float32([3])}
    rows, names = rows_of(gcx.watch(inner), [(params, {})], params)
    keys = ["clip_factor", "clip_factor/body", "clip_factor/head"]
    assert names.clips == tuple(keys) and rows.factors.tolist() == [[1, 0.25, 1]]


@pytest.mark.parametrize(
    ("wrap", "sizes", "expected"),
    [
        (functools.partial(gcx.accumulate_gradients, every=2), [2, 4, 8], [3]),
        (gcx.skip_nonfinite, [2, np.nan, 3], [2, 3]),
    ],
)
def test_a_wrapper_outside_that_holds_or_skips_leaves_no_row(wrap, sizes, expected):
    rows = rows_of_sizes(wrap(gcx.watch(SGD)), *sizes)
    assert rows.norms[:, 0, 0].tolist() == expected
    assert rows.step.tolist() == list(range(len(expected)))


@pytest.mark.parametrize("groups", ["w", "wv"], ids=["one accumulation", "two of a partition"])
def test_a_flush_has_no_gradient(groups):
    inner = dict.fromkeys(groups, gcx.accumulate_gradients(SGD, 4))
    tx = gcx.watch(optax.partition(inner, lambda params: {name: name for name in params}))
    stream = (2, {"value": 3.0}), (np.nan, {"weight": 0.0, "flush": True})
    stream = [({x: np.float32([size]) for x in groups}, extra) for size, extra in stream]
    rows, _ = rows_of(tx, stream, {x: np.ones(1, "f") for x in groups})
    assert rows.has(Outcome.HAS_GRADIENT).tolist() == [True, False]
    assert rows.norms[:, :2, 1].tolist() == [[2, 0], [0, 2]]
    assert rows.nonfinite[:, 0].tolist() == [0, 0] and rows.loss.tolist() == [3, 0]
    assert fates(rows) == [{"accumulated"}, {"applied"}]


def test_nonfinite_elements_are_counted_and_unchanged_parameters_have_no_update():
    params = {"a": np.float32([1, np.nan]), "b": np.float32([1, 1])}
    grads = {"a": np.float32([np.nan, 1]), "b": np.float32([-np.inf, np.inf])}
    rows, _ = rows_of(gcx.watch(gcx.skip_nonfinite(SGD)), [(grads, {})], params)
    assert rows.nonfinite[0].tolist() == [3, 1, 2]
    np.testing.assert_array_equal(rows.norms[0, 0], [np.nan, np.nan, np.inf])
    assert rows.norms[0, 1].tolist() == [0, 0, 0]


def test_apply_gradients_measures_the_parameters_of_a_skipped_step():
    tx, params = gcx.watch(gcx.skip_nonfinite(SGD)), {"w": np.float32([3.0])}
    grads = {"w": np.float32([np.nan])}
    _, state = jax.jit(functools.partial(gcx.apply_gradients, tx))(grads, tx.init(params), params)
    found = gcx.metrics(state)
    assert (found["parameter_norm"], found["update_norm"]) == (3, 0)


def test_a_mask_leaves_other_leaves_unmeasured_and_unchanged():
    params = {"w": np.float32([3.0]), "frozen": np.float32([1.0]), "count": np.int32([5])}
    grads = {"w": np.float32([4.0]), "frozen": np.float32([np.nan]), "count": np.int32([1])}
    tx = gcx.watch(optax.identity(), trainable={"w": True, "frozen": False, "count": False})
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates is grads
    rows, names = rows_of(tx, [(grads, {})], params, trainable=lambda x: {k: k == "w" for k in x})
    assert names.units == ("w",)
    assert rows.norms[0].tolist() == [[4, 4], [4, 4], [3, 3]]


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1), ("float16", 0), ("float16", 1e-4)])
@pytest.mark.sampled
def test_the_update_norm_is_that_of_what_is_added(dtype, scale):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(scale * rng.standard_normal(1000), dtype)}
    grads = {"w": jnp.asarray(rng.standard_normal(1000), dtype)}
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(2e-4 if dtype == "float16" else 1e-3)))

    for fast in (False, True):
        step = jax.jit(functools.partial(taken, tx, fast=fast))
        after, state = step(grads, tx.init(params), params)
        added = np.float64(after["w"]) - np.float64(params["w"])
        assert gcx.metrics(state)["update_norm"] == pytest.approx(norm64(added), rel=1e-3)


# Where it runs


@pytest.mark.slow
def test_in_shard_map_norms_are_those_of_the_whole_and_the_loss_is_the_mean():
    specs = {"w": SHARDS, "b": WHOLE}
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)), replica_axis="data")
    params = {"w": np.ones((16, 3), "f"), "b": np.ones(3, "f")}
    grads = random_like(params)
    grads["w"][11, 1] = np.nan

    @sharded((specs, specs, SHARDS), WHOLE)
    def step(params, grads, losses):
        state = tx.update(grads, tx.init(params), params, value=losses[0])[1]
        return tx.update(params, state, params, value=losses[0])[1]

    losses = np.arange(len(jax.devices()), dtype="f")
    rows = gcx.Monitor(params).read(step(params, grads, losses)).rows
    assert rows.nonfinite[0].tolist() == [1, 0, 1]
    np.testing.assert_allclose(rows.norms[0, 0, 1], norm64(grads["b"]), rtol=1e-6)
    np.testing.assert_allclose(rows.norms[1, 0], [51**0.5, 3**0.5, 48**0.5], rtol=1e-6)
    np.testing.assert_allclose(rows.norms[1, 1], rows.norms[1, 0] / 10, rtol=1e-6)
    np.testing.assert_allclose(rows.loss, losses.mean(), rtol=1e-6)
    assert not rows.has(Outcome.REPLICA_DIFFERS).any()


@pytest.mark.slow
def test_in_shard_map_an_update_that_inner_averages_counts_once():
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
    tx, params = gcx.watch(optax.chain(mean, optax.sgd(0.1))), np.array([3.0, 4.0], "f")
    grads = random_like(np.ones((len(jax.devices()), 2), "f"))

    @sharded((WHOLE, SHARDS), WHOLE)
    def step(params, grads):
        return tx.update(grads[0], tx.init(params), params)[1]

    names = ("grad_norm", "update_norm", "parameter_norm")
    found = [gcx.metrics(step(params, grads))[name] for name in names]
    np.testing.assert_allclose(found, [norm64(grads), norm64(0.1 * grads.mean(0)), 5], rtol=1e-5)


@pytest.mark.slow
def test_a_device_with_other_parameters_is_named_at_the_next_check():
    tx = gcx.watch(optax.sgd(0.1), of=(), replica_axis="data", check_every=2)
    params = {"w": np.ones((4, 3), "f"), "b": np.ones(3, "f")}

    @functools.partial(jax.pmap, axis_name="data", in_axes=(0, None))
    def update(factor, state):
        scaled = jax.tree.map(lambda x: factor * x, params)
        return tx.update(scaled, state, scaled)[1]

    state, other = tx.init(params), np.ones(len(jax.devices()), "f")
    other[3] = 1.02
    for factors in (np.ones_like(other), other, other):  # the second step is not checked
        state = jax.tree.map(lambda x: x[0], update(factors, state))
    rows = gcx.Monitor(params).read(state).rows
    assert rows.has(Outcome.REPLICA_DIFFERS).tolist() == [False, False, True]
    assert rows.device[2] == 3


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="JAX 0.7 does not reshard such rows")
def test_layers_that_are_sharded_over_explicit_axes_have_norms_of_the_whole():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    specs = {"h": PartitionSpec("x"), "out": PartitionSpec(None, "x"), "b": PartitionSpec()}
    grads = random_like({"h": np.ones((8, 4)), "out": np.ones((2, 8)), "b": np.ones(3)})
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in grads.items()}
    granularity = gcx.granularities.layer({"h": 1, "out": 0, "b": 0})
    tx = gcx.watch(optax.sgd(0.1), granularity=granularity)
    rows, names = rows_of(tx, [(placed, {})], placed, granularity=granularity)
    assert names.units == ("b", *(f"h[{i}]" for i in range(8)), "out")
    expected = [norm64(grads["b"]), *map(norm64, grads["h"]), norm64(grads["out"])]
    np.testing.assert_allclose(rows.norms[0, 0, 1:], expected, rtol=1e-6)


@pytest.mark.parametrize("clip", [gcx.clip_by_global_norm, gcx.clip_by_leaf_norm])
@pytest.mark.parametrize("last", [0.0, -3.0])
def test_a_schedule_that_takes_a_threshold_to_0_or_below_is_an_incident(clip, last):
    tx = gcx.watch(optax.chain(clip(lambda step: jnp.maximum(2.0 - step, last)), SGD))
    params = {"w": np.ones(2, "f")}
    update, state = jax.jit(tx.update), tx.init(params)
    for _ in range(20):
        _, state = update(params, state, params, value=jnp.float32(1.0))
    (incident,) = gcx.incidents(state, params)
    assert incident.kinds == ("clip",) and "16 gradients by 0" in str(incident)


def test_the_row_is_written_after_its_counter_saturates():
    tx, params = gcx.watch(SGD, history=4), {"w": np.ones(1, "f")}
    state = saturated(tx.init(params))
    for size in (1.0, 2.0):
        _, state = tx.update({"w": np.float32([size])}, state, params)
        assert gcx.metrics(state)["grad_norm"] == size


def test_a_micro_batch_that_a_guard_outside_skips_belongs_to_its_window():
    tx = gcx.watch(gcx.skip_spikes(gcx.accumulate_gradients(SGD, 3), norm=10.0))
    rows = rows_of_sizes(tx, 1, 100, 1, 1, 100, 1, 1, 1)
    is_open = rows.has(Outcome.ACCUMULATED).tolist()
    # Without another micro-batch, the window has not begun.
    assert is_open == [True, True, True, False, False, True, True, False]
    assert rows.has(Outcome.SKIPPED).tolist() == [i in (1, 4) for i in range(8)]
