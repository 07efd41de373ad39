"""Guards and accumulations in one another: one step of the optimizer, one count for a skip."""

import contextlib
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from accumulation_cases import taken
from guard_cases import SHARDS, WHOLE, calls, sharded

gradient = partial(gcx.skip_nonfinite, check="gradient")
step = partial(gcx.skip_nonfinite, check="step")
spikes = partial(gcx.skip_spikes, norm=1e4)
scale = partial(gcx.dynamic_loss_scale, init_scale=8.0, growth_interval=2, check="step")


def acc(inner, every=2, **options):
    return gcx.accumulate_gradients(inner, every, **options)


NESTS = {
    "skip(skip)": lambda skip, opt: skip(skip(opt)),
    "skip(acc)": lambda skip, opt: skip(acc(opt)),
    "skip(spikes(acc(spikes(skip))))": lambda skip, opt: skip(spikes(acc(spikes(skip(opt))))),
}


# --- derivatives ----------------------------------------------------------------------------


def scaled(grads, state, params):
    """An optimizer whose state and parameters are differentiated through."""
    updates = jax.tree.map(lambda g, m, p: -0.5 * g * jnp.cos(p) - m, grads, state, params)
    return updates, jax.tree.map(jnp.add, grads, state)


SMOOTH = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), scaled)
NESTED = "clip of guard of accumulation of guard"
WRAPPERS = {
    "accumulation": acc(SMOOTH),
    "guard of steps": step(SMOOTH),
    NESTED: optax.chain(gcx.clip_by_global_norm(1e3), gradient(acc(step(SMOOTH)))),
}


def two_steps(how, tx, w):
    """A function of the gradient through two calls, in which a scheduled count travels along."""

    def call(state, grad):
        updates, state = tx.update(grad, state, w, value=jnp.float32(1))
        return state, updates

    grads, state = jnp.stack([w, jnp.sin(w)]), tx.init(w)
    if how == "scan":
        first, second = jax.lax.scan(jax.jit(call), state, grads)[1]
    else:
        state, first = HOW[how](call)(state, grads[0])
        _, second = HOW[how](call)(state, grads[1])
    return jnp.sum(first**2) + jnp.sum((w + second) ** 2)


def expected_total(name, w):
    s, c = jnp.sin(w), jnp.cos(w)
    if "accumulation" in name:  # one step, of the mean
        return jnp.sum((w - 0.25 * (w + s) * c) ** 2)
    return jnp.sum((0.5 * w * c) ** 2) + jnp.sum((0.5 * s * c) ** 2)


HOW = {"jit": jax.jit, "checkpoint": jax.checkpoint, "scan": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "jit") for name in WRAPPERS), *((NESTED, how) for how in ("checkpoint", "scan"))],
)
def test_every_wrapper_is_differentiable_and_leaks_no_tracer(name, how):
    tx, w = WRAPPERS[name], jnp.array([0.5, -1.5, 2.0])
    total = partial(two_steps, how, optax.with_extra_args_support(tx))
    expected = partial(expected_total, name)
    slope = jax.grad(expected)(w)
    # Under the check nothing that was traced is kept: nested ones take a minute in reverse.
    with jax.checking_leaks() if name == "accumulation" else contextlib.nullcontext():
        np.testing.assert_allclose(jax.grad(total)(w), slope, rtol=1e-5)
    with jax.checking_leaks() if how == "jit" else contextlib.nullcontext():
        push = jax.jvp(total, (w,), (jnp.ones_like(w),))[1]
    np.testing.assert_allclose(push, slope.sum(), rtol=1e-5)
    if how == "jit" and "clip" not in name:
        hessian = jax.jit(jax.hessian(total))(w)
        np.testing.assert_allclose(hessian, jax.hessian(expected)(w), rtol=1e-5, atol=1e-6)


def test_a_step_that_is_not_taken_has_no_derivative():
    inner = optax.stateless(lambda updates, _: jax.tree.map(jnp.log, updates))

    def slope_of(tx):
        return jax.jit(jax.grad(lambda grads: jnp.sum(tx.update(grads, tx.init(grads))[0])))

    for tx in (step(inner), acc(step(inner), 1)):
        slope = slope_of(tx)
        assert slope(jnp.array([2.0, 0.0])).tolist() == [0.0, 0.0]
        assert slope(jnp.array([2.0, 4.0])).tolist() == [0.5, 0.25]
    assert slope_of(acc(inner, 2))(jnp.array([2.0, 0.0])).tolist() == [0.0, 0.0]
    assert slope_of(gradient(inner))(jnp.array([jnp.nan, 4.0]))[1] == 0.0


# --- executions and traces ------------------------------------------------------------------


def counting():
    """Adam that counts how often it is traced and how often it runs."""
    counts = {"traces": 0, "runs": 0}
    adam = optax.adam(0.1)

    def update(updates, state, params=None):
        counts["traces"] += 1

        def ran():
            counts["runs"] += 1

        jax.debug.callback(ran)
        return adam.update(updates, state, params)

    return optax.GradientTransformation(adam.init, update), counts


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
@pytest.mark.parametrize(("skip", "fast"), [(gradient, False), (step, True)])
@pytest.mark.sampled
def test_the_optimizer_runs_once_a_step_and_is_traced_once_a_program(nest, skip, fast):
    inner, counts = counting()
    tx, params = nest(skip, inner), {"w": jnp.ones((3, 2))}
    state, call, runs = tx.init(params), jax.jit(partial(taken, tx, fast=fast)), []
    for _ in range(4):
        before = counts["runs"]
        _, state = call(params, state, params)
        jax.effects_barrier()
        runs.append(counts["runs"] - before)
    assert runs == ([0, 1, 0, 1] if "mini_step" in gcx.metrics(state) else [1] * 4)
    assert counts["traces"] == 1


# --- verdicts that the random machine does not draw ----------------------------------------------------------------------


def counted(state):
    """The skips of each guard, from the outermost on, and those in a row."""
    guards = state.outer + state.guards
    return [int(x.skipped["nonfinite"]) for x in guards], int(state.consecutive_skips)


SGD = optax.sgd(1.0)
BREAKS = optax.chain(
    optax.sgd(1.0),
    optax.stateless(lambda u, _: jax.tree.map(lambda x: jnp.where(x < -50, jnp.nan, x), u)),
)


FLUSH = {"flush": True}


# Transformation, gradients, the parameter at the end, the steps, and the counts of each guard.
VERDICTS = {
    "what a dropped window leaves behind harms no window of one micro-batch": (
        step(acc(SGD, 3)), [3e38, 3e38, 3e38, (1, FLUSH)], -1, [0, 0, 0, 1], ([1], 0),
    ),
    "a window that a flush cannot close is dropped": (
        step(acc(SGD, 10)), [3e38, 3e38, (1, FLUSH), (1, FLUSH)], -1, [0, 0, 0, 1], ([1], 0),
    ),
    "the outermost guard around that checks it counts the gradient of a window": (
        gradient(gradient(acc(SGD, 2, reduction="sum"))),
        [1.5e19, 1.5e19, 1, 1], -2, [0, 0, 0, 1], ([1, 0], 0),  # squares up to 1.8e19
    ),
    # A bad step halves the scale, and two good ones in a row double it.
    "a loss scale around a window counts micro-batches": (
        scale(acc(BREAKS)), [792, 792, 4, 12, 8, 8], -3, [0, 0, 0, 1, 0, 1], ([1], 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("tx", "stream", "param", "steps", "counts"), VERDICTS.values(), ids=VERDICTS
)
@pytest.mark.sampled
def test_one_guard_counts_a_skip(tx, stream, param, steps, counts):
    found, state, rows = calls(tx, stream)
    assert (found, rows, counted(state)) == (param, steps, counts)


def test_a_guard_that_does_not_reject_a_skipped_step_is_as_it_was():
    rule = gcx.thresholds.mean_std(6.0, window=8, warmup_steps=4)
    tx = gcx.skip_spikes(step(BREAKS), norm=rule)
    params, update = np.zeros(1, "f"), jax.jit(tx.update)
    _, state = update(np.float32([2.0]), tx.init(params), params)
    _, after = update(np.float32([99.0]), state, params)
    assert after.guards[1].skipped["nonfinite"] == 1
    chex.assert_trees_all_equal(after.guards[0], state.guards[0])
    assert (after.grad_norm, after.consecutive_skips) == (99, 1)


# --- names, leaves, extra arguments ---------------------------------------------------------


def test_an_update_has_a_name():
    tx, params = gradient(acc(SGD)), jnp.ones(2)
    update = jax.named_call(tx.update)
    chex.assert_trees_all_equal(
        update(params, tx.init(params), params), tx.update(params, tx.init(params), params)
    )
    assert tx.update.__name__ == "update"


either = pytest.mark.parametrize("tx", [gradient(SGD), acc(SGD)], ids=["guard", "accumulation"])


@either
def test_gradients_that_are_not_averaged_over_devices_are_an_error_that_says_so(tx):
    @sharded((WHOLE, SHARDS), WHOLE)
    def step(params, grads):
        return gcx.apply_gradients(tx, grads, tx.init(params), params)[0]

    with pytest.raises(TypeError, match="`updates` must be the same on all devices.*pmean"):
        step(jnp.ones(2), jnp.ones(16))


@pytest.mark.parametrize("name", ["value", "loss"])
def test_a_loss_may_be_called_either(name):
    params = jnp.ones(2)
    for tx in (gradient(SGD), gcx.skip_spikes(SGD, loss=5.0), gcx.dynamic_loss_scale(SGD)):
        for loss, skips in ((jnp.nan, 1), (1.0, 0)):
            _, state = tx.update(params, tx.init(params), params, **{name: loss})
            assert gcx.metrics(state)["skipped_nonfinite"] == skips


# --- windows of one ---------------------------------------------------------------------------


def test_an_open_window_goes_on_with_windows_of_one():
    params = jnp.zeros(2)
    state = acc(SGD, 4).init(params)
    for grad in (1.0, 3.0):
        _, state = acc(SGD, 4).update(jnp.full(2, grad), state, params)
    for grad, expected in ((8.0, -4.0), (5.0, -9.0)):  # the mean of 1, 3 and 8
        params, state = gcx.apply_gradients(acc(SGD, 1), jnp.full(2, grad), state, params)
        assert params.tolist() == [expected, expected]
    assert gcx.diagnostics.accumulation_stats(state).total_updates == 2


def test_a_state_with_another_accumulation_raises():
    plain = gcx.skip_nonfinite(optax.sgd(0.1))
    window = gcx.accumulate_gradients(plain, 4)
    params = jnp.ones(2)
    for tx, other in ((plain, window), (window, plain)):
        with pytest.raises(TypeError, match="`state` must be the state of this transformation"):
            tx.update(params, other.init(params), params)
