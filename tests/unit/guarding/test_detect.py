"""The verdict on a step: which numbers make it a bad one, in which dtypes, on which devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradclip_jax as gcx
from compat import VERSION, x64
from guard_cases import feed
from trees import build

LOW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
# From here on JAX takes another kernel for reductions on the CPU, which drops a NaN.
BLOCK = 65_536


def has_updated(tx, grads, *, check="step", axis_name=None, **extra_args):
    """Whether a guard takes the first step."""
    guard = gcx.skip_nonfinite(tx, check=check, axis_name=axis_name)
    return gcx.has_updated(guard.update(grads, guard.init(grads), grads, **extra_args)[1])


def verdict(tx, grads, **extra_args):
    return bool(jax.jit(lambda grads: has_updated(tx, grads, **extra_args))(grads))


# The gradient is checked, and nothing else can be bad.
is_taken = functools.partial(has_updated, optax.set_to_zero())


def widened(fun):
    """Computes in float32 and rounds to the dtype of the gradient, as clips do."""
    return optax.stateless(lambda u, p: fun(u.astype(jnp.float32)).astype(u.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 1000, BLOCK - 1, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_element_is_found_in_a_leaf_of_any_size(size, bad):
    look = jax.jit(is_taken)
    good = jnp.ones(size)
    assert look(good)
    for place in {0, size // 2, size - 1}:
        assert not look(good.at[place].set(bad))
    assert not look(jnp.full(size, bad))


@pytest.mark.parametrize("dtype", ["float32", "complex64", *LOW])
@pytest.mark.parametrize("size", [3, pytest.param(2 * BLOCK, marks=pytest.mark.slow)])
def test_the_largest_number_of_every_dtype_is_finite_and_a_nan_is_not(dtype, size):
    largest = jnp.full(size, jnp.finfo(dtype).max, dtype)
    assert verdict(optax.identity(), {"a": largest, "b": -largest})
    assert not verdict(optax.identity(), largest.at[1].set(jnp.nan))
    if dtype == "complex64":
        assert not verdict(optax.identity(), largest.at[1].set(complex(0, jnp.inf)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [4, 1000, 2 * BLOCK])
def test_an_update_that_overflows_when_it_is_rounded_is_found(dtype, size):
    # XLA leaves out a rounding to bfloat16 whose result is widened again, as it is for looking.
    largest = jnp.full(size, jnp.finfo(dtype).max, dtype)
    half_step = 1 + 0.75 * float(jnp.finfo(dtype).eps)
    assert not verdict(widened(lambda u: u * half_step), largest)
    assert verdict(widened(lambda u: u * (1 - 1e-3)), largest)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [4, 2 * BLOCK])
def test_a_gradient_that_overflows_when_it_is_rounded_is_found(dtype, size):
    largest = jnp.full(size, float(jnp.finfo(dtype).max), jnp.float32)
    look = jax.jit(lambda x, factor: is_taken((x * factor).astype(dtype)))
    assert not look(largest, 1 + 0.75 * float(jnp.finfo(dtype).eps))
    assert look(largest, 1 - 1e-3)


@pytest.mark.parametrize("shapes", [(4,), (7, 1000), (2_000_000,)])
def test_a_bfloat16_sum_that_overflows_when_it_is_rounded_is_found(shapes):
    # Half a step at the largest number, to which XLA may hold on in float32.
    largest = [jnp.full(n, jnp.finfo(jnp.bfloat16).max, jnp.bfloat16) for n in shapes]
    look = jax.jit(lambda xs, step: is_taken([x + step for x in xs]))
    assert not look(largest, jnp.bfloat16(2.0**119))
    assert look(largest, jnp.bfloat16(2.0**118))


@pytest.mark.skipif(VERSION < (0, 8), reason="older JAX writes down what it adds up on CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_look_at_a_gradient_writes_a_byte_for_each_element_at_most(dtype):
    grads = {"a": jnp.ones((1000, 1000), dtype), "b": jnp.ones(500_000, dtype)}
    compiled = jax.jit(is_taken).lower(grads).compile()
    written = compiled.memory_analysis().temp_size_in_bytes
    # XLA on a CPU writes the flags before it reduces them; a sum of x - x, which it does not
    # write, takes as long.
    assert written <= 1.01 * sum(x.size for x in grads.values())


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


def test_a_state_that_was_bad_at_one_place_is_checked_in_the_others():
    for moment, expected in ((1.0, True), (jnp.inf, False)):
        tx = optax.GradientTransformation(
            lambda params: jnp.array([jnp.inf, 0.0]),
            lambda updates, state, params, moment=moment: (updates, state.at[1].set(moment)),
        )
        assert verdict(tx, jnp.zeros(2)) == expected


@pytest.mark.slow
def test_any_tree_is_looked_at():
    for name in ("array", "empty", "only_none", "only_zero_size"):
        assert verdict(optax.identity(), build(name))
    trees = {
        name: build(name) for name in ("dense", "mixed_dtypes", "masked", "zero_size", "float0")
    }
    look = jax.jit(is_taken)
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


def scalar_state(of):
    """A transformation whose state is one scalar, and a moment with the place of a parameter."""

    def update(updates, state, params=None):
        return updates, {"scalar": of(state["scalar"]), "mu": state["mu"]}

    def init(params):
        return {"scalar": jnp.float32(1.0), "mu": jax.tree.map(jnp.zeros_like, params)}

    return optax.GradientTransformation(init, update)


def test_an_infinity_in_a_scalar_of_the_state_is_no_fault_but_a_nan_is():
    grads = {"w": jnp.ones(2), "b": jnp.ones(())}
    assert verdict(scalar_state(lambda x: x * jnp.inf), grads)
    assert not verdict(scalar_state(lambda x: x * jnp.nan), grads)


@pytest.mark.parametrize("wrap", [lambda tx: tx, optax.chain, lambda tx: optax.masked(tx, True)])
def test_an_infinite_moment_of_a_scalar_parameter_is_found(wrap):
    grads = {"w": jnp.ones(2), "b": jnp.float32(1e20)}
    assert not verdict(wrap(optax.adam(0.1)), grads)


def test_an_injected_threshold_may_become_infinite():
    clip = optax.inject_hyperparams(optax.clip_by_global_norm)(
        lambda count: jnp.where(count < 2, 1.0, jnp.inf)
    )
    tx = gcx.skip_nonfinite(optax.chain(clip, optax.sgd(1.0)), check="step")
    skipped, state = feed(tx, [5.0] * 5)
    assert not skipped.any()
    assert np.isinf(state.inner_state[0].hyperparams["max_norm"])


# By default the squares of the gradient have to be finite.
are_taken = jax.jit(jax.vmap(functools.partial(has_updated, optax.identity(), check="gradient")))


def test_squares_are_finite_up_to_the_root_of_the_largest_number():
    good = [[1.8e19, 0], [0, 0]]
    bad = [[1.9e19, 0], [1.4e19, 1.4e19], [np.nan, 0], [0, -np.inf]]
    assert are_taken(jnp.array(good + bad)).tolist() == [True] * 2 + [False] * 4


def test_in_float16_each_square_has_to_be_finite():
    half = jnp.full((1000, 2), jnp.float16([250, 260])).T
    flags = are_taken({"half": half, "b": jnp.ones((2, 2))})
    assert flags.tolist() == jnp.isfinite(half**2).all(axis=1).tolist() == [True, False]


def test_sharded_arrays_are_looked_at_as_a_whole_under_jit():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    look = jax.jit(functools.partial(has_updated, optax.adam(0.1)))
    good = jax.device_put(jnp.ones(16), sharding)
    assert look(good)
    assert not look(jax.device_put(jnp.ones(16).at[9].set(jnp.nan), sharding))
