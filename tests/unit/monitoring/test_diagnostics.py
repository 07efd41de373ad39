"""Diagnostics on the host: bad leaves by path, a suggested max_norm, and a step that runs twice."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from gradclip_jax.diagnostics import nonfinite_leaves, suggest_max_norm, verify_step
from oracles import wide

BAD = [1.0, np.nan, np.inf, 2.0]
OF_ADAM = optax.ScaleByAdamState(jnp.int32(1), {"w": jnp.ones(2)}, {"w": jnp.float32(BAD)})


@pytest.mark.parametrize(
    ("tree", "counts"),
    [
        *((jnp.array(BAD, x), {"": 2}) for x in ("bfloat16", "float8_e5m2", "complex64")),
        ({"a": np.array(BAD), "b": float("inf"), "c": 3}, {"['a']": 2, "['b']": 1}),
        ((OF_ADAM, optax.EmptyState()), {"[0].nu['w']": 2}),
        ([jnp.arange(3), jnp.array([True]), np.zeros(2, jax.dtypes.float0)], {}),
        ({"key": jax.random.key(0)}, {}),
        ({"empty": jnp.zeros((0, 2)), "masked": optax.MaskedNode(), "none": None}, {}),
    ],
)
def test_nonfinite_elements_of_leaves_of_any_type_are_counted(tree, counts):
    assert list(nonfinite_leaves(tree).items()) == list(counts.items())


def test_the_suggestion_is_a_percentile_of_what_is_finite():
    holes = np.random.default_rng(0).lognormal(size=(40, 3)).astype(np.float32)
    holes[5], holes[7, 1] = np.nan, np.inf
    kept = wide(holes[np.isfinite(holes)])
    assert suggest_max_norm(jnp.asarray(holes), 90.0) == np.percentile(kept, 90.0)
    assert suggest_max_norm([4.0, 1.0, 2.0, np.inf]) == 2.0  # the median


def flipped(x, element):
    x = np.array(x)
    x.view(np.uint32).reshape(-1)[element] ^= 1 << 7
    return x


def step_with_fault(kind, leaf, device, rng):
    """A step that doubles its parameters, with a fault in one device or in all of them."""
    count, run, element = itertools.count(), rng.integers(4), rng.integers(2)
    double, join = jax.jit(lambda x: 2 * x), jax.make_array_from_single_device_arrays

    def step(params):
        is_wrong, outputs = {"transient": next(count) == run, "device": True}.get(kind), {}
        for key, x in params.items():
            y, pieces = double(x), []
            for shard in y.addressable_shards:
                piece = np.array(shard.data)
                if is_wrong and key == leaf and shard.device.id == device:
                    piece = flipped(piece, element)
                if kind == "not reproducible":
                    piece = piece + rng.random()
                pieces.append(jax.device_put(piece, shard.device))
            outputs[key] = join(y.shape, y.sharding, pieces)
        return outputs

    return step


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_verdicts_on_200_injected_faults_name_the_device(seed):
    rng, mesh = np.random.default_rng(seed), jax.make_mesh((8,), ("data",))
    params = {"w": jnp.arange(16.0), "b": jnp.zeros(3)}
    specs = {"w": NamedSharding(mesh, P("data")), "b": NamedSharding(mesh, P())}
    params = jax.device_put(params, specs)
    for i in range(10):
        kind = ("transient", "device", "not reproducible", "equal", "device")[i % 5]
        leaf, device = "wb"[rng.integers(2)], int(rng.integers(8))
        found = verify_step(step_with_fault(kind, leaf, device, rng), params)
        assert found.verdict == kind
        if kind in ("transient", "device"):
            assert found.devices == {f"['{leaf}']": [device]}


@pytest.mark.parametrize(
    ("runs", "verdict"), [([0, 1, 0], "transient"), ([0, 1, 2], "not reproducible")]
)
def test_without_other_devices_a_third_run_tells_a_transient_fault(runs, verdict):
    values = iter(runs)
    assert verify_step(lambda: jnp.float32(next(values))).verdict == verdict


def test_a_step_that_contains_its_devices_is_compared_on_these():
    mesh = jax.make_mesh((8,), ("data",))
    spread = jax.shard_map(lambda w: 0.9 * w, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    w = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("data")))
    assert verify_step(jax.jit(spread), w) == ("equal", {})


def test_bits_are_compared_instead_of_values():
    runs = iter([0.0, -0.0, 0.0, 0.0])
    found = verify_step(lambda: {"loss": jnp.float32(next(runs)), "nan": jnp.float32(np.nan)})
    assert found == ("transient", {"['loss']": [jax.devices()[0].id]})


def test_outputs_that_only_one_run_has_differ():
    runs = iter(["a", "b"])
    found = verify_step(lambda: {next(runs): jnp.ones(2)})
    assert found.devices == dict.fromkeys(["['a']", "['b']"], [jax.devices()[0].id])


def test_donated_arguments_and_keys_stay_valid_and_other_outputs_are_ignored():
    tx = gcx.skip_nonfinite(optax.sgd(0.1))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, key, scale):
        key, noise = jax.random.split(key)
        grads = scale * jax.random.normal(noise, params.shape)
        return *gcx.apply_gradients(tx, grads, state, params), key

    def with_others(*args, **kwargs):
        return *step(*args, **kwargs), "text", None

    params = jnp.ones(3)
    args = params, tx.init(params), jax.random.key(0)
    assert verify_step(with_others, *args, scale=2.0) == ("equal", {})
    jax.block_until_ready(step(*args, scale=2.0))
