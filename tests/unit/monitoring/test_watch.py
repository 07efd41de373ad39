"""Rows of `watch`: norms by unit with names, and what became of each step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gradclip_jax as gcx
from gradclip_jax.monitoring._rows import Outcome
from guard_cases import SHARDS, WHOLE, sharded

PARAMS = {
    "decoder": {"layers": {"attn": np.ones((3, 2), "f"), "mlp": {"wi": np.ones((3, 2, 2), "f")}}},
    "embed": np.full((4, 3), 0.5, "f"),
}
STACKED = gcx.granularities.layer({"decoder": 1, "embed": 0})
ONE = {"w": np.ones(1, "f")}
SGD = optax.sgd(1.0)


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype("f"), tree)


def norm64(*arrays):
    return np.sqrt(sum(np.sum(np.abs(np.asarray(x, np.complex128)) ** 2) for x in arrays))


def rows_of(tx, stream, params=ONE, **options):
    """The rows and names after a stream of `(gradients, extra arguments)`."""
    update, state = jax.jit(tx.update, static_argnames="measure"), tx.init(params)
    for grads, extra in stream:
        _, state = update(grads, state, params, **extra)
    monitor = gcx.Monitor(params, **options)
    return monitor.read(state).rows, monitor.names


def of_sizes(*sizes, **extra):
    """A stream of gradients of one number each."""
    return [({"w": np.float32([size])}, extra) for size in sizes]


def fates(rows):
    """The flags of each row without those that say what was measured."""
    names = [{x.name for x in Outcome(int(bits))} for bits in rows.outcome]
    return [{x.lower() for x in flags if not x.startswith("HAS_")} for flags in names]


def test_stacked_layers_have_norms_of_their_own_by_name():
    tx, grads = gcx.watch(optax.sgd(0.1), granularity=STACKED), random_like(PARAMS)
    rows, names = rows_of(tx, [(grads, {})], PARAMS, granularity=STACKED)

    def expected(tree):
        layers = tree["decoder"]["layers"]
        by_name = {
            **{f"decoder/layers_{i}/attn": norm64(layers["attn"][i]) for i in range(3)},
            **{f"decoder/layers_{i}/mlp/wi": norm64(layers["mlp"]["wi"][i]) for i in range(3)},
            "embed": norm64(tree["embed"]),
        }
        return [norm64(*jax.tree.leaves(tree)), *(by_name[name] for name in names.units)]

    # The update as it is added to the parameters, where a sum is rounded.
    updates = jax.tree.map(lambda p, g: (p - np.float32(0.1) * g) - p, PARAMS, grads)
    trees = grads, updates, PARAMS
    np.testing.assert_allclose(rows.norms[0], [expected(x) for x in trees], rtol=1e-6)


PAIR = {"a": {"w": np.float32([[1, 2, 3], [4, 5, 6]])}, "b": np.float32([7, 8])}
DENSE = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
TWO_MATRICES = [{"weight": np.ones((2, 3), "f")}, {"weight": np.ones((2, 3), "f")}]
ROWS_OF_TWO = [f"layers/{i}/weight_{j}" for i in range(2) for j in range(2)]
COLLIDING = {"a": {"b": np.ones(2, "f")}, "a/b": np.ones(1, "f")}
NAMELESS = {"": np.ones(1, "f"), "a": {"": np.ones(2, "f")}}


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
        ("leaf", COLLIDING, ["['a']/['b']", "['a/b']"]),
        ("leaf", NAMELESS, ["array", "a/"]),
        ("leaf", {"none": np.ones((0, 2), "f"), "w": np.ones(1, "f")}, ["w"]),
    ],
)
def test_units_of_any_granularity_and_tree_have_names_and_norms(granularity, tree, names):
    tx = gcx.watch(optax.identity(), granularity=granularity)
    rows, found = rows_of(tx, [(tree, {})], tree, granularity=granularity)
    assert list(found.units) == names
    norms, total = rows.norms[0, 0], norm64(*jax.tree.leaves(tree))
    assert len(norms) == 1 + len(names)
    assert norms[0] == pytest.approx(total, rel=1e-6)
    assert not names or norm64(norms[1:]) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize(
    ("of", "measured"), [((), 1), (("gradient",), 1), (("update",), 3), (("parameter",), 3)]
)
def test_the_norms_of_the_update_and_of_the_parameters_are_measured_together(of, measured):
    rows, _ = rows_of(gcx.watch(SGD, of=of), of_sizes(3))
    flags = Outcome.HAS_GRADIENT, Outcome.HAS_UPDATE, Outcome.HAS_PARAMETER
    assert [bool(rows.has(x)[0]) for x in flags] == [i < measured for i in range(3)]
    assert rows.norms[0, :, 0].tolist() == [3, 3 * (measured > 1), measured > 2]


def test_metrics_are_those_of_the_whole_tree():
    tx = gcx.watch(gcx.skip_nonfinite(SGD))
    params = {"a": jnp.zeros(2), "b": jnp.full(2, 5.0)}
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([0.0, 4.0])}
    state = tx.init(params)
    keys = gcx.metrics(state).keys()
    for _ in range(2):
        _, state = jax.jit(tx.update)(grads, state, params)
    found = jax.jit(gcx.metrics)(state)
    expected = {"gradient_norm": 5, "update_norm": 5, "parameter_norm": 50**0.5, "watch_step": 1}
    expected |= {"nonfinite_elements": 0, "update_ratio": 0.5**0.5}
    assert {x: float(found[x]) for x in expected} == pytest.approx(expected)
    assert found.keys() == keys and not any("/" in key for key in keys)


@pytest.mark.parametrize(
    ("inner", "sizes", "expected"),
    [
        (SGD, [1, 0], [{"applied"}, {"applied"}]),
        (optax.chain(gcx.clip_by_global_norm(1.0), SGD), [1, 3], [{"applied"}, {"applied", "clipped"}]),
        (gcx.accumulate_gradients(SGD, 2), [2, 4, 8], [{"held"}, {"applied"}, {"held"}]),
        (
            gcx.skip_nonfinite(SGD),
            [1, np.nan],
            [{"applied"}, {"skipped", "skipped_nonfinite"}],
        ),
        (
            gcx.skip_nonfinite(gcx.skip_spikes(SGD, norm=10.0)),
            [np.nan, 11, 1],
            [{"skipped", "skipped_nonfinite"}, {"skipped", "skipped_large_norm"}, {"applied"}],
        ),
        (
            gcx.skip_nonfinite(SGD, max_consecutive_skips=1),
            [np.nan],
            [{"skipped", "skipped_nonfinite", "guard_failed"}],
        ),
        (
            gcx.accumulate_gradients(gcx.skip_spikes(SGD, norm=10.0), 2),
            [1, 100, 1],
            [{"held"}, {"skipped", "skipped_large_norm"}, {"held"}],
        ),
    ],
)  # fmt: skip
def test_the_outcome_says_what_became_of_a_step(inner, sizes, expected):
    assert fates(rows_of(gcx.watch(inner), of_sizes(*sizes))[0]) == expected


@pytest.mark.parametrize(
    ("inner", "size"),
    [
        (optax.MultiSteps(SGD, 2).gradient_transformation(), 2.0),
        (optax.apply_if_finite(SGD, 5), np.nan),
    ],
    ids=["MultiSteps", "apply_if_finite"],
)
def test_a_step_that_a_wrapper_of_another_library_holds_or_skips_is_not_applied(inner, size):
    rows, _ = rows_of(gcx.watch(inner), of_sizes(size, 1))
    assert fates(rows)[0] != {"applied"} == fates(rows)[1] and rows.norms[0, 1, 0] == 0


def test_a_step_of_some_parameters_is_a_step_though_those_of_an_accumulation_are_held():
    inner = optax.partition({"a": gcx.accumulate_gradients(SGD, 2), "b": SGD}, {"a": "a", "b": "b"})
    params = {"a": np.ones(1, "f"), "b": np.ones(1, "f")}
    assert fates(rows_of(gcx.watch(inner), [(params, {})], params)[0]) == [{"applied"}]


def test_thresholds_of_the_guard_that_skipped_are_in_the_row():
    tx = gcx.watch(gcx.skip_spikes(gcx.skip_spikes(SGD, norm=10.0, loss=4.0), norm=100.0))
    rows, _ = rows_of(tx, [*of_sizes(1, 50, 500, value=3.0), *of_sizes(1, value=5.0)])
    assert rows.limits[:, 0].tolist() == [100, 10, 100, 100]
    assert rows.limits[:, 1].tolist() == [4, 4, 4, 4]
    assert rows.has(Outcome.HAS_NORM_LIMIT).all() and rows.has(Outcome.HAS_LOSS_LIMIT).all()
    assert "skipped_large_loss" in fates(rows)[3]


def test_norms_around_a_loss_scale_are_those_of_unscaled_gradients():
    tx = gcx.watch(gcx.dynamic_loss_scale(optax.sgd(1.0), init_scale=1024.0))
    params = {"w": jnp.zeros(2)}
    state = tx.init(params)
    loss, grads = jax.value_and_grad(lambda p: gcx.scale_loss(state, 3 * p["w"][0] + 1))(params)
    _, state = jax.jit(tx.update)(grads, state, params, value=loss / 1024)
    rows = gcx.Monitor(params).read(state).rows
    assert grads["w"][0] == 3072
    np.testing.assert_array_equal(rows.norms[0, :2], [[3, 3], [3, 3]])
    assert gcx.metrics(state)["gradient_norm"] == gcx.metrics(state)["grad_norm"] == 3


def test_factors_of_each_clip_and_group_are_in_the_row():
    labels = {"a": "body", "b": "head"}
    groups = gcx.clip_by_group_norm({"body": 1.0, "head": 8.0}, labels)
    inner = optax.chain(gcx.clip_by_global_norm(10.0), groups, SGD)
    params = {"a": np.float32([4]), "b": np.float32([3])}
    rows, names = rows_of(gcx.watch(inner), [(params, {})], params)
    found = dict(zip(names.clips, rows.factors[0], strict=True))
    keys = ["clip_factor/0", "clip_factor/1/body", "clip_factor/1/head"]
    assert found == {x: pytest.approx(y) for x, y in zip(keys, (1, 0.25, 1), strict=True)}


@pytest.mark.parametrize(
    ("wrap", "sizes", "expected"),
    [
        (functools.partial(gcx.accumulate_gradients, every=2), [2, 4, 8], [3]),
        (gcx.skip_nonfinite, [2, np.nan, 3], [2, 3]),
    ],
)
def test_a_wrapper_outside_that_holds_or_skips_leaves_no_row(wrap, sizes, expected):
    rows, _ = rows_of(wrap(gcx.watch(SGD)), of_sizes(*sizes))
    assert rows.norms[:, 0, 0].tolist() == expected
    assert rows.step.tolist() == list(range(len(expected)))


def test_a_flush_has_no_gradient():
    tx = gcx.watch(gcx.accumulate_gradients(SGD, 4))
    flush = [({"w": np.float32([np.nan])}, {"weight": 0.0, "flush": True})]
    rows, _ = rows_of(tx, [*of_sizes(2, value=3.0), *flush])
    assert rows.has(Outcome.HAS_GRADIENT).tolist() == [True, False]
    assert rows.norms[:, :2, 0].tolist() == [[2, 0], [0, 2]]
    assert rows.nonfinite[:, 0].tolist() == [0, 0] and rows.loss.tolist() == [3, 0]
    assert fates(rows) == [{"held"}, {"applied"}]


def test_nonfinite_elements_are_counted_and_unchanged_parameters_have_no_update():
    params = {"a": np.float32([1, np.nan]), "b": np.float32([1, 1])}
    grads = {"a": np.float32([np.nan, 1]), "b": np.float32([-np.inf, np.inf])}
    rows, _ = rows_of(gcx.watch(gcx.skip_nonfinite(SGD)), [(grads, {})], params)
    assert rows.nonfinite[0].tolist() == [3, 1, 2]
    np.testing.assert_array_equal(rows.norms[0, 0], [np.nan, np.nan, np.inf])
    assert rows.norms[0, 1].tolist() == [0, 0, 0]


def test_a_mask_leaves_other_leaves_unmeasured_and_unchanged():
    params = {"w": np.float32([3.0]), "frozen": np.float32([1.0]), "count": np.int32([5])}
    grads = {"w": np.float32([4.0]), "frozen": np.float32([np.nan]), "count": np.int32([1])}
    prefix = {"w": True, "frozen": False, "count": False}
    for mask in (prefix, lambda tree: {key: key == "w" for key in tree}):
        tx = gcx.watch(optax.identity(), mask=mask)
        state = tx.init(params)
        updates, state = jax.jit(tx.update)(grads, state, params)
        np.testing.assert_array_equal(updates["frozen"], grads["frozen"])
        assert updates["count"] == 1
        monitor = gcx.Monitor(params, mask=mask)
        rows = monitor.read(state).rows
        assert monitor.names.units == ("w",)
        assert rows.norms[0].tolist() == [[4, 4], [4, 4], [3, 3]]


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
    assert rows.has(Outcome.REPLICAS_CHECKED).tolist() == [True, False]
    assert not rows.has(Outcome.REPLICA_DIFFERS).any()


@pytest.mark.slow
def test_a_device_with_other_parameters_is_named_at_the_next_check():
    tx = gcx.watch(optax.sgd(0.1), replica_axis="data", check_every=2)
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
    layers = gcx.granularities.layer({"h": 1, "out": 0, "b": 0})
    tx = gcx.watch(optax.sgd(0.1), granularity=layers)
    _, state = jax.jit(tx.update)(placed, tx.init(placed), placed)
    monitor = gcx.Monitor(placed, granularity=layers)
    norms = dict(zip(monitor.names.units, monitor.read(state).rows.norms[0, 0, 1:], strict=True))
    for i in range(8):
        np.testing.assert_allclose(norms[f"h_{i}"], norm64(grads["h"][i]), rtol=1e-6)
    np.testing.assert_allclose(norms["out"], norm64(grads["out"]), rtol=1e-6)
