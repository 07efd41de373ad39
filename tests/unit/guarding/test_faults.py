"""Faults of every kind, at every step and place: the run ends as if the batch had never been.

Thousands of runs of a small regression, each with one fault, inside one jitted scan. What they
must equal, bit for bit, is the same program without the fault, from which the batch is left out.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

pytestmark = pytest.mark.slow

GRAD, SCALE, LOSS, UPDATE, STATE = range(5)
BAD = (np.nan, np.inf, -np.inf)
PLACES = 9  # elements of the parameters below
WINDOW = 3


# `value` goes into one element of a target, or scales all of the gradient, for some steps.
Fault = collections.namedtuple("Fault", "target place value step steps")


def faults(target, *, steps, values=BAD, places=(0,), length=1):
    grid = [(target, p, v, s, length) for p in places for v in values for s in steps]
    return [np.asarray(column) for column in zip(*grid, strict=True)]


def joined(*groups):
    target, place, value, step, steps = (np.concatenate(c) for c in zip(*groups, strict=True))
    return Fault(target, place, value.astype(np.float32), step, steps)


# The problem: linear regression with parameters of two dtypes


def initial_params(dtype):
    half = dtype if dtype == "float16" else "bfloat16"
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.standard_normal((3, 2)), dtype),
        "b": jnp.zeros(2, half),
        "s": jnp.ones((), dtype),
    }


def batches(count):
    rng = np.random.default_rng(1)
    return (
        jnp.asarray(rng.standard_normal((count, 4, 3)), jnp.float32),
        jnp.asarray(rng.standard_normal((count, 4, 2)), jnp.float32),
    )


def loss_fn(params, x, y):
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return jnp.mean((x @ p["w"] * p["s"] + p["b"] - y) ** 2)


# The faults


def poked(tree, place, value, hit):
    """The tree with one element replaced, where it is hit."""
    leaves, structure = jax.tree.flatten(tree)
    out, offset = [], 0
    for leaf in leaves:
        at = (jnp.arange(leaf.size).reshape(leaf.shape) + offset == place) & hit
        out.append(jnp.where(at, value.astype(leaf.dtype), leaf))
        offset += leaf.size
    return jax.tree.unflatten(structure, out)


def saboteur():
    """Spoils the update, or its own state, when an extra argument tells it to."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None, *, fault, hit, **extra_args):
        state = jax.tree.map(lambda s, u: (0.5 * s + u).astype(s.dtype), state, updates)
        state = poked(state, fault.place, fault.value, hit & (fault.target == STATE))
        return poked(updates, fault.place, fault.value, hit & (fault.target == UPDATE)), state

    return optax.GradientTransformationExtraArgs(init, update)


def optimizer():
    """Moments, a schedule, weight decay, and an update that can be spoiled."""
    schedule = optax.cosine_decay_schedule(0.1, 20)
    # The usual eps of 1e-8 is zero in float16.
    return optax.chain(optax.adamw(schedule, eps=1e-3, weight_decay=0.1), saboteur())


def run(tx, case, count, *, fast, dtype):
    """The last outcome of a run over some batches, with a fault, or without some of them."""
    fault, absent_from, absent = case
    params = initial_params(dtype)

    def step(before, now):
        i, x, y = now
        params, state = before
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        hit = (i >= fault.step) & (i < fault.step + fault.steps)
        grads = poked(grads, fault.place, fault.value, hit & (fault.target == GRAD))
        scale = jnp.where(hit & (fault.target == SCALE), fault.value, 1)
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        loss = jnp.where(hit & (fault.target == LOSS), fault.value, loss)
        extra = {"value": loss, "fault": fault, "hit": hit}
        if fast:
            params, state = gcx.apply_gradients(tx, grads, state, params, **extra)
        else:
            updates, state = tx.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
        is_absent = (i >= absent_from) & (i < absent_from + absent)
        after = params, state
        return jax.tree.map(lambda old, new: jnp.where(is_absent, old, new), before, after), None

    steps = (jnp.arange(count), *batches(count))
    return jax.lax.scan(step, (params, tx.init(params)), steps)[0]


def outcomes(tx, cases, count, *, fast, dtype="float32"):
    """The outcome of each faulty run, and that of the run in which its bad batches never were."""

    def one(case):
        return run(tx, case, count, fast=fast, dtype=dtype)

    # `apply_gradients` one case after the other takes the loop that makes zero or one trip;
    # under `vmap` all cases go through it together. One program for both runs: the bits of two
    # differ, because XLA fuses them differently.
    program = jax.jit(functools.partial(jax.lax.map, one) if fast else jax.vmap(one))
    nothing = np.zeros_like(cases.steps)
    faulty = program((cases, nothing, nothing))
    clean = program((cases._replace(steps=nothing), cases.step, cases.steps))
    return jax.tree.map(np.asarray, (faulty, clean))


def bits(tree):
    leaves = map(np.atleast_1d, jax.tree.leaves(tree))
    return [np.ascontiguousarray(x).view(np.uint8) for x in leaves]


def assert_bitwise_equal(actual, expected, cases):
    for a, b in zip(bits(actual), bits(expected), strict=True):
        different = np.any((a != b).reshape(len(cases.step), -1), axis=1)
        assert not different.any(), [
            tuple(column[i] for column in cases) for i in np.flatnonzero(different)[:3]
        ]


def finite_cases(tree):
    """For each case, whether all of a tree is finite."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.all([np.isfinite(x.reshape(len(x), -1)).all(1) for x in leaves], axis=0)


def check_no_trace(tx, cases, count, inside, **options):
    """The state of each faulty run, whose parameters and state `inside` are those without."""
    faulty, clean = outcomes(tx, cases, count, **options)
    ours, wanted = ((params, inside(state)) for params, state in (faulty, clean))
    assert finite_cases(ours).all()
    assert_bitwise_equal(ours, wanted, cases)
    return faulty[1]


each_path = pytest.mark.parametrize("fast", [False, True], ids=["update", "apply_gradients"])

STEPS = 7
EVERY_STEP, EVERY_PLACE = range(STEPS), range(PLACES)
NONFINITE = joined(
    faults(GRAD, steps=EVERY_STEP, places=EVERY_PLACE),
    faults(UPDATE, steps=EVERY_STEP, places=EVERY_PLACE),
    faults(STATE, steps=EVERY_STEP, places=EVERY_PLACE),
    faults(LOSS, steps=EVERY_STEP),
    # Finite, but their squares are not: the second moment of Adam would be infinite for good.
    faults(GRAD, steps=EVERY_STEP, places=EVERY_PLACE, values=(1e20, -1e20)),
    faults(SCALE, steps=EVERY_STEP, values=(1e20, 1e30, 1e38, np.inf)),
    faults(GRAD, steps=range(STEPS - 2), places=EVERY_PLACE, length=3),
)
OVERFLOW = joined(
    faults(GRAD, steps=EVERY_STEP, places=EVERY_PLACE),
    faults(SCALE, steps=EVERY_STEP, values=(1e7,)),  # overflows where the gradient is cast
    faults(GRAD, steps=EVERY_STEP, places=EVERY_PLACE, values=(60000.0,)),  # its square does
)
LARGE = joined(
    faults(GRAD, steps=EVERY_STEP, places=EVERY_PLACE),
    faults(GRAD, steps=EVERY_STEP, places=EVERY_PLACE, values=(1e3, -1e3, 1e20, 3e38)),
    faults(SCALE, steps=EVERY_STEP, values=(1e3, 1e20, 1e38)),
    faults(GRAD, steps=range(STEPS - 2), places=EVERY_PLACE, values=(1e3, np.nan), length=3),
)


@each_path
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_not_finite_leaves_no_trace(dtype, fast):
    cases = {"float32": NONFINITE, "float16": OVERFLOW}[dtype]
    tx = gcx.skip_nonfinite(optimizer(), check="step")
    state = check_no_trace(tx, cases, STEPS, lambda s: s.inner_state, fast=fast, dtype=dtype)
    np.testing.assert_array_equal(state.skipped_nonfinite, cases.steps)


@each_path
def test_spikes_leave_no_trace(fast):
    tx = gcx.skip_large_norm(optimizer(), 50.0)
    state = check_no_trace(tx, LARGE, STEPS, lambda s: s.inner_state, fast=fast)
    # A norm above 5e21 is infinite, and so not finite.
    is_large = np.abs(LARGE.value) < 4e21
    np.testing.assert_array_equal(state.skipped_large_norm, np.where(is_large, LARGE.steps, 0))
    np.testing.assert_array_equal(state.skipped_nonfinite, np.where(is_large, 0, LARGE.steps))


MICRO = 4 * WINDOW
EVERY_MICRO = range(MICRO)


@each_path
def test_a_bad_micro_batch_leaves_no_trace(fast):
    cases = joined(
        faults(GRAD, steps=EVERY_MICRO, places=EVERY_PLACE),
        faults(SCALE, steps=EVERY_MICRO, values=(np.inf,)),
        faults(LOSS, steps=EVERY_MICRO),
        faults(GRAD, steps=range(0, MICRO, WINDOW), places=EVERY_PLACE, length=WINDOW),
        faults(GRAD, steps=range(MICRO - 4), places=EVERY_PLACE, length=5),
    )
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optimizer(), WINDOW), check="step")
    # Whether the last call updated is told of the call, and a skipped one is a call.
    state = check_no_trace(
        tx, cases, MICRO, lambda s: s.inner_state._replace(emitted=()), fast=fast
    )
    np.testing.assert_array_equal(state.skipped_nonfinite, cases.steps)
