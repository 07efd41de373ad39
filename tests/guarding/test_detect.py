"""The verdict on a step: which numbers make it a bad one, in which dtypes, on which devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradclip_jax as gcx
from compat import strict, x64
from gradclip_jax.clipping._power_sum import ADDS_IN_PARALLEL
from gradclip_jax.guarding._detect import all_finite, is_finite_step
from trees import build

LOW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
# From here on JAX takes another kernel for reductions on the CPU, which drops a NaN.
BLOCK = 65_536


def verdict(tx, grads, params=None, axis_name=None, **extra_args):
    """The verdict on the first step, jitted and not; they must agree."""
    params = grads if params is None else params

    def look(grads, params):
        return is_finite_step(tx, grads, tx.init(params), params, extra_args, axis_name)

    jitted, eager = bool(jax.jit(look)(grads, params)), bool(look(grads, params))
    assert jitted == eager
    return jitted


def widened(fun):
    """Computes in float32 and rounds to the dtype of the gradient, as clips do."""
    return optax.stateless(lambda u, p: fun(u.astype(jnp.float32)).astype(u.dtype))


@pytest.mark.parametrize("size", [1, 1000, BLOCK - 1, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_element_is_found_in_a_leaf_of_any_size(size, bad):
    look = jax.jit(lambda x: all_finite([x], None))
    good = jnp.ones(size)
    assert look(good)
    for place in {0, size // 2, size - 1}:
        assert not look(good.at[place].set(bad))
    assert not look(jnp.full(size, bad))


@pytest.mark.parametrize("dtype", ["float32", "complex64", *LOW])
@pytest.mark.parametrize("size", [3, 2 * BLOCK])
def test_every_dtype_is_looked_at(dtype, size):
    good = jnp.ones(size, dtype)
    assert verdict(optax.identity(), good)
    assert not verdict(optax.identity(), good.at[1].set(jnp.nan))
    if dtype == "complex64":
        assert not verdict(optax.identity(), good.at[1].set(complex(0, jnp.inf)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", *LOW[2:]])
def test_the_largest_number_of_a_dtype_is_finite(dtype):
    largest = jnp.full(4, jnp.finfo(dtype).max, dtype)
    assert verdict(optax.identity(), {"a": largest, "b": -largest})


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [4, 1000, 2 * BLOCK])
def test_an_update_that_overflows_when_it_is_rounded_is_found(dtype, size):
    # XLA leaves out a rounding to bfloat16 whose result is widened again, as it is for looking.
    largest = jnp.full(size, jnp.finfo(dtype).max, dtype)
    half_step = 1 + 0.75 * float(jnp.finfo(dtype).eps)
    assert not verdict(widened(lambda u: u * half_step), largest)
    assert verdict(widened(lambda u: u * (1 - 1e-3)), largest)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [4, 1000, 2 * BLOCK])
def test_a_gradient_that_overflows_when_it_is_rounded_is_found(dtype, size):
    largest = jnp.full(size, float(jnp.finfo(dtype).max), jnp.float32)
    look = jax.jit(lambda x, factor: all_finite([(x * factor).astype(dtype)], None))
    assert not look(largest, 1 + 0.75 * float(jnp.finfo(dtype).eps))
    assert look(largest, 1 - 1e-3)


@pytest.mark.parametrize("shapes", [(4,), (1000,), (7, 1000), (2_000_000,)])
def test_a_bfloat16_sum_that_overflows_when_it_is_rounded_is_found(shapes):
    # Half a step at the largest number, to which XLA may hold on in float32.
    largest = [jnp.full(n, jnp.finfo(jnp.bfloat16).max, jnp.bfloat16) for n in shapes]
    look = jax.jit(lambda xs, step: all_finite([x + step for x in xs], None))
    assert not look(largest, jnp.bfloat16(2.0**119))
    assert look(largest, jnp.bfloat16(2.0**118))


@pytest.mark.skipif(not ADDS_IN_PARALLEL, reason="older JAX writes down what it adds up on CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_look_at_a_gradient_writes_little(dtype):
    grads = {"a": jnp.ones((1000, 1000), dtype), "b": jnp.ones(500_000, dtype)}
    compiled = jax.jit(lambda g: all_finite(g, None)).lower(grads).compile()
    written = compiled.memory_analysis().temp_size_in_bytes
    assert written <= (0.01 if dtype == "float32" else 0.5) * sum(x.nbytes for x in grads.values())


def test_a_bad_update_is_found():
    grads = jnp.array([1.0, 2.0])
    assert verdict(optax.scale(1e10), grads)
    assert not verdict(optax.scale(jnp.inf), grads)
    assert not verdict(optax.stateless(lambda u, p: u / (u - 1)), grads)


def test_a_gradient_whose_square_overflows_is_found_in_the_state():
    grads = jnp.array([1.0, 1e20])
    updates, _ = optax.adam(1e-3).update(grads, optax.adam(1e-3).init(grads))
    assert jnp.isfinite(updates).all()  # which is why it is not enough to look at the update
    assert not verdict(optax.adam(1e-3), grads)


def test_what_was_infinite_before_may_stay():
    plateau = optax.contrib.reduce_on_plateau()
    assert jnp.isinf(plateau.init(jnp.ones(2)).best_value)
    assert verdict(optax.chain(optax.sgd(0.1), plateau), jnp.ones(2), value=1.0)


def test_large_numbers_that_mark_a_start_are_finite():
    # Two elements whose norm overflows, though they do not.
    best = optax.GradientTransformation(
        lambda params: jnp.full((2,), jnp.finfo("float32").max),
        lambda updates, state, params=None: (updates, state),
    )
    assert verdict(best, jnp.ones(3))


def test_a_state_that_was_bad_at_one_place_is_looked_at_in_the_others():
    inner = optax.trace(0.9)
    params, grads = jnp.zeros(2), jnp.ones(2)
    state = optax.TraceState(trace=jnp.array([jnp.inf, 0.0]))
    look = functools.partial(is_finite_step, inner, params=params, extra_args={}, axis_name=None)
    assert not look(grads, state)  # the update is infinite
    hidden = optax.chain(inner, optax.stateless(lambda u, p: jnp.zeros_like(u)))
    state = (state, optax.EmptyState())
    assert is_finite_step(hidden, grads, state, params, {}, None)
    bad = jnp.array([0.0, jnp.inf])
    assert not is_finite_step(hidden, bad, state, params, {}, None)


def test_any_tree_is_looked_at():
    for name in ("array", "empty", "only_none", "only_zero_size"):
        assert verdict(optax.identity(), build(name))
    trees = {
        name: build(name) for name in ("dense", "mixed_dtypes", "masked", "zero_size", "float0")
    }
    look = jax.jit(lambda tree: all_finite([tree], None))
    assert look(trees)
    leaves, structure = jax.tree.flatten(trees)
    for i, leaf in enumerate(leaves):
        if leaf.dtype != jax.dtypes.float0 and leaf.size:
            bad = [*leaves[:i], jnp.full_like(leaf, jnp.nan), *leaves[i + 1 :]]
            assert not look(jax.tree.unflatten(structure, bad))


def test_integers_and_random_keys_in_the_state_are_finite():
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    assert verdict(noise, jnp.ones(3))
    assert not verdict(noise, jnp.array([1.0, jnp.nan, 1.0]))


def test_a_leaf_that_the_optimizer_leaves_out_is_looked_at():
    masked = optax.masked(optax.adam(0.1), {"a": True, "b": False})
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}
    assert verdict(masked, grads)
    assert not verdict(masked, {**grads, "b": jnp.array([1.0, 1.0, jnp.inf])})


def test_float64_is_not_looked_at_in_float32():
    with x64():
        to_float32 = optax.stateless(lambda u, p: (u * 1e-200).astype(jnp.float32))
        grads = jnp.full(3, 1e200, jnp.float64)
        assert verdict(to_float32, grads)
        assert verdict(optax.identity(), {"a": grads, "b": jnp.ones(2, jnp.float32)})
        assert not verdict(to_float32, jnp.full(3, 1e250, jnp.float64))
        assert not verdict(to_float32, jnp.full(3, jnp.inf, jnp.float64))


def test_nothing_is_promoted():
    grads = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones((2, 2), jnp.float32), "c": jnp.ones(())}
    with strict():
        assert verdict(optax.identity(), grads)
        assert verdict(optax.trace(0.5), grads)


def test_a_threshold_may_become_infinite():
    off = gcx.clip_by_global_norm(lambda count: jnp.where(count < 1, 1.0, jnp.inf))
    grads = jnp.ones(2)
    state = off.update(grads, off.init(grads))[1]
    assert state.clip_threshold == 1.0
    assert jnp.isinf(off.update(grads, state)[1].clip_threshold)
    assert is_finite_step(off, grads, state, grads, {}, None)
    assert is_finite_step(optax.chain(off), grads, (state,), grads, {}, None)


def test_what_is_inside_a_guard_inside_a_chain_is_looked_at():
    tx = optax.chain(gcx.skip_large_norm(optax.adam(0.1), jnp.inf), optax.scale(0.0))
    assert verdict(tx, jnp.array([1e10]))
    assert not verdict(tx, jnp.array([1e25]))


def test_a_window_that_is_only_being_filled_does_not_run_the_optimizer():
    def update(updates, state, params=None):
        jax.debug.callback(seen.append, 1)
        return updates, state

    seen = []
    inner = optax.GradientTransformation(lambda params: (), update)
    tx = gcx.accumulate_gradients(inner, 2)
    grads = jnp.ones(2)
    state = tx.init(grads)
    look = jax.jit(lambda g, s: is_finite_step(tx, g, s, g, {}, None))
    assert look(grads, state) and not seen
    _, state = tx.update(grads, state, grads)
    jax.effects_barrier()
    assert not seen
    assert look(grads, state)
    jax.effects_barrier()
    assert seen == [1]


def test_one_bad_shard_is_seen_by_all_devices():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated, shards = PartitionSpec(), PartitionSpec("data")
    tx = optax.adam(0.1)

    # `out_specs` is checked: the verdict has to be of the type of what is alike on all devices.
    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(shards, replicated), out_specs=replicated
    )
    def look(sharded, whole):
        grads = {"sharded": sharded, "whole": whole}
        return is_finite_step(tx, grads, tx.init(grads), grads, {}, None)

    good, other = jnp.ones(16), jnp.ones(3)
    assert look(good, other)
    for place in range(16):
        assert not look(good.at[place].set(jnp.nan), other)
    assert not look(good, other.at[1].set(jnp.inf))


def test_sharded_arrays_are_looked_at_as_a_whole_under_jit():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tx = optax.adam(0.1)
    look = jax.jit(lambda x: is_finite_step(tx, x, tx.init(x), x, {}, None))
    good = jax.device_put(jnp.ones(16), sharding)
    assert look(good)
    assert not look(jax.device_put(jnp.ones(16).at[9].set(jnp.nan), sharding))


def test_named_axes_are_pooled_where_types_are_silent():
    def look(x):
        return all_finite([x], ("data",))

    flags = jax.pmap(look, axis_name="data")(jnp.ones((8, 2)).at[3, 1].set(jnp.nan))
    assert not np.asarray(flags).any()
    flags = jax.vmap(look, axis_name="data")(jnp.ones((8, 2)).at[3, 1].set(jnp.nan))
    assert not np.asarray(flags).any()
