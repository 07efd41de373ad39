"""Weights spread over devices: the numbers of one device, little communication."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import array, assert_close

import compat
import gradclip_jax as gcx
import hlo
from guard_cases import SHARDS, WHOLE, sharded

pytestmark = [pytest.mark.slow, compat.needs_eight_devices]

EXAMPLES, TOKENS, WIDTH, HIDDEN = 8, 3, 16, 64
BATCH = array(EXAMPLES, TOKENS, WIDTH, seed=0)
PARAMS = {
    "scale": array(WIDTH, seed=1),
    "up": array(WIDTH, HIDDEN, seed=2),
    "bias": array(HIDDEN, seed=3),
    "down": array(HIDDEN, WIDTH, seed=4),
}
TENSOR_PARALLEL = {
    "scale": WHOLE,
    "up": P(None, "model"),
    "bias": P("model"),
    "down": P("model", None),
}
FSDP = dict.fromkeys(PARAMS, P("data"))


def loss(params, x, add_up=lambda y: y):
    hidden = jnp.tanh((x * params["scale"]) @ params["up"] + params["bias"])
    return jnp.sum(jnp.sin(add_up(hidden @ params["down"])))


def clip_of(loss, **options):
    run = gcx.per_example.value_and_grad(loss, 0.5, **options)

    def clip(params, batch):
        (_, stats), grads = run(params, batch)
        return grads, stats.norm

    return clip


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


@pytest.fixture(scope="module")
def alone():
    return jax.tree.map(np.asarray, jax.jit(clip_of(loss))(PARAMS, BATCH))


def assert_equal_to_one_device(found, alone):
    np.testing.assert_allclose(found[1], alone[1], rtol=1e-5)
    assert_close(found[0], alone[0])


def on(mesh, tree, specs):
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


@pytest.mark.parametrize("specs", [TENSOR_PARALLEL, FSDP], ids=["tensor parallel", "FSDP"])
def test_sharded_weights_under_jit_equal_one_device(mesh, alone, specs):
    args = on(mesh, (PARAMS, BATCH), (specs, SHARDS))
    out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, SHARDS))
    program = jax.jit(clip_of(loss), out_shardings=out).lower(*args).compile()
    assert_equal_to_one_device(program(*args), alone)
    if specs is TENSOR_PARALLEL:  # nothing is gathered
        for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
            assert hlo.count(program.as_text(), kind) == 0


def test_tensor_parallel_inside_shard_map_adds_up_two_numbers_for_each_norm(mesh, alone):
    def sharded(params, x):
        return loss(params, x, lambda y: jax.lax.psum(y, "model"))

    def spread(function, out_specs):
        specs = dict(in_specs=(TENSOR_PARALLEL, SHARDS), out_specs=out_specs)
        return jax.jit(jax.shard_map(function, mesh=mesh, **specs))

    clip = spread(clip_of(sharded), (TENSOR_PARALLEL, SHARDS))
    assert_equal_to_one_device(clip(PARAMS, BATCH), alone)
    norms = spread(gcx.per_example.norms(sharded), SHARDS).lower(PARAMS, BATCH).compile().as_text()
    local = EXAMPLES // 2
    activations = 2 * local * TOKENS * WIDTH  # those of the loss itself, there and back
    # The loop is for the examples whose gradients have to be materialized.
    assert sum(hlo.all_reduced(norms, loops=False)) == activations + 2 * local


@pytest.mark.parametrize("kind", ["typed", "silent", "pmap"])
def test_clipped_mean_is_reduced_over_the_devices_of_the_batch(kind, alone):
    axes = None if kind == "typed" else "data"
    clip = clip_of(loss, axis_name=axes)
    if kind == "pmap":
        run = jax.pmap(clip, axis_name=axes, in_axes=(None, 0), out_axes=(None, 0))
        grads, norms = run(PARAMS, BATCH[:, None])
        assert_equal_to_one_device((grads, norms.reshape(-1)), alone)
        return
    run = sharded((WHOLE, SHARDS), (WHOLE, SHARDS), check_vma=kind == "typed")(clip)
    assert_equal_to_one_device(run(PARAMS, BATCH), alone)
    assert "all_gather" not in run.lower(PARAMS, BATCH).as_text()


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="explicit axes as of JAX 0.8")
def test_explicit_axes_of_weights_and_batch_equal_one_device(alone):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    whole = NamedSharding(mesh, P(None, None))

    def loss(params, x):
        hidden = jnp.tanh((x * params["scale"]) @ params["up"] + params["bias"])
        return jnp.sum(jnp.sin(jnp.einsum("th,hd->td", hidden, params["down"], out_sharding=whole)))

    params, batch = on(mesh, (PARAMS, BATCH), (TENSOR_PARALLEL, SHARDS))
    with jax.set_mesh(mesh):
        found = jax.jit(clip_of(loss))(params, batch)
    assert_equal_to_one_device(found, alone)
    for name, x in found[0].items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, TENSOR_PARALLEL[name]), x.ndim)


def test_parts_that_are_not_real_are_left_out_on_every_device():
    # Each of two devices holds four examples, of which every second one is not real.
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    batch = np.where(np.arange(EXAMPLES)[:, None, None] % 2 == 0, BATCH, np.nan).astype(np.float32)

    @jax.jit
    def run(count, *args):
        options = {"num_microbatches": 2, "num_real_microbatches": count}
        return gcx.per_example.value_and_grad(loss, 0.5, **options)(*args)

    args = on(mesh, (PARAMS, batch), (dict.fromkeys(PARAMS, WHOLE), SHARDS))
    (value, stats), grads = run(jnp.int32(1), *args)
    (expected, real), wanted = jax.jit(gcx.per_example.value_and_grad(loss, 0.5))(
        PARAMS, BATCH[::2]
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert not np.any(stats.norm[1::2])
    assert_equal_to_one_device((grads, stats.norm[::2]), (wanted, real.norm))
