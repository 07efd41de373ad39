"""Diagnostics on the host: bad leaves by path, a suggested max_norm, and a step that runs twice."""

import functools

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


def test_a_bit_that_flips_in_one_run_is_named_with_its_leaf_and_its_device():
    mesh, runs = jax.make_mesh((8,), ("data",)), {}

    def fault(device):
        runs[int(device)] = runs.get(int(device), 0) + 1
        return np.uint32(int(device) == 5 and runs[int(device)] == 2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def body(w):
        shape = jax.ShapeDtypeStruct((), jnp.uint32)
        flipped = jax.pure_callback(fault, shape, jax.lax.axis_index("data"))
        return jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(0.9 * w, jnp.uint32) ^ flipped, jnp.float32
        )

    step = jax.jit(lambda params: {"w": body(params["w"]), "b": params["b"] + 1})
    w = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("data")))
    params = {"w": w, "b": jnp.zeros(3, jnp.bfloat16)}
    assert verify_step(step, params) == {"['w']": [5]}
    assert verify_step(step, params) == {}


def test_a_replicated_output_is_compared_on_each_device():
    mesh, runs = jax.make_mesh((8,), ("data",)), []
    replicated = jax.device_put(jnp.ones(4), NamedSharding(mesh, P()))

    def step(x):
        runs.append(x)
        copies = [np.array(shard.data) for shard in x.addressable_shards]
        if len(runs) == 2:
            copies[2][1] = np.nextafter(copies[2][1], 2)
        copies = [jax.device_put(*pair) for pair in zip(copies, mesh.devices, strict=True)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)

    assert verify_step(step, replicated) == {"": [mesh.devices[2].id]}


def test_bits_are_compared_instead_of_values():
    runs = iter([0.0, -0.0])
    found = verify_step(lambda: {"loss": jnp.float32(next(runs)), "nan": jnp.float32(np.nan)})
    assert found == {"['loss']": [jax.devices()[0].id]}


def test_outputs_that_only_one_run_has_differ():
    runs = iter(["a", "b"])
    found = verify_step(lambda: {next(runs): jnp.ones(2)})
    assert found == dict.fromkeys(["['a']", "['b']"], [jax.devices()[0].id])


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
    assert verify_step(with_others, *args, scale=2.0) == {}
    jax.block_until_ready(step(*args, scale=2.0))
