"""Taps: statistics of activations and cotangents, against float64 NumPy, under every transformation."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import compat
import gradclip_jax as gcx
from gradclip_jax import taps
from gradclip_jax.diagnostics import Outcome
from guard_cases import SHARDS, WHOLE, sharded

LAYERS, WIDTH, BATCH = 3, 6, 8
ZEROS = np.zeros(LAYERS, "f")
NAMES = ["embed", *(f"layers/{kind}[{i}]" for i in range(LAYERS) for kind in ("hidden", "out"))]


def statistics64(x):
    """The definitions, in float64, of the finite elements."""
    x = np.asarray(x, np.float64).ravel()
    finite = x[np.isfinite(x)]
    return {
        "mean": finite.mean(),
        "rms": np.sqrt(np.mean(finite**2)),
        "nonfinite": 1 - finite.size / x.size,
    }


def assert_statistics(found, name, activation, cotangent, rtol=1e-5):
    for kind, x in (("", activation), ("cotangent_", cotangent)):
        expected = statistics64(x)
        got = {key: found[f"taps/{name}/{kind}{key}"] for key in expected}
        assert got == pytest.approx(expected, rel=rtol, abs=1e-6 * expected["rms"])


def model(params, probes, x, offsets=ZEROS):
    """A residual network of stacked layers, all of them tapped."""

    def block(carry, layer):
        weights, probe, offset = layer
        h = jnp.tanh(taps.tap(carry @ weights["wi"], probe and probe["hidden"]))
        h = taps.tap(h @ weights["wo"] + offset, probe and probe["out"])
        return carry + h, None

    h = taps.tap(x @ params["embed"], probes and probes["embed"])
    layers = params["layers"], probes and probes["layers"], offsets
    return jnp.mean(jnp.sum(jax.lax.scan(jax.checkpoint(block), h, layers)[0] ** 2, -1))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype("f") / 2

    layers = {name: normal(LAYERS, WIDTH, WIDTH) for name in ("wi", "wo")}
    params = {"embed": normal(4, WIDTH), "layers": layers}
    probes = taps.make_probes(["hidden", "out"], num_layers=LAYERS)
    return params, taps.make_probes({"embed": None, "layers": probes}), normal(BATCH, 4)


@pytest.fixture(scope="module")
def oracle(case):
    """Every tapped activation, and its cotangent as the gradient by what is added, in float64."""
    params, x = jax.tree.map(np.float64, (case[0], case[2]))

    def run(shifts):
        seen = {"embed": x @ params["embed"] + shifts["embed"]}
        h = seen["embed"]
        for i in range(LAYERS):
            hidden = h @ params["layers"]["wi"][i] + shifts[f"layers/hidden[{i}]"]
            out = jnp.tanh(hidden) @ params["layers"]["wo"][i] + shifts[f"layers/out[{i}]"]
            seen |= {f"layers/hidden[{i}]": hidden, f"layers/out[{i}]": out}
            h = h + out
        return jnp.mean(jnp.sum(h**2, -1)), seen

    with compat.x64():
        shifts = dict.fromkeys(NAMES, np.zeros((BATCH, WIDTH)))
        cotangents, seen = jax.jit(jax.grad(run, has_aux=True))(shifts)
    return jax.device_get((seen, cotangents))


def assert_measured(stats, oracle, factor=1):
    """Compare all statistics with the oracle, whose cotangents are multiplied by a factor."""
    seen, cotangents = oracle
    found = taps.metrics(stats)
    assert list(found)[::6] == [f"taps/{name}/mean" for name in NAMES]  # in the order of the model
    for name in seen:
        assert_statistics(found, name, seen[name], factor * cotangents[name])


gradients = jax.jit(jax.value_and_grad(model, argnums=(0, 1)))


@pytest.mark.slow
def test_statistics_in_scan_with_remat_are_those_of_each_layer_and_change_no_gradient(case, oracle):
    params, probes, x = case
    value, (grads, stats) = gradients(params, probes, x)
    assert_measured(stats, oracle)
    json.dumps(taps.metrics(stats), allow_nan=False)
    plain = jax.jit(jax.value_and_grad(model))(params, None, x)
    chex.assert_trees_all_equal(plain, (value, grads))


def test_taps_that_are_not_used_cost_nothing(case):
    params, probes, x = case

    def cost(probes):
        return jax.jit(jax.grad(model)).lower(params, probes, x).compile().cost_analysis()

    plain, unused = cost(None), cost(probes)
    assert plain["flops"] == unused["flops"]
    assert plain["bytes accessed"] == unused["bytes accessed"]


PROBE = taps.make_probes(["tap"])["tap"]


@jax.jit
def _single(x, probe, cotangent):
    def loss(probe):
        return jnp.sum(taps.tap(x, probe).astype(jnp.float32) * cotangent)

    return jax.grad(loss)(probe)


def single(x, cotangent):
    """Statistics of one tap whose cotangent is given."""
    return taps.metrics({"tap": _single(x, PROBE, np.float32(cotangent))})


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), "float32"), ((2, 3, 4, 5), "float16"), ((0, 4), "float32"), ((100, 1_000), "bfloat16")],
)
def test_statistics_of_any_shape_and_dtype(shape, dtype):
    rng = np.random.default_rng(1)
    x, cotangent = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    found = single(x, cotangent)
    if x.size:
        assert_statistics(found, "tap", x.astype(jnp.float32), cotangent.astype(jnp.float32))
        assert set(single(0 * x, np.zeros(shape)).values()) == {0.0}
    else:
        assert np.isnan(list(found.values())).all()


@pytest.mark.parametrize(("size", "size_of_cotangents"), [(1e-11, 1e-17), (1.0, 1.0), (1e20, 1e14)])
def test_the_rms_is_right_over_the_stated_range(size, size_of_cotangents):
    rng = np.random.default_rng(2)
    x, cotangent = (
        np.float32(rng.standard_normal((64, 64)) * c) for c in (size, size_of_cotangents)
    )
    assert_statistics(single(x, cotangent), "tap", x, cotangent)


def test_nonfinite_elements_are_counted_and_left_out():
    x = np.float32([[1, np.nan, 3], [np.inf, -np.inf, -5]])
    cotangent = np.float32([[1, 2, 3], [4, 5, np.nan]])
    assert_statistics(single(x, cotangent), "tap", x, cotangent)


def test_one_probe_in_two_taps_has_the_sum_of_both_and_a_tap_that_is_not_reached_none():
    x = jnp.arange(1.0, 5.0)

    def loss(probes):
        tapped = taps.tap(x, probes["tap"]), taps.tap(10 * x, probes["tap"])
        return jnp.sum(tapped[0]) + jnp.sum(tapped[1])

    found = taps.metrics(jax.jit(jax.grad(loss))(taps.make_probes(["tap", "other"])))
    assert_statistics(found, "tap", np.concatenate([x, 10 * x]), np.ones(8))
    assert np.isnan(found["taps/other/rms"])


def test_vmap_over_examples_sums_or_keeps_them(case, oracle):
    params, probes, x = case

    def mean_loss(probes):
        return jnp.mean(jax.vmap(lambda row: model(params, probes, row[None]))(x))

    assert_measured(jax.jit(jax.grad(mean_loss))(probes), oracle)
    rows = jax.jit(jax.vmap(jax.grad(lambda p, row: jnp.sum(taps.tap(row, p))), (None, 0)))(
        PROBE, x
    )
    np.testing.assert_allclose(rows[:, 0, 1], np.sum(x, 1), rtol=1e-5, atol=1e-6)


def test_shard_map_sums_over_devices(case, oracle):
    @sharded((WHOLE, WHOLE, SHARDS), WHOLE)
    def run(*args):
        return jax.grad(lambda *args: model(*args) / 8, argnums=1)(*args)

    assert_measured(run(*case), oracle)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="`set_mesh` as of JAX 0.8")
def test_sharded_arrays_have_the_statistics_of_the_whole(case, oracle):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    shardings = [NamedSharding(mesh, spec) for spec in (WHOLE, WHOLE, SHARDS)]
    with jax.set_mesh(mesh):
        placed = [jax.device_put(*pair) for pair in zip(case, shardings, strict=True)]
        assert_measured(jax.jit(jax.grad(model, argnums=1))(*placed), oracle)


def test_micro_batches_have_the_statistics_of_the_batch(case, oracle):
    value_and_grad = gcx.microbatched_value_and_grad(model, 4, argnums=1, batch_argnums=2)
    # The loss of a micro-batch is a mean over a quarter of the examples.
    assert_measured(jax.jit(value_and_grad)(*case)[1], oracle, factor=4)


@pytest.mark.slow
def test_per_example_clips_only_the_parameters(case, oracle):
    params, probes, x = case
    labels = {"params": "params", "probes": "probes"}
    value_and_grad = gcx.per_example.value_and_grad(
        lambda both, row: model(both["params"], both["probes"], row[None]),
        {"params": 0.1, "probes": np.inf},
        param_labels=labels,
    )
    _, grads = jax.jit(value_and_grad)({"params": params, "probes": probes}, x)
    assert gcx.global_norm(grads["params"]) < 0.1 < gcx.global_norm(gradients(*case)[1][0])
    assert_measured(grads["probes"], oracle, factor=BATCH)


def test_with_64_bit_types_statistics_are_the_same():
    with compat.x64(), compat.strict():
        x = jnp.arange(1, 4).astype("float64")
        stats = jax.jit(jax.grad(lambda probe: taps.tap(x, probe).sum()))(PROBE)
        assert stats.dtype == jnp.float32
        np.testing.assert_allclose(taps.metrics({"a": stats})["taps/a/mean"], 2.0, rtol=1e-6)


# In `watch`


@pytest.fixture(scope="module")
def watched(case):
    """The monitor after four steps: clean, a NaN in layers 0 and 2, and one without statistics."""
    params, probes, x = case
    tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(1e-3)), taps=probes)

    @jax.jit
    def step(state, offsets, batch_id):
        value_and_grad = jax.value_and_grad(model, argnums=(0, 1))
        loss, (grads, stats) = value_and_grad(params, probes, x, offsets)
        extra = {"value": loss, "taps": stats, "batch_id": batch_id}
        return tx.update(grads, state, params, **extra)[1]

    state = tx.init(params)
    for batch_id, layer in enumerate([LAYERS, 0, 2]):
        state = step(state, np.where(np.arange(LAYERS) == layer, np.nan, 0), batch_id)
    _, after = jax.jit(tx.update)(params, state, params)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    monitor = gcx.Monitor(params, taps=probes)
    return monitor, monitor.read(after)


def test_one_step_is_enough_to_place_a_nan_in_a_layer_of_a_scan(watched):
    for incident, layer in zip(watched[1].incidents, (0, 2), strict=True):
        assert f"; loss nan; first non-finite activation of layers/out[{layer}]" in str(incident)
    first = watched[1].incidents[0]
    assert first.batch_id == 1 and str(first).startswith("step 1, batch 1: skipped")


@pytest.mark.slow
def test_rows_have_the_statistics_of_taps_or_none(watched, oracle):
    monitor, (*_, rows, _) = watched
    assert rows.has(Outcome.HAS_TAPS).tolist() == [True, True, True, False]
    assert not rows.taps[3].any()
    assert list(monitor.names.taps) == NAMES
    expected = [list(statistics64(side[x]).values()) for x in NAMES for side in oracle]
    np.testing.assert_allclose(rows.taps[0].reshape(-1, 3), expected, rtol=1e-4, atol=1e-6)


def test_a_monitor_without_the_taps_raises(case):
    params, probes, _ = case
    state = gcx.watch(optax.sgd(1.0), taps=probes).init(params)
    with pytest.raises(ValueError, match="taps"):
        gcx.Monitor(params).read(state)


def test_watch_contains_no_arrays_which_an_nnx_optimizer_would_reject():
    tx = gcx.watch(optax.sgd(0.1), taps=taps.make_probes(NAMES[:1]))
    assert not [x for x in jax.tree.leaves(tx) if isinstance(x, (jax.Array, np.ndarray))]
