"""Taps: statistics of activations and cotangents, against float64 NumPy, under every transformation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from gradclip_jax import taps

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


def model(params, probes, x, observe=lambda name, h: h):
    """A residual network of stacked layers; `observe` sees what the taps see."""

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
    """Every tapped activation and its cotangent by central differences of NumPy in float64."""
    params = jax.tree.map(np.float64, params)

    def run(x, shifts):
        seen = {"embed": x @ params["embed"] + shifts.get("embed", 0)}
        h = seen["embed"]
        for i in range(LAYERS):
            hidden = h @ params["layers"]["wi"][i] + shifts.get(f"layers_{i}/hidden", 0)
            out = np.tanh(hidden) @ params["layers"]["wo"][i] + shifts.get(f"layers_{i}/out", 0)
            seen |= {f"layers_{i}/hidden": hidden, f"layers_{i}/out": out}
            h = h + out
        return np.mean(np.sum(h**2, -1)), seen

    x, cotangents = np.float64(x), {}
    _, seen = run(x, {})
    for name, activation in seen.items():
        cotangent = np.zeros_like(activation)
        for i in np.ndindex(*activation.shape):
            shift = np.zeros_like(activation)
            shift[i] = 1e-5
            cotangent[i] = (run(x, {name: shift})[0] - run(x, {name: -shift})[0]) / 2e-5
        cotangents[name] = cotangent
    return seen, cotangents


@pytest.fixture(scope="module")
def oracle(case):
    return activations64(case[0], case[2])


gradients = jax.jit(jax.value_and_grad(model, argnums=(0, 1)))


def test_statistics_in_scan_with_remat_are_those_of_each_layer(case, oracle):
    params, probes, x = case
    _, (_, stats) = gradients(params, probes, x)
    found = taps.metrics(stats)
    assert taps.names(stats) == list(oracle[0]) == taps.names(probes)
    for name in oracle[0]:
        assert_statistics(found, name, oracle[0][name], oracle[1][name])
    json.dumps(found, allow_nan=False)


def test_values_and_gradients_are_unchanged_bit_for_bit(case):
    params, probes, x = case
    with_taps = gradients(params, probes, x)
    for other in (None, probes):
        value, grads = jax.jit(jax.value_and_grad(model))(params, other, x)
        for a, b in zip(
            jax.tree.leaves((value, grads)),
            jax.tree.leaves((with_taps[0], with_taps[1][0])),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


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

    def loss(probe):
        return jnp.sum(taps.tap(x, probe).astype(jnp.float32) * cotangent)

    return {"tap": jax.grad(loss)(probe)}


PROBE = taps.make_probes(["tap"])["tap"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4, 5), (0, 4), (100, 1_000)])
def test_statistics_of_any_shape_and_dtype(shape, dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    cotangent = jnp.asarray(rng.standard_normal(shape), dtype).astype(jnp.float32)
    found = taps.metrics(single(x, PROBE, cotangent))
    if x.size:
        assert_statistics(found, "tap", x.astype(jnp.float32), cotangent)
    else:
        assert np.isnan(list(found.values())).all()


@pytest.mark.parametrize("in_jit", [True, False])
@pytest.mark.parametrize(
    ("size", "small"), [(1e-12, 1e-18), (1e-3, 1e-8), (1.0, 1.0), (1e20, 1e14)]
)
def test_the_rms_is_right_over_the_stated_range(size, small, in_jit):
    rng = np.random.default_rng(2)
    x, cotangent = (
        rng.standard_normal((64, 64)).astype("f") * np.float32(c) for c in (size, small)
    )
    metrics = jax.jit(taps.metrics) if in_jit else taps.metrics
    found = metrics(single(jnp.asarray(x), PROBE, cotangent))
    assert found["taps/tap/rms"] == pytest.approx(statistics64(x)["rms"], rel=1e-5)
    expected = statistics64(cotangent)["rms"]
    assert found["taps/tap/cotangent_rms"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("in_jit", [True, False])
@pytest.mark.parametrize(("size", "small"), [(1e-5, 1e-11), (1.0, 1e-4), (1e9, 1e3)])
def test_the_kurtosis_is_right_over_the_stated_range(size, small, in_jit):
    rng = np.random.default_rng(3)
    x, cotangent = (np.float32(rng.standard_normal((64, 64)) * c) for c in (size, small))
    metrics = jax.jit(taps.metrics) if in_jit else taps.metrics
    found = metrics(single(jnp.asarray(x), PROBE, cotangent))
    assert found["taps/tap/kurtosis"] == pytest.approx(statistics64(x)["kurtosis"], rel=1e-4)
    expected = statistics64(cotangent)["kurtosis"]
    assert found["taps/tap/cotangent_kurtosis"] == pytest.approx(expected, rel=1e-4)


def test_nonfinite_elements_are_counted_and_left_out():
    x = np.float32([[1, np.nan, 3], [np.inf, -np.inf, -5]])
    cotangent = np.float32([[1, 2, 3], [4, 5, np.nan]])
    stats = single(jnp.asarray(x), PROBE, cotangent)
    assert np.isfinite(stats["tap"]).all()
    assert_statistics(taps.metrics(stats), "tap", x, cotangent)


def test_a_tap_of_zeros_has_a_kurtosis_of_zero():
    found = taps.metrics(single(jnp.zeros(4), PROBE, np.zeros(4, "f")))
    assert set(found.values()) == {0.0}


def test_a_tap_that_does_not_reach_the_loss_reads_as_not_measured(case):
    params, probes, x = case
    stats = jax.grad(lambda p: jnp.sum(taps.tap(x, p["embed"]) * 0 + 1) * 0 + jnp.sum(x))(probes)
    found = taps.metrics(stats)
    assert np.isnan(found["taps/layers_0/out/rms"])
    assert taps.first_nonfinite(stats) == (None, None)


def test_one_probe_in_two_taps_has_the_sum_of_both():
    x = jnp.arange(1.0, 5.0)

    def loss(probe):
        return jnp.sum(taps.tap(x, probe)) + jnp.sum(taps.tap(10 * x, probe))

    found = taps.metrics({"tap": jax.grad(loss)(PROBE)})
    both = np.concatenate([x, 10 * x])
    assert_statistics(found, "tap", both, np.ones(8))


def assert_same(stats, case, oracle):
    found = taps.metrics(stats)
    for name in oracle[0]:
        assert_statistics(found, name, oracle[0][name], oracle[1][name])


def test_vmap_over_examples_sums_or_keeps_them(case, oracle):
    params, probes, x = case

    def mean_loss(params, probes, x):
        return jnp.mean(jax.vmap(lambda row: model(params, probes, row[None]))(x))

    assert_same(jax.grad(mean_loss, argnums=1)(params, probes, x), case, oracle)
    rows = jax.vmap(jax.grad(model, argnums=1), (None, None, 0))(params, probes, x[:, None])
    assert rows["embed"].shape == (BATCH, 2, 5)
    np.testing.assert_allclose(rows["embed"][:, 0, 1], np.sum(oracle[0]["embed"], 1), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_sums_over_devices(case, oracle, check_vma):
    params, probes, x = case
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(params, probes, x):
        grads = jax.grad(lambda *args: model(*args) / 8, argnums=(0, 1))(params, probes, x)
        return grads if check_vma else jax.lax.psum(grads, "data")

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    _, stats = jax.jit(run)(params, probes, x)
    assert_same(stats, case, oracle)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_have_the_statistics_of_the_whole(case, oracle, kind):
    params, probes, x = case
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)

    def put(tree, spec):
        return jax.device_put(tree, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        sharded = put(params, P()), put(probes, P()), put(x, P("data"))
        _, stats = jax.jit(jax.grad(model, argnums=(0, 1)))(*sharded)
    assert_same(stats, case, oracle)


@pytest.mark.parametrize("drop_nonfinite", [False, True])
def test_micro_batches_have_the_statistics_of_the_batch(case, drop_nonfinite):
    params, probes, x = case
    value_and_grad = gcx.microbatched_value_and_grad(
        model, 4, argnums=(0, 1), batch_argnums=2, drop_nonfinite=drop_nonfinite
    )
    _, (_, stats) = value_and_grad(params, probes, x)
    seen, cotangents = activations64(params, x)
    found = taps.metrics(stats)
    for name in seen:
        # The loss of a micro-batch is a mean over a quarter of the examples.
        assert_statistics(found, name, seen[name], 4 * cotangents[name])


def test_accumulate_gradients_accumulates_them_beside_the_parameters(case, oracle):
    params, probes, x = case
    both = {"params": params, "probes": probes}
    optimizer = optax.chain(gcx.clip_by_global_norm(1e-3), optax.sgd(1.0))
    inner = optax.partition(
        {"params": optimizer, "probes": optax.identity()}, {"params": "params", "probes": "probes"}
    )
    tx = gcx.accumulate_gradients(inner, every=2)
    state = tx.init(both)
    for part in (x[:4], x[4:]):
        grads = jax.grad(lambda both, x: model(both["params"], both["probes"], x))(both, part)
        updates, state = tx.update(grads, state, both)
    found = taps.metrics(updates["probes"])
    for name in oracle[0]:
        assert_statistics(found, name, oracle[0][name], 2 * oracle[1][name])


def test_per_example_keeps_its_clipping_and_the_statistics(case):
    params, probes, x = case

    def loss(both, row):
        return model(both["params"], both["probes"], row[None])

    plain = gcx.per_example.value_and_grad(lambda p, row: model(p, None, row[None]), 0.1)
    tapped = gcx.per_example.value_and_grad(
        loss,
        {"params": 0.1, "probes": np.inf},
        param_labels={"params": "params", "probes": "probes"},
    )
    _, expected = plain(params, x)
    _, grads = tapped({"params": params, "probes": probes}, x)
    for a, b in zip(jax.tree.leaves(grads["params"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    seen, cotangents = activations64(params, x)
    for name in seen:
        assert_statistics(taps.metrics(grads["probes"]), name, seen[name], BATCH * cotangents[name])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_first_nonfinite_activation_is_named(case, layer):
    params, probes, x = jax.tree.map(np.array, case)
    params["layers"]["wo"][layer, 2, 3] = np.inf
    _, (_, stats) = gradients(params, probes, x)
    found = taps.first_nonfinite(stats)
    assert found.activation == f"layers_{layer}/out"
    assert str(found).startswith(f"first non-finite activation: layers_{layer}/out")
    index = jax.jit(taps.first_nonfinite_index)(stats)
    assert index.dtype == jnp.int32
    assert taps.names(stats)[index[0]] == found.activation


@pytest.mark.parametrize("layer", range(LAYERS))
def test_where_nonfinite_cotangents_begin_is_named(layer):
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
    _, (_, stats) = gradients(*case)
    assert taps.first_nonfinite(stats) == (None, None)
    assert str(taps.first_nonfinite(stats)) == "all activations and cotangents are finite"
    assert taps.first_nonfinite_index(stats).tolist() == [-1, -1]
    assert taps.first_nonfinite_index({}).tolist() == [-1, -1] and taps.metrics({}) == {}


def test_names_follow_the_forward_pass_and_not_the_alphabet():
    inner = taps.make_probes(["z", "a"], num_layers=2)
    probes = taps.make_probes({"wte": None, "decoder": inner, "ln": None, "again": inner})
    expected = ["wte", "decoder_0/z", "decoder_0/a", "decoder_1/z", "decoder_1/a", "ln"]
    assert taps.names(probes)[:6] == expected
    stats = jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x))(probes)
    assert taps.names(stats) == taps.names(probes)
    assert taps.names(taps.make_probes(["b", "a"], num_layers=2)) == ["b_0", "a_0", "b_1", "a_1"]


@pytest.mark.parametrize(
    ("call", "error", "argument"),
    [
        (lambda: taps.tap(jnp.arange(3), PROBE), TypeError, "tap: `x`"),
        (lambda: taps.tap(jnp.ones(3, complex), PROBE), TypeError, "tap: `x`"),
        (lambda: taps.tap(None, PROBE), TypeError, "tap: `x`"),
        (lambda: taps.tap(jnp.ones(3), jnp.zeros((4, 2, 5))), ValueError, "tap: `probe`"),
        (lambda: taps.tap(jnp.ones(3), PROBE.astype(jnp.bfloat16)), TypeError, "tap: `probe`"),
        (lambda: taps.make_probes("mlp"), TypeError, "make_probes: `names`"),
        (lambda: taps.make_probes([1]), TypeError, "make_probes: `names`"),
        (lambda: taps.make_probes(["a"], num_layers=0), ValueError, "make_probes: `num_layers`"),
        (lambda: taps.names({"a": jnp.zeros(3)}), ValueError, r"names: `stats`.*at stats\['a'\]"),
        (lambda: taps.metrics({"a": 1.0}), ValueError, "metrics: `stats`"),
        (lambda: taps.first_nonfinite_index([0]), ValueError, "first_nonfinite_index: `stats`"),
        (
            lambda: jax.jit(taps.first_nonfinite)({"a": PROBE}),
            TypeError,
            "first_nonfinite: `stats`",
        ),
    ],
)
def test_a_bad_argument_is_named(call, error, argument):
    with pytest.raises(error, match=f"^{argument}"):
        call()
