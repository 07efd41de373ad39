"""Watching: norms unit by unit with names, what became of each step, and the incidents."""

import functools

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
    state, steps = tx.init(params), []
    for size in (2.0, 4.0, 8.0):
        params, state = gcx.apply_gradients(tx, {"w": jnp.array([size])}, state, params)
        steps.append(int(gcx.metrics(state)["watch_step"]))
    assert steps == [0, 1, 1]
    assert gcx.metrics(state)["update_norm"] == 3


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


def test_what_is_not_measured_is_nan_and_no_incident():
    tx = gcx.watch(optax.sgd(1.0))
    params = {"w": jnp.ones(1)}
    _, state = tx.update({"w": jnp.array([2.0])}, tx.init(params), params)
    updates, state = tx.update({"w": jnp.array([np.inf])}, state, params, measure=False)
    found = gcx.metrics(state)
    assert np.isinf(updates["w"][0]) and found["watch_step"] == 2
    assert all(np.isnan(found[key]) for key in ("gradient_norm", "update_norm/w"))
    assert gcx.incidents(state) == []


# Incidents

QUIET = [random_like(PARAMS, seed) for seed in range(70)]


def spoilt(index, value):
    grads = jax.tree.map(np.copy, QUIET[0])
    grads["decoder"]["layers"]["mlp"]["wi"][index] *= value
    return grads


def level64(values):
    """Mean and variance of the first 64 values, then moving averages of weight 1 / 64."""
    mean, variance = np.mean(values[:64]), np.var(values[:64])
    for value in values[64:]:
        variance = 63 / 64 * (variance + (value - mean) ** 2 / 64)
        mean += (value - mean) / 64
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
    mean, variance = level64(np.log([norm64(*jax.tree.leaves(grads)) for grads in QUIET]))
    expected = np.exp(mean + 6 * max(np.sqrt(variance), 0.01))
    assert spike.norm_threshold == pytest.approx(expected, rel=1e-4)
    assert (nan.step, nan.kinds, nan.leaf) == (71, ("nan", "skipped"), "decoder/layers_2/mlp/wi")
    assert np.isnan(nan.norm)
    assert (infinity.kinds, infinity.leaf) == (("infinity", "skipped"), "decoder/layers_0/mlp/wi")
    assert infinity.norm == np.inf
    assert (loss.step, loss.kinds, loss.loss) == (73, ("loss",), 9.0)


def test_a_leaf_that_rises_beside_the_others_is_named_though_the_norm_is_usual():
    rng, stream = np.random.default_rng(0), []
    for i in range(90):  # a hard batch raises both alike
        level, own = np.exp(0.5 * rng.standard_normal()), np.exp(0.05 * rng.standard_normal(2))
        small = own[1] * (10 if i == 80 else 1)
        stream.append(
            {"big": np.float32([level * own[0]]), "small": np.float32([level * small / 50])}
        )
    params = {"big": np.ones(1, "f"), "small": np.ones(1, "f")}
    (incident,) = gcx.incidents(run(gcx.watch(optax.sgd(1e-3)), stream, params))
    assert (incident.step, incident.kinds, incident.leaf) == (80, ("leaf",), "small")
    assert incident.share < 0.05 and incident.second_leaf == "big"
    assert 3 < incident.leaf_rise < 3.5  # the root of 10: both leaves are the level
    assert "% of it in small, 3." in str(incident) and "times its usual part" in str(incident)
    assert (
        gcx.incidents(run(gcx.watch(optax.sgd(1e-3), spike_threshold=np.inf), stream, params)) == []
    )


def test_the_loss_is_the_extra_argument_that_guards_take():
    tx = gcx.watch(optax.sgd(1e-3), of=("gradient",))
    grads = {"w": jnp.ones(1)}
    _, state = tx.update(grads, tx.init(grads), grads, value=None, loss=jnp.float32(np.inf))
    assert [x.kinds for x in gcx.incidents(state)] == [("loss",)]
    with pytest.raises(TypeError, match="^watch: `loss`"):
        tx.update(grads, state, grads, value=jnp.ones(()), loss=jnp.ones(()))


def test_a_spike_hides_no_other_and_a_lasting_rise_is_learned():
    tx = gcx.watch(optax.sgd(1e-3), of=("gradient",), max_incidents=1024)
    norms = [1 + 0.01 * (i % 7) for i in range(70)] + [1e4, 1.0, 1.0, 20.0] + [30.0] * 2000
    state = run(tx, [{"w": np.float32([x])} for x in norms], {"w": np.ones(1, "f")})
    steps = [x.step for x in gcx.incidents(state)]
    assert steps[:3] == [70, 73, 74]
    assert steps[-1] < 300  # the new level is usual in the end


def test_the_guard_inside_says_by_what_threshold_it_skipped():
    tx = gcx.watch(gcx.skip_large_norm(optax.sgd(1e-3), 4.2))
    params = {"wi": np.ones(2, "f"), "wo": np.ones(1, "f")}
    grads = {"wi": np.float32([3.1e5, 0]), "wo": np.float32([5e4])}
    _, state = tx.update(grads, tx.init(params), params, value=3.2)
    (incident,) = gcx.incidents(state)
    assert incident.norm_threshold == pytest.approx(4.2)
    text = "step 0: skipped, gradient norm 3.1e5 above 4.2; 97 % of it in wi; loss 3.2"
    assert str(incident) == text


def test_the_last_incidents_are_kept_oldest_first():
    tx = gcx.watch(optax.sgd(1.0), of=("gradient",), max_incidents=3)
    bad = [np.inf if i in (1, 2, 4, 6, 7) else 1.0 for i in range(9)]
    state = run(tx, [{"w": np.float32([x])} for x in bad], {"w": np.ones(1, "f")})
    assert [x.step for x in gcx.incidents(state)] == [4, 6, 7]
    assert gcx.metrics(state)["incident_count"] == 5
    assert state.incidents.rows.shape == (3, len(gcx.diagnostics.Incident._fields))


def test_an_update_that_is_not_finite_is_an_incident():
    tx = gcx.watch(optax.scale(1e38))
    params = {"w": np.ones(1, "f")}
    _, state = tx.update({"w": jnp.float32([1e5])}, tx.init(params), params)
    (incident,) = gcx.incidents(state)
    assert incident.kinds == ("update",) and "update not finite" in str(incident)


# Where it runs


def test_seeds_are_watched_side_by_side():
    tx = gcx.watch(optax.sgd(0.1))
    params = {"w": np.ones((2, 3), "f")}
    grads = {"w": np.float32([[3, 4, 0], [np.nan, 0, 0]])}
    state = jax.vmap(tx.init)(params)
    _, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    found = gcx.metrics(state)
    np.testing.assert_array_equal(found["gradient_norm/w"], [5, np.nan])
    with pytest.raises(ValueError, match="^incidents: `state`"):
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


def test_what_is_not_watched_is_not_measured():
    def reads_params(of):
        tx = gcx.watch(optax.sgd(0.1), of=of)
        closed = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
        params = closed.jaxpr.invars[-len(jax.tree.leaves(PARAMS)) :]
        return any(x is v for eqn in closed.jaxpr.eqns for x in eqn.invars for v in params)

    assert not reads_params(("gradient",)) and reads_params(("gradient", "update"))
