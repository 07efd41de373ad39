"""What moves between devices, counted in the compiled program: docs/sharding.md says no less."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from process_worker import MEAN, OPTIMIZER, PARAMS, loss_fn, make_mesh, values

import compat
import gradclip_jax as gcx
import hlo

pytestmark = [pytest.mark.slow, compat.needs_eight_devices]

# JAX 0.7 leaves each scalar its own all-reduce on the CPU.
MERGES = compat.VERSION >= (0, 10)
MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
ELEMENTS = sum(x.size for x in PARAMS.values())
WINDOW, CALLS, BATCH = 3, 6, 32
COUNTS = np.random.default_rng(3).integers(0, 2, (CALLS, BATCH)).astype(np.float32)
BATCHES = [*zip(values((CALLS, BATCH, 16), 7), values((CALLS, BATCH, 8), 8), COUNTS, strict=True)]
SUM = optax.stateless(lambda grads, _: lax.psum(grads, "data"))
ALONE = gcx.accumulate_gradients(OPTIMIZER, WINDOW)
GUARDED = gcx.accumulate_gradients(optax.chain(MEAN, gcx.skip_nonfinite(OPTIMIZER)), WINDOW)
WEIGHTED = gcx.accumulate_gradients(optax.chain(SUM, OPTIMIZER), WINDOW)


def by_apply(tx, axes, params, state, x, y, count):
    # As varying, so that the gradient stays on its device instead of being summed at once.
    grads = jax.grad(loss_fn)(compat.vary(params, *axes) if axes else params, x, y)
    return gcx.apply_gradients(tx, grads, state, params)


def by_weight(tx, axes, params, state, x, y, count):
    """Each device has its own number of tokens; the loss is divided by the sum over devices."""
    tokens = lax.psum(count.sum(), axes) if axes else count.sum()

    def weighted_loss(params):
        return jnp.sum(count * jax.vmap(loss_fn, (None, 0, 0))(params, x, y)) / tokens

    grads = jax.grad(weighted_loss)(compat.vary(params, *axes) if axes else params)
    return gcx.apply_gradients(tx, grads, state, params, weight=tokens)


def compiled_step(tx, take):
    """The step inside `shard_map` over "data", with its first parameters and state."""
    mesh = make_mesh({"data": 8})
    # The accumulator differs from device to device, all else is the same everywhere.
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P("data") if "gradient.total" in jax.tree_util.keystr(path) else P(),
        jax.eval_shape(tx.init, PARAMS),
    )
    shard = functools.partial(jax.shard_map, mesh=mesh)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    state = jax.jit(shard(tx.init, in_specs=P(), out_specs=specs))(params)
    in_specs = (P(), specs, *[P("data")] * 3)
    step = functools.partial(take, tx, ("data",))
    step = jax.jit(shard(step, in_specs=in_specs, out_specs=(P(), specs)))
    batch = jax.device_put(BATCHES[0], NamedSharding(mesh, P("data")))
    return step.lower(params, state, *batch).compile(), params, state


@pytest.mark.parametrize(
    ("tx", "take", "before"), [(GUARDED, by_apply, []), (WEIGHTED, by_weight, [1])]
)
def test_window_inside_shard_map_is_that_of_one_device_and_reduces_the_gradient_once(
    tx, take, before
):
    step, params, state = compiled_step(tx, take)
    text = step.as_text()
    # A held step moves nothing, or the number of tokens. The step that closes the window is a
    # loop of one trip, and adds up each element of the gradient once.
    assert hlo.all_reduced(text, loops=False, branches=True) == before
    sizes = hlo.all_reduced(text, branches=True)
    assert sum(sizes) == ELEMENTS + sum(before)
    assert len(sizes) == 1 + len(before) or not MERGES
    assert not any(hlo.count(text, op, branches=True) for op in MOVES)
    expected, expected_state = PARAMS, ALONE.init(PARAMS)
    on_one_device = jax.jit(functools.partial(take, ALONE, ()))
    for batch in BATCHES:
        placed = jax.device_put(batch, NamedSharding(params["w"].sharding.mesh, P("data")))
        params, state = step(params, state, *placed)
        expected, expected_state = on_one_device(expected, expected_state, *batch)
    chex.assert_trees_all_close(params, expected, rtol=0, atol=1e-5)
    found, told = gcx.metrics(state), gcx.metrics(expected_state)
    chex.assert_trees_all_close({name: found[name] for name in told}, told, rtol=1e-5, atol=0)


@pytest.mark.parametrize("check", ["gradient", "step"])
def test_guard_around_the_window_reduces_the_gradient_once(check):
    plain = gcx.accumulate_gradients(optax.chain(MEAN, OPTIMIZER), WINDOW)
    text = compiled_step(gcx.skip_nonfinite(plain, check=check), by_apply)[0].as_text()
    # One scalar says whether the micro-gradient is finite. With `check="gradient"` this is its
    # norm; otherwise the norm, which may overflow, is a measurement beside it.
    assert hlo.all_reduced(text, loops=False) == [1] * (2 if check == "step" else 1)
    sizes = hlo.all_reduced(text, branches=True)
    assert sum(size for size in sizes if size > 2) == ELEMENTS  # and verdicts
