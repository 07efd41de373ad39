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
MODES = {
    "plain": gcx.accumulate_gradients(optax.chain(MEAN, OPTIMIZER), WINDOW),
    "guarded": gcx.accumulate_gradients(optax.chain(MEAN, gcx.skip_nonfinite(OPTIMIZER)), WINDOW),
}
AROUND = {
    "checks_gradient": gcx.skip_nonfinite(MODES["plain"]),
    "checks_step": gcx.skip_nonfinite(MODES["plain"], check="step"),
}
TENSOR_PARALLEL = {"w": P(None, "model"), "b": P("model"), "v": P("model")}


def specs_of(tx):
    """The accumulator differs from device to device, all else is the same everywhere."""

    def spec(path, _):
        return P("data") if "acc_grads" in jax.tree_util.keystr(path) else P()

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(tx.init, PARAMS))


def by_apply(tx, grads, state, params):
    return gcx.apply_gradients(tx, grads, state, params)


def by_update(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def compiled_step(mode, take=by_apply, *, model=1):
    """The step inside `shard_map` over "data", with its first parameters and state."""
    tx = (MODES | AROUND)[mode]
    mesh = make_mesh({"data": 8 // model, "model": model})
    specs = specs_of(tx)

    def step(params, state, x, y):
        # As varying, so that the gradient stays on its device instead of being summed at once.
        grads = jax.grad(loss_fn)(compat.vary(params, "data"), x, y)
        return take(tx, grads, state, params)

    # Where there is a model axis, XLA partitions over it inside the `shard_map`.
    shard = functools.partial(jax.shard_map, mesh=mesh, axis_names={"data"})
    params = {k: put(x, mesh, TENSOR_PARALLEL[k]) for k, x in PARAMS.items()}
    state = jax.jit(shard(tx.init, in_specs=P(), out_specs=specs))(params)
    in_specs = (P(), specs, P("data"), P("data"))
    step = jax.jit(shard(step, in_specs=in_specs, out_specs=(P(), specs)))
    example = put((XS[0], YS[0]), mesh, P("data"))
    # XLA may find better places for the state than where it starts, which `compile` fixes.
    step = step if model > 1 else step.lower(params, state, *example).compile()
    return step, params, state


def put(tree, mesh, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def trained(step, params, state):
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    for x, y in zip(XS, YS, strict=True):
        params, state = step(params, state, *put((x, y), mesh, P("data")))
    return params, state


@functools.cache
def on_one_device():
    tx = gcx.accumulate_gradients(OPTIMIZER, WINDOW)
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(lambda p, s, x, y: by_apply(tx, jax.grad(loss_fn)(p, x, y), s, p))
    for x, y in zip(XS, YS, strict=True):
        params, state = step(params, state, x, y)
    return params, gcx.metrics(state)


def assert_like_one_device(params, state):
    expected, told = on_one_device()
    chex.assert_trees_all_close(params, expected, rtol=0, atol=1e-5)
    found = gcx.metrics(state)
    chex.assert_trees_all_close({name: found[name] for name in told}, told, rtol=1e-5, atol=0)


@pytest.mark.parametrize("take", [by_apply, by_update])
@pytest.mark.parametrize("mode", MODES)
def test_window_inside_shard_map_is_that_of_one_device_and_reduces_the_gradient_once(mode, take):
    step, params, state = compiled_step(mode, take)
    assert_like_one_device(*trained(step, params, state))
    text = step.as_text()
    # A held step moves nothing. The step that closes the window is a loop of one trip, and adds
    # up each element of the gradient once.
    assert hlo.all_reduced(text, loops=False, branches=True) == []
    sizes = hlo.all_reduced(text, branches=True)
    assert sum(sizes) == ELEMENTS and (len(sizes) == 1 or not MERGES)
    assert not any(hlo.count(text, op, branches=True) for op in MOVES)


def test_window_beside_tensor_parallel_parameters_is_that_of_one_device():
    params, state = trained(*compiled_step("guarded", model=2))
    assert_like_one_device(params, state)
    for name, leaf in params.items():
        kept = NamedSharding(leaf.sharding.mesh, TENSOR_PARALLEL[name])
        assert leaf.sharding.is_equivalent_to(kept, leaf.ndim)


@pytest.mark.parametrize("mode", ["checks_gradient", "checks_step"])
def test_guard_around_the_window_reduces_the_gradient_once(mode):
    text = compiled_step(mode)[0].as_text()
    assert hlo.all_reduced(text, loops=False) == [1]  # whether the micro-gradient is finite
    sizes = hlo.all_reduced(text, branches=True)
    assert sum(size for size in sizes if size > 2) == ELEMENTS  # and verdicts


def test_weighted_window_inside_shard_map_is_that_of_one_device():
    # Each device has its own number of tokens: the loss is divided by the sum over devices,
    # which is the weight as well, and the gradients are summed where the window closes.
    counts = np.random.default_rng(3).integers(0, 2, (CALLS, BATCH)).astype(np.float32)
    total = optax.stateless(lambda grads, _: lax.psum(grads, "data"))

    def errors(params, x, y):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.mean((hidden @ params["v"] - y) ** 2, axis=-1)

    def weighted_loss(params, x, y, count, tokens):
        return jnp.sum(count * errors(params, x, y)) / tokens

    def step(tx, params, state, x, y, count, axes):
        tokens = lax.psum(count.sum(), axes) if axes else count.sum()
        local = compat.vary(params, *axes)
        grads = jax.grad(weighted_loss)(local, x, y, count, tokens)
        return gcx.apply_gradients(tx, grads, state, params, weight=tokens)

    mesh = make_mesh({"data": 8})
    parallel = gcx.accumulate_gradients(optax.chain(total, OPTIMIZER), WINDOW)
    specs = specs_of(parallel)
    many = jax.jit(
        jax.shard_map(
            functools.partial(step, parallel, axes=("data",)),
            mesh=mesh,
            in_specs=(P(), specs, *[P("data")] * 3),
            out_specs=(P(), specs),
        )
    )
    init = jax.shard_map(parallel.init, mesh=mesh, in_specs=P(), out_specs=specs)
    single = gcx.accumulate_gradients(OPTIMIZER, WINDOW)
    one = jax.jit(functools.partial(step, single, axes=()))
    params, state = PARAMS, jax.jit(init)(PARAMS)
    expected, expected_state = PARAMS, single.init(PARAMS)
    for x, y, count in zip(XS, YS, counts, strict=True):
        params, state = many(params, state, x, y, count)
        expected, expected_state = one(expected, expected_state, x, y, count)
    chex.assert_trees_all_close(params, expected, rtol=0, atol=1e-5)
    text = many.lower(params, state, XS[0], YS[0], counts[0]).compile().as_text()
    assert hlo.all_reduced(text, loops=False, branches=True) == [1]  # the tokens
    assert sum(hlo.all_reduced(text, branches=True)) == ELEMENTS + 1
