"""Taps: statistics of activations and cotangents, against float64 NumPy, under every transformation."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import compat
import gradclip_jax as gcx
from gradclip_jax import taps
from guard_cases import SHARDS, WHOLE, sharded

LAYERS, WIDTH, BATCH = 3, 6, 8


def statistics64(x):
    """The definitions, in float64, of the finite elements."""
    x = np.asarray(x, np.float64).ravel()
    finite = x[np.isfinite(x)]
    square = np.mean(finite**2)
    return {
        "mean": finite.mean(),
        "rms": np.sqrt(square),
        "kurtosis": np.mean(finite**4) / square**2 if square else 0.0,
        "nonfinite": 1 - finite.size / x.size,
    }


def assert_statistics(found, name, activation, cotangent, rtol=1e-5):
    for kind, x in (("", activation), ("cotangent_", cotangent)):
        for key, value in statistics64(x).items():
            scale = statistics64(x)["rms"] if key == "mean" else 0
            got = found[f"taps/{name}/{kind}{key}"]
            np.testing.assert_allclose(got, value, rtol=rtol, atol=1e-6 * scale, err_msg=kind + key)


def model(params, probes, x):
    """A residual network of stacked layers, all of them tapped."""

    def block(carry, layer):
        weights, probe, offset = layer
        h = jnp.tanh(taps.tap(carry @ weights["wi"], probe and probe["hidden"]))
        h = taps.tap(h @ weights["wo"] + offset, probe and probe["out"])
        return carry + h, None

    h = taps.tap(x @ params["embed"], probes and probes["embed"])
    offsets = jnp.zeros((LAYERS, 1, WIDTH))
    layers = params["layers"], probes and probes["layers"], offsets
    return jnp.mean(jnp.sum(jax.lax.scan(jax.checkpoint(block), h, layers)[0] ** 2, -1))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype("f") / 2

    layers = {name: normal(LAYERS, WIDTH, WIDTH) for name in ("wi", "wo")}
    layers = taps.make_probes(["hidden", "out"], num_layers=LAYERS), layers
    params = {"embed": normal(4, WIDTH), "layers": layers[1]}
    return params, taps.make_probes({"embed": None, "layers": layers[0]}), normal(BATCH, 4)


def activations64(params, x):
    """Every tapped activation, and its cotangent as the gradient by what is added, in float64."""
    params, x = jax.tree.map(np.float64, (params, x))

    def run(shifts):
        seen = {"embed": x @ params["embed"] + shifts["embed"]}
        h = seen["embed"]
        for i in range(LAYERS):
            hidden = h @ params["layers"]["wi"][i] + shifts[f"layers_{i}/hidden"]
            out = jnp.tanh(hidden) @ params["layers"]["wo"][i] + shifts[f"layers_{i}/out"]
            seen |= {f"layers_{i}/hidden": hidden, f"layers_{i}/out": out}
            h = h + out
        return jnp.mean(jnp.sum(h**2, -1)), seen

    names = ["embed", *(f"layers_{i}/{kind}" for i in range(LAYERS) for kind in ("hidden", "out"))]
    with compat.x64():
        cotangents, seen = jax.grad(run, has_aux=True)(
            dict.fromkeys(names, np.zeros((BATCH, WIDTH)))
        )
    return jax.device_get((seen, cotangents))


@pytest.fixture(scope="module")
def oracle(case):
    return activations64(case[0], case[2])


def assert_measured(stats, oracle, factor=1):
    """Compare all statistics with the oracle, whose cotangents are multiplied by a factor."""
    seen, cotangents = oracle
    found = taps.metrics(stats)
    assert taps.names(stats) == list(seen)
    for name in seen:
        assert_statistics(found, name, seen[name], factor * cotangents[name])


gradients = jax.jit(jax.value_and_grad(model, argnums=(0, 1)))


def test_statistics_in_scan_with_remat_are_those_of_each_layer(case, oracle):
    _, (_, stats) = gradients(*case)
    assert taps.names(stats) == taps.names(case[1])
    assert_measured(stats, oracle)
    json.dumps(taps.metrics(stats), allow_nan=False)


def test_values_and_gradients_are_unchanged_bit_for_bit(case):
    params, probes, x = case
    value, (grads, _) = gradients(params, probes, x)
    for other in (None, probes):
        plain = jax.jit(jax.value_and_grad(model))(params, other, x)
        chex.assert_trees_all_equal(plain, (value, grads))


def test_taps_that_are_not_used_cost_nothing(case):
    params, probes, x = case

    def cost(probes):
        return jax.jit(jax.grad(model)).lower(params, probes, x).compile().cost_analysis()

    plain, unused = cost(None), cost(probes)
    assert plain["flops"] == unused["flops"]
    assert plain["bytes accessed"] == unused["bytes accessed"]
    forward = [jax.jit(model).lower(params, p, x).compile().cost_analysis() for p in (None, probes)]
    assert forward[0]["bytes accessed"] == forward[1]["bytes accessed"]


def single(x, probe, cotangent):
    """One tap whose cotangent is given."""

    def loss(probe, x, cotangent):
        return jnp.sum(taps.tap(x, probe).astype(jnp.float32) * cotangent)

    return {"tap": jax.jit(jax.grad(loss))(probe, x, cotangent)}


PROBE = taps.make_probes(["tap"])["tap"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5), (0, 4), (100, 1_000)])
def test_statistics_of_any_shape_and_dtype(shape, dtype):
    rng = np.random.default_rng(1)
    x, cotangent = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    found = taps.metrics(single(x, PROBE, cotangent.astype(jnp.float32)))
    if x.size:
        assert_statistics(found, "tap", x.astype(jnp.float32), cotangent.astype(jnp.float32))
    else:
        assert np.isnan(list(found.values())).all()
    zeros = taps.metrics(single(0 * x, PROBE, np.zeros(shape, "f")))
    assert not x.size or set(zeros.values()) == {0.0}


@pytest.mark.parametrize(
    ("statistic", "size", "size_of_cotangents"),
    [
        ("rms", 1e-12, 1e-18),
        ("rms", 1.0, 1.0),
        ("rms", 1e20, 1e14),
        ("kurtosis", 1e-5, 1e-11),
        ("kurtosis", 1.0, 1e-4),
        ("kurtosis", 1e9, 1e3),
    ],
)
def test_a_statistic_is_right_over_the_stated_range(statistic, size, size_of_cotangents):
    rng, rtol = np.random.default_rng(2), 1e-5 if statistic == "rms" else 1e-4
    sizes = {"": size, "cotangent_": size_of_cotangents}
    arrays = {kind: np.float32(rng.standard_normal((64, 64)) * c) for kind, c in sizes.items()}
    found = taps.metrics(single(jnp.asarray(arrays[""]), PROBE, arrays["cotangent_"]))
    for kind, x in arrays.items():
        expected = statistics64(x)[statistic]
        assert found[f"taps/tap/{kind}{statistic}"] == pytest.approx(expected, rel=rtol)


def test_nonfinite_elements_are_counted_and_left_out():
    x = np.float32([[1, np.nan, 3], [np.inf, -np.inf, -5]])
    cotangent = np.float32([[1, 2, 3], [4, 5, np.nan]])
    stats = single(jnp.asarray(x), PROBE, cotangent)
    assert np.isfinite(stats["tap"]).all()
    assert_statistics(taps.metrics(stats), "tap", x, cotangent)


def test_a_tap_that_does_not_reach_the_loss_reads_as_not_measured(case):
    params, probes, x = case
    loss = lambda p: jnp.sum(taps.tap(x, p["embed"]) * 0 + 1) * 0 + jnp.sum(x)  # noqa: E731
    stats = jax.jit(jax.grad(loss))(probes)
    found = taps.metrics(stats)
    assert np.isnan(found["taps/layers_0/out/rms"])
    assert taps.first_nonfinite(stats) == (None, None)


def test_one_probe_in_two_taps_has_the_sum_of_both():
    x = jnp.arange(1.0, 5.0)

    def loss(probe):
        return jnp.sum(taps.tap(x, probe)) + jnp.sum(taps.tap(10 * x, probe))

    found = taps.metrics({"tap": jax.jit(jax.grad(loss))(PROBE)})
    both = np.concatenate([x, 10 * x])
    assert_statistics(found, "tap", both, np.ones(8))


def test_vmap_over_examples_sums_or_keeps_them(case, oracle):
    params, probes, x = case

    def mean_loss(params, probes, x):
        return jnp.mean(jax.vmap(lambda row: model(params, probes, row[None]))(x))

    assert_measured(jax.jit(jax.grad(mean_loss, argnums=1))(params, probes, x), oracle)
    rows = jax.jit(jax.vmap(jax.grad(model, argnums=1), (None, None, 0)))(
        params, probes, x[:, None]
    )
    assert rows["embed"].shape == (BATCH, 2, 5)
    expected = np.sum(oracle[0]["embed"], 1)
    np.testing.assert_allclose(rows["embed"][:, 0, 1], expected, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_sums_over_devices(case, oracle, check_vma):
    @sharded((WHOLE, WHOLE, SHARDS), WHOLE, check_vma=check_vma)
    def run(*args):
        grads = jax.grad(lambda *args: model(*args) / 8, argnums=(0, 1))(*args)
        return grads if check_vma else jax.lax.psum(grads, "data")

    assert_measured(run(*case)[1], oracle)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="`set_mesh` as of JAX 0.8")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_have_the_statistics_of_the_whole(case, oracle, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    shardings = [NamedSharding(mesh, spec) for spec in (WHOLE, WHOLE, SHARDS)]
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(*pair) for pair in zip(case, shardings, strict=True)]
        assert_measured(jax.jit(jax.grad(model, argnums=1))(*sharded), oracle)


@pytest.mark.parametrize("drop_nonfinite", [False, True])
def test_micro_batches_have_the_statistics_of_the_batch(case, oracle, drop_nonfinite):
    value_and_grad = gcx.microbatched_value_and_grad(
        model, 4, argnums=1, batch_argnums=2, drop_nonfinite=drop_nonfinite
    )
    # The loss of a micro-batch is a mean over a quarter of the examples.
    assert_measured(value_and_grad(*case)[1], oracle, factor=4)


def test_per_example_keeps_its_clipping_and_the_statistics(case, oracle):
    params, probes, x = case

    def loss(both, row):
        return model(both["params"], both["probes"], row[None])

    plain = gcx.per_example.value_and_grad(lambda p, row: model(p, None, row[None]), 0.1)
    tapped = gcx.per_example.value_and_grad(
        loss,
        {"params": 0.1, "probes": np.inf},
        param_labels={"params": "params", "probes": "probes"},
    )
    _, expected = jax.jit(plain)(params, x)
    _, grads = jax.jit(tapped)({"params": params, "probes": probes}, x)
    chex.assert_trees_all_close(grads["params"], expected, rtol=1e-5, atol=1e-7)
    assert_measured(grads["probes"], oracle, factor=BATCH)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_first_nonfinite_activation_is_named(case, layer):
    params, probes, x = jax.tree.map(np.array, case)
    params["layers"]["wo"][layer, 2, 3] = np.inf
    _, (_, stats) = gradients(params, probes, x)
    found = taps.first_nonfinite(stats)
    assert found.activation == f"layers_{layer}/out"
    assert str(found).startswith(f"first non-finite activation: layers_{layer}/out")


def test_where_nonfinite_cotangents_begin_is_named():
    layer = 1
    probes = taps.make_probes(["before", "after"], num_layers=LAYERS)

    @jax.custom_vjp
    def fault(x, is_bad):
        return x

    fault.defvjp(lambda x, bad: (x, bad), lambda bad, g: (g + jnp.where(bad, jnp.nan, 0), None))

    def loss(probes, x):
        def block(h, layer):
            probe, is_bad = layer
            h = fault(taps.tap(h, probe["before"]), is_bad)
            return taps.tap(h, probe["after"]), None

        bad = jnp.arange(LAYERS) == layer
        return jnp.sum(jax.lax.scan(block, x, (probes, bad))[0])

    stats = {"layers": jax.grad(loss)(probes, jnp.ones(3))}
    assert taps.first_nonfinite(stats) == (None, f"layers_{layer}/before")
    assert str(taps.first_nonfinite(stats)) == f"first non-finite cotangent: layers_{layer}/before"


def test_a_finite_step_says_so(case):
    found = taps.first_nonfinite(gradients(*case)[1][1])
    assert (found, str(found)) == ((None, None), "all activations and cotangents are finite")
    assert taps.first_nonfinite({}) == (None, None) and taps.metrics({}) == {}


def test_names_follow_the_forward_pass_and_not_the_alphabet():
    inner = taps.make_probes(["z", "a"], num_layers=2)
    probes = taps.make_probes({"wte": None, "decoder": inner, "ln": None, "again": inner})
    expected = ["wte", "decoder_0/z", "decoder_0/a", "decoder_1/z", "decoder_1/a", "ln"]
    assert taps.names(probes)[:6] == expected
    stats = jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x))(probes)
    assert taps.names(stats) == taps.names(probes)
    assert taps.names(taps.make_probes(["b", "a"], num_layers=2)) == ["b_0", "a_0", "b_1", "a_1"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_with_64_bit_types_statistics_are_the_same(dtype):
    with compat.x64(), compat.strict():
        x = jnp.arange(1, 4).astype(dtype)
        probe = taps.make_probes(["a"])["a"]
        loss = lambda probe: taps.tap(x, probe).astype(jnp.float32).sum()  # noqa: E731
        stats = jax.jit(jax.grad(loss))(probe)
        assert stats.dtype == jnp.float32
        np.testing.assert_allclose(taps.metrics({"a": stats})["taps/a/mean"], 2.0, rtol=1e-6)
