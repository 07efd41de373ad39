"""The verdict on a step: which numbers make it a bad one, in which dtypes, on which devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from compat import x64

LOW = ["float16", "bfloat16", "float8_e4m3fn"]
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


@pytest.mark.parametrize("dtype", ["float32", "complex64", *LOW])
@pytest.mark.parametrize("size", [3, pytest.param(2 * BLOCK, marks=pytest.mark.slow)])
@pytest.mark.sampled
def test_the_largest_number_of_every_dtype_is_finite_and_a_nan_is_not(dtype, size):
    largest = jnp.full(size, jnp.finfo(dtype).max, dtype)
    assert verdict(optax.scale(1.0), {"a": largest, "b": -largest})
    assert not verdict(optax.scale(1.0), largest.at[1].set(jnp.nan))
    if dtype == "complex64":
        assert not verdict(optax.scale(1.0), largest.at[1].set(complex(0, jnp.inf)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [4, 2 * BLOCK])
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


# The square overflows in the second moment, though the update of Adam is finite.
SQUARE_OVERFLOWS = [1.0, 1e20]
SCALAR_OVERFLOWS = {"w": [1.0, 1.0], "b": 1e20}
PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())  # its best loss is inf
NOISE = optax.add_noise(0.1, 0.5, jax.random.key(0))  # integers and a key in the state
MASKED = optax.masked(optax.adam(0.1), {"a": True, "b": False})


def with_state(first, next_state):
    """A transformation that keeps an array."""
    return optax.GradientTransformation(
        lambda params: jnp.asarray(first),
        lambda updates, state, params=None: (updates, next_state(state)),
    )


def scalar_state(of):
    """A transformation whose state is one scalar, and a moment with the place of a parameter."""

    def update(updates, state, params=None):
        return updates, {"scalar": of(state["scalar"]), "mu": state["mu"]}

    def init(params):
        return {"scalar": jnp.float32(1.0), "mu": jax.tree.map(jnp.zeros_like, params)}

    return optax.GradientTransformation(init, update)


LARGEST = np.finfo(np.float32).max
# Transformation, gradient, and whether the step is taken.
STEPS = {
    "a large update": (optax.scale(1e10), [1.0, 2.0], True),
    "an infinite element": (optax.stateless(lambda u, _: u / (u - 1)), [1.0, 2.0], False),
    "an infinite moment": (optax.adam(1e-3), SQUARE_OVERFLOWS, False),
    "an infinite moment of a scalar": (optax.adam(0.1), SCALAR_OVERFLOWS, False),
    "the same in a mask": (optax.masked(optax.adam(0.1), True), SCALAR_OVERFLOWS, False),
    "what was infinite before": (PLATEAU, [1.0, 1.0], True),
    "numbers whose norm overflows": (with_state([LARGEST] * 2, lambda x: x), [1.0], True),
    "an infinity that stays": (with_state([np.inf, 0], lambda x: x.at[1].set(1)), [1.0], True),
    "a new infinity": (with_state([np.inf, 0], lambda x: x.at[1].set(jnp.inf)), [1.0], False),
    "an infinite scalar": (scalar_state(lambda x: x * jnp.inf), {"w": [1.0], "b": 1.0}, True),
    "a scalar NaN": (scalar_state(lambda x: x * jnp.nan), {"w": [1.0], "b": 1.0}, False),
    "random keys": (NOISE, [1.0, 1.0, 1.0], True),
    "random keys and a NaN": (NOISE, [1.0, np.nan, 1.0], False),
    "a masked leaf": (MASKED, {"a": [1.0], "b": [1.0, 1.0]}, True),
    "a masked leaf that is bad": (MASKED, {"a": [1.0], "b": [1.0, np.inf]}, False),
}


@pytest.mark.parametrize(("tx", "grads", "expected"), STEPS.values(), ids=STEPS)
@pytest.mark.sampled
def test_update_and_state_of_a_step_are_looked_at(tx, grads, expected):
    grads = jax.tree.map(jnp.float32, grads, is_leaf=lambda x: isinstance(x, list))
    assert verdict(tx, grads, value=1.0) == expected


def test_float64_is_not_looked_at_in_float32():
    with x64():
        to_float32 = optax.stateless(lambda u, p: (u * 1e-200).astype(jnp.float32))
        grads = jnp.full(3, 1e200, jnp.float64)
        assert verdict(to_float32, grads)
        assert verdict(optax.scale(1.0), {"a": grads, "b": jnp.ones(2, jnp.float32)})
        assert not verdict(to_float32, jnp.full(3, 1e250, jnp.float64))
        assert not verdict(to_float32, jnp.full(3, jnp.inf, jnp.float64))
        assert verdict(optax.scale(1.0), jnp.full(1, 1e20, jnp.float64), check="gradient")


# By default the squares of the gradient have to be finite.
are_taken = jax.jit(jax.vmap(functools.partial(has_updated, optax.scale(1.0), check="gradient")))


def test_squares_are_finite_up_to_the_root_of_the_largest_number():
    good = [[1.8e19, 0], [0, 0]]
    bad = [[1.9e19, 0], [1.4e19, 1.4e19], [np.nan, 0], [0, -np.inf]]
    assert are_taken(jnp.array(good + bad)).tolist() == [True] * 2 + [False] * 4


def test_in_float16_each_square_has_to_be_finite():
    half = jnp.full((1000, 2), jnp.float16([250, 260])).T
    flags = are_taken({"half": half, "b": jnp.ones((2, 2))})
    assert flags.tolist() == jnp.isfinite(half**2).all(axis=1).tolist() == [True, False]
