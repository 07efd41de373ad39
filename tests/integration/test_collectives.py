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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices"),
]

# JAX 0.7 leaves each scalar its own all-reduce on the CPU.
MERGES = compat.VERSION >= (0, 10)
MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
ELEMENTS = sum(x.size for x in PARAMS.values())
WINDOW, CALLS, BATCH = 3, 6, 32
XS, YS = values((CALLS, BATCH, 16), 7), values((CALLS, BATCH, 8), 8)
BATCHES = list(zip(XS, YS, strict=True))
COUNTS = np.random.default_rng(3).integers(0, 2, (CALLS, BATCH)).astype(np.float32)
SUM = optax.stateless(lambda grads, _: lax.psum(grads, "data"))
ALONE = gcx.accumulate_gradients(OPTIMIZER, WINDOW)
PLAIN = gcx.accumulate_gradients(optax.chain(MEAN, OPTIMIZER), WINDOW)
GUARDED = gcx.accumulate_gradients(optax.chain(MEAN, gcx.skip_nonfinite(OPTIMIZER)), WINDOW)
WEIGHTED = gcx.accumulate_gradients(optax.chain(SUM, OPTIMIZER), WINDOW)
TENSOR_PARALLEL = {"w": P(None, "model"), "b": P("model"), "v": P("model")}


def local(params, axes):
    """As varying, so that the gradient stays on its device instead of being summed at once."""
    return compat.vary(params, *axes) if axes else params


def by_apply(tx, axes, params, state, x, y):
    grads = jax.grad(loss_fn)(local(params, axes), x, y)
    return gcx.apply_gradients(tx, grads, state, params)


def by_weight(tx, axes, params, state, x, y, count):
    """Each device has its own number of tokens; the loss is divided by the sum over devices."""
    tokens = lax.psum(count.sum(), axes) if axes else count.sum()

    def weighted_loss(params):
        errors = jax.vmap(loss_fn, (None, 0, 0))(params, x, y)
        return jnp.sum(count * errors) / tokens

    grads = jax.grad(weighted_loss)(local(params, axes))
    return gcx.apply_gradients(tx, grads, state, params, weight=tokens)


def compiled_step(tx, take, batches=BATCHES, *, model=1):
    """The step inside `shard_map` over "data", with its first parameters and state."""
    mesh = make_mesh({"data": 8 // model, "model": model})
    # The accumulator differs from device to device, all else is the same everywhere.
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P("data") if "acc_grads" in jax.tree_util.keystr(path) else P(),
        jax.eval_shape(tx.init, PARAMS),
    )
    # Where there is a model axis, XLA partitions over it inside the `shard_map`.
    shard = functools.partial(jax.shard_map, mesh=mesh, axis_names={"data"})
    params = {k: put(x, mesh, TENSOR_PARALLEL[k]) for k, x in PARAMS.items()}
    state = jax.jit(shard(tx.init, in_specs=P(), out_specs=specs))(params)
    in_specs = (P(), specs, *[P("data")] * len(batches[0]))
    step = functools.partial(take, tx, ("data",))
    step = jax.jit(shard(step, in_specs=in_specs, out_specs=(P(), specs)))
    example = put(batches[0], mesh, P("data"))
    # XLA may find better places for the state than where it starts, which `compile` fixes.
    step = step if model > 1 else step.lower(params, state, *example).compile()
    return step, params, state


def put(tree, mesh, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def assert_like_one_device(step, params, state, take=by_apply, batches=BATCHES):
    """Train there and on one device; the last parameters on the mesh."""
    mesh = params["w"].sharding.mesh
    expected, expected_state = PARAMS, ALONE.init(PARAMS)
    on_one_device = jax.jit(functools.partial(take, ALONE, ()))
    for batch in batches:
        params, state = step(params, state, *put(batch, mesh, P("data")))
        expected, expected_state = on_one_device(expected, expected_state, *batch)
    chex.assert_trees_all_close(params, expected, rtol=0, atol=1e-5)
    found, told = gcx.metrics(state), gcx.metrics(expected_state)
    chex.assert_trees_all_close({name: found[name] for name in told}, told, rtol=1e-5, atol=0)
    return params


@pytest.mark.parametrize("tx", [PLAIN, GUARDED], ids=["plain", "guarded"])
def test_window_inside_shard_map_is_that_of_one_device_and_reduces_the_gradient_once(tx):
    step, params, state = compiled_step(tx, by_apply)
    assert_like_one_device(step, params, state)
    text = step.as_text()
    # A held step moves nothing. The step that closes the window is a loop of one trip, and adds
    # up each element of the gradient once.
    assert hlo.all_reduced(text, loops=False, branches=True) == []
    sizes = hlo.all_reduced(text, branches=True)
    assert sum(sizes) == ELEMENTS and (len(sizes) == 1 or not MERGES)
    assert not any(hlo.count(text, op, branches=True) for op in MOVES)


def test_window_beside_tensor_parallel_parameters_is_that_of_one_device():
    params = assert_like_one_device(*compiled_step(GUARDED, by_apply, model=2))
    for name, leaf in params.items():
        kept = NamedSharding(leaf.sharding.mesh, TENSOR_PARALLEL[name])
        assert leaf.sharding.is_equivalent_to(kept, leaf.ndim)


@pytest.mark.parametrize("check", ["gradient", "step"])
def test_guard_around_the_window_reduces_the_gradient_once(check):
    text = compiled_step(gcx.skip_nonfinite(PLAIN, check=check), by_apply)[0].as_text()
    # One scalar says whether the micro-gradient is finite. With `check="gradient"` this is its
    # norm; otherwise the norm, which may overflow, is a measurement beside it.
    assert hlo.all_reduced(text, loops=False) == [1] * (2 if check == "step" else 1)
    sizes = hlo.all_reduced(text, branches=True)
    assert sum(size for size in sizes if size > 2) == ELEMENTS  # and verdicts


def test_weighted_window_inside_shard_map_is_that_of_one_device():
    batches = list(zip(XS, YS, COUNTS, strict=True))
    step, params, state = compiled_step(WEIGHTED, by_weight, batches)
    assert_like_one_device(step, params, state, by_weight, batches)
    text = step.as_text()
    assert hlo.all_reduced(text, loops=False, branches=True) == [1]  # the tokens
    assert sum(hlo.all_reduced(text, branches=True)) == ELEMENTS + 1
