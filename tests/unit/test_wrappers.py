"""Guards and accumulations in one another: one step of the optimizer, one count for a skip.

They pass on what they do not use. Other nests: tests/conformance/test_gates_machine.py.
"""

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

skip = gcx.skip_nonfinite
step = partial(skip, check="step")
spikes = partial(gcx.skip_spikes, norm=1e4)
skip_if = partial(gcx.skip_if, predicate=lambda *args, **kwargs: False)
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
    NESTED: optax.chain(gcx.clip_by_global_norm(1e3), skip(acc(step(SMOOTH)))),
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
    assert slope_of(skip(inner))(jnp.array([jnp.nan, 4.0]))[1] == 0.0


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
@pytest.mark.parametrize(("skip", "fast"), [(skip, False), (step, True)])
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
    guards = state.outer_guards + state.inner_guards
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
        skip(skip(acc(SGD, 2, reduction="sum"))),
        [1.5e19, 1.5e19, 1, 1], -2, [0, 0, 0, 1], ([1, 0], 0),  # squares up to 1.8e19
    ),
    "a micro-batch and a window that are rejected in one call are one skip": (
        skip(acc(SGD, 9, reduction="sum")), [1.5e19, 1.5e19, (3e19, FLUSH)], 0, [0] * 3, ([1], 1),
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
    assert after.inner_guards[1].skipped["nonfinite"] == 1
    chex.assert_trees_all_equal(after.inner_guards[0], state.inner_guards[0])
    assert (after.grad_norm, after.consecutive_skips) == (99, 1)


# --- names, leaves, extra arguments ---------------------------------------------------------


def test_an_update_has_a_name():
    tx, params = skip(acc(SGD)), jnp.ones(2)
    update = jax.named_call(tx.update)
    chex.assert_trees_all_equal(
        update(params, tx.init(params), params), tx.update(params, tx.init(params), params)
    )
    assert tx.update.__name__ == "update"


either = pytest.mark.parametrize("tx", [skip(SGD), acc(SGD)], ids=["guard", "accumulation"])


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
    for tx in (skip(SGD), gcx.skip_spikes(SGD, loss=5.0), gcx.dynamic_loss_scale(SGD)):
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


def reader(name):
    """An inner transformation whose state is the last extra argument of this name, else -1."""

    def update(updates, state, params=None, **extra_args):
        return updates, jnp.float32(extra_args.get(name, -1))

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(-1), update)


# --- what is inside -----------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [skip, step, spikes, skip_if, gcx.dynamic_loss_scale])
def test_a_guard_that_does_not_see_the_windows_inside_it_raises(guard):
    # With a guard around a chain, two gradients of 1.5e19 would give a step of 3e19.
    for wrap in (
        gcx.watch,
        lambda tx: optax.chain(gcx.clip_by_global_norm(1.0), tx),
        lambda tx: optax.named_chain(("a", optax.masked(tx, True))),
        lambda tx: optax.partition({"a": tx, "b": SGD}, "a"),
    ):
        for inside in (acc(SGD, 4), skip(acc(SGD, 4))):
            with pytest.raises(TypeError, match="`inner` must .*accumulation.*directly around"):
                guard(wrap(inside)).init(jnp.ones(2))
    guard(acc(gcx.watch(SGD), 4)).init(jnp.ones(2))


@pytest.mark.parametrize("shape", [(1, 2), (1,), (3,)])
@pytest.mark.parametrize("wrap", [skip, step, spikes, gcx.dynamic_loss_scale, acc])
@pytest.mark.sampled
def test_gradients_of_another_shape_than_their_parameters_raise(wrap, shape):
    tx, params = wrap(SGD, every=2) if wrap is acc else wrap(SGD), jnp.zeros(2)
    for call in (tx.update, partial(gcx.apply_gradients, tx)):
        with pytest.raises(TypeError, match="`(updates|grads)` must.*shape"):
            jax.jit(call)(jnp.ones(shape), tx.init(params), params)


def test_errors_name_the_guard_or_accumulation_that_raises():
    params = jnp.ones(2)
    for tx, extra_args, name in [
        (skip(gcx.skip_spikes(SGD, loss=4.0)), {}, "skip_spikes"),
        (
            gcx.dynamic_loss_scale(gcx.skip_spikes(SGD, norm=1.0, trainable=[True])),
            {},
            "skip_spikes",
        ),
        (skip(acc(SGD, 2)), {"weight": "many"}, "accumulate_gradients"),
        (acc(skip(SGD), 2), {"flush": 1}, "accumulate_gradients"),
    ]:
        state = tx.init(params)
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            tx.update(params, state, params, **extra_args)


# --- extra arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("value", "bfloat16"), ("loss", "int32")])
def test_the_inner_transformation_receives_the_weighted_mean_loss_of_the_window(name, dtype):
    losses, weights = np.array([8, 4, 2, 1], dtype), [1.0, 2.0, 0.0, 5.0]
    tx, params = acc(reader(name), 4), jnp.ones(2)
    for weighted in (False, True):
        state = tx.init(params)
        update = jax.jit(tx.update)
        for loss, weight in zip(losses, weights, strict=True):
            extra_args = {name: loss} | ({"weight": weight} if weighted else {})
            _, state = update(params, state, params, **extra_args)
        mean = np.average(losses.astype(float), weights=weights if weighted else None)
        np.testing.assert_allclose(state.inner_state, mean, rtol=1e-6)


def test_the_mean_loss_leaves_out_skipped_micro_batches_and_ends_with_its_window():
    tx = skip(acc(reader("value"), 2))
    rows = [(1, 2.0), (np.nan, 50.0), (1, 4.0), (1, 7.0), (1, 9.0), (1, None), (1, 5.0)]
    stream = [(g, {} if v is None else {"value": v}) for g, v in rows]
    stops = range(1, len(stream) + 1)
    found = [float(calls(tx, stream[:i])[1].inner_state) for i in stops]
    assert found == [-1, -1, 3, 3, 8, 8, 5]


def test_a_loss_that_varies_over_devices_raises_in_an_accumulation():
    tx = acc(SGD, 2)

    @sharded((WHOLE, SHARDS), WHOLE)
    def update(params, losses):
        return tx.update(params, tx.init(params), params, value=losses[0])[0]

    with pytest.raises(TypeError, match="^accumulate_gradients: `value` must be.*pmean"):
        update(jnp.ones(2), jnp.ones(8))


def test_traps_warn_at_the_line_of_the_user():
    params = jnp.ones(2)
    for tx, extra_args, message in [
        (skip(optax.identity()), {}, "contains no optimizer"),
        (acc(optax.identity(), 1), {}, "contains no optimizer"),
        (skip(SGD), {"weight": 2.0}, "No accumulation reads"),
        (skip(optax.MultiSteps(SGD, 2)), {"weight": 2.0}, "No accumulation reads"),
    ]:
        for apply in (gcx.apply_gradients, jax.jit(gcx.apply_gradients, static_argnums=0)):
            with pytest.warns(UserWarning, match=message) as found:
                apply(tx, params, tx.init(params), params, **extra_args)
            assert found[0].filename == __file__


# --- flush ------------------------------------------------------------------------------------------


def test_stats_of_a_state_with_two_accumulations_raise():
    tx = optax.partition({"a": acc(SGD, 2), "b": acc(SGD, 3)}, {"a": "a", "b": "b"})
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    _, state = tx.update(params, tx.init(params), params)
    with pytest.raises(TypeError, match="`state` must be a state with exactly one.* with 2"):
        gcx.diagnostics.accumulation_stats(state)


# --- counts -------------------------------------------------------------------------------------------


def test_a_micro_batch_of_weight_0_is_not_checked_and_has_no_norm():
    _, state, _ = calls(skip(acc(SGD, 3)), [(1.0, {"weight": 1.0}), (np.nan, {"weight": 0.0})])
    found = gcx.metrics(state)
    assert (found["skipped_nonfinite"], found["mini_step"], found["grad_norm"]) == (0, 2, 1.0)


def test_without_an_accumulation_a_gradient_of_weight_0_is_checked():
    with pytest.warns(UserWarning, match="No accumulation"):
        assert calls(skip(SGD), [(np.nan, {"weight": 0.0})])[2] == [0]


def test_has_updated_knows_the_states_of_optax():
    multi_steps = optax.MultiSteps(SGD, 2).gradient_transformation()
    assert calls(multi_steps, [1.0] * 4)[2] == [0, 1, 0, 1]
    assert calls(acc(optax.apply_if_finite(SGD, 9), 1), [1.0, np.nan, 1.0])[2] == [1, 0, 1]
