"""`verify_step` runs a step twice: which leaves and devices differ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx

tx = gcx.watch(gcx.skip_nonfinite(optax.adam(0.1)))
PARAMS = {"w": jnp.arange(16, dtype=jnp.float32), "b": jnp.zeros(3, jnp.bfloat16)}


def faulty_step(fault):
    """A data-parallel step; `fault(device)` returns the bits to flip on this device in this run."""
    mesh = jax.make_mesh((8,), ("data",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def body(w):
        shape = jax.ShapeDtypeStruct((), jnp.uint32)
        flipped = jax.pure_callback(fault, shape, jax.lax.axis_index("data"))
        return jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(0.9 * w, jnp.uint32) ^ flipped, jnp.float32
        )

    return jax.jit(lambda params: {"w": body(params["w"]), "b": params["b"] + 1}), mesh


def test_a_bit_that_flips_in_one_run_is_named_with_its_leaf_and_its_device():
    runs = {}

    def fault(device):
        runs[int(device)] = runs.get(int(device), 0) + 1
        return np.uint32(int(device) == 5 and runs[int(device)] == 2)

    step, mesh = faulty_step(fault)
    w = jax.device_put(PARAMS["w"], NamedSharding(mesh, P("data")))
    params = {**PARAMS, "w": w}
    assert gcx.diagnostics.verify_step(step, params) == {"['w']": [5]}
    assert gcx.diagnostics.verify_step(step, params) == {}


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

    assert gcx.diagnostics.verify_step(step, replicated) == {"": [mesh.devices[2].id]}


@pytest.mark.parametrize("value", [np.float32("nan"), np.float32(-0.0), 0.0, None, 7])
def test_equal_bits_are_equal_whatever_the_value(value):
    assert gcx.diagnostics.verify_step(lambda x: {"a": value, "x": x}, jnp.zeros(2)) == {}


def test_the_sign_of_zero_and_a_host_value_are_compared():
    runs = iter([0.0, -0.0])
    assert gcx.diagnostics.verify_step(lambda: {"loss": next(runs)}) == {"['loss']": [-1]}


def test_donated_arguments_and_keys_stay_valid():
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, key, scale):
        key, noise = jax.random.split(key)
        grads = jax.tree.map(lambda w: jax.random.normal(noise, w.shape, w.dtype), params)
        return *gcx.apply_gradients(tx, grads, state, params), key, scale

    params = jax.tree.map(jnp.array, PARAMS)
    args = (params, tx.init(params), jax.random.key(0))
    assert gcx.diagnostics.verify_step(step, *args, scale=2.0) == {}
    jax.block_until_ready(step(*args, scale=2.0))
