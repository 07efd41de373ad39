"""`accumulate_gradients` and its companions: what a window is, and what comes out of it."""

import functools
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
import trees

INT32_MAX = np.iinfo(np.int32).max


def params_like(dtype="float32"):
    return {"w": trees.normal((3, 2), dtype, seed=100), "b": [None, trees.normal((), dtype)]}


def gradients(seed, params):
    return jax.tree.map(lambda p: trees.normal(p.shape, p.dtype, seed=seed), params)


def bias_correction(params, value):
    return jax.tree.map(lambda p: jnp.full_like(p, value), params)


def run(tx, params, grads, extra_args=None, state=None):
    """The updates and the state after each micro-batch; one compiled program, traced once."""
    tx = optax.with_extra_args_support(tx)
    traces = []

    @jax.jit
    def update(grads, state, extra_args):
        traces.append(1)
        return tx.update(grads, state, params, **extra_args)

    state = tx.init(params) if state is None else state
    updates, states = [], []
    for i, g in enumerate(grads):
        out, state = update(g, state, extra_args[i] if extra_args else {})
        updates.append(out)
        states.append(state)
    assert len(traces) == 1
    return updates, states


def emissions(states):
    return [bool(gcx.has_updated(s)) for s in states]


def is_zero(tree):
    return not any(np.any(x) for x in jax.tree.leaves(tree))


def weighted_mean(grads, weights=None):
    """In float64 NumPy."""
    return jax.tree.map(
        lambda *g: np.average([np.asarray(x, np.float64) for x in g], 0, weights), *grads
    )


def watcher(seen):
    """An inner optimizer that passes gradients through and tells whenever it really runs."""

    def update(updates, state, params=None, **extra_args):
        jax.debug.callback(lambda count: seen.append(int(count)), state)
        return updates, state + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)


def recorder():
    """An inner optimizer whose state is the `value` it was last given."""

    def update(updates, state, params=None, *, value, **extra_args):
        return updates, jnp.asarray(value, jnp.float32)

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(-1), update)


# --- equal to MultiSteps on ordinary gradients ----------------------------------------------

INNER = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
    "clip_adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("inner", INNER)
def test_mean_and_sum_equal_those_of_multi_steps(inner, reduction):
    params = params_like()
    grads = [gradients(i, params) for i in range(7)]
    ours = gcx.accumulate_gradients(INNER[inner](), 3, reduction=reduction)
    theirs = optax.MultiSteps(INNER[inner](), 3, use_grad_mean=reduction == "mean")
    updates, states = run(ours, params, grads)
    wanted, their_states = run(theirs.gradient_transformation(), params, grads)
    # MultiSteps keeps a running mean, which rounds otherwise; Adam divides by a root of it.
    chex.assert_trees_all_close(updates, wanted, rtol=1e-5, atol=1e-7)
    for name in ("mini_step", "gradient_step", "inner_opt_state"):
        chex.assert_trees_all_close(
            getattr(states[-1], name), getattr(their_states[-1], name), rtol=1e-5, atol=1e-7
        )
    chex.assert_trees_all_equal_shapes_and_dtypes(states[-1].acc_grads, their_states[-1].acc_grads)
    assert emissions(states) == [bool(theirs.has_updated(s)) for s in their_states[:3]] + [
        False,
        False,
        True,
        False,
    ]


def test_a_changing_schedule_equals_that_of_multi_steps():
    params = params_like()
    grads = [gradients(i, params) for i in range(10)]

    def every(gradient_step):
        return jnp.where(gradient_step < 2, 2, 3)

    updates, states = run(gcx.accumulate_gradients(optax.adam(0.1), every), params, grads)
    theirs = optax.MultiSteps(optax.adam(0.1), every).gradient_transformation()
    wanted, _ = run(theirs, params, grads)
    chex.assert_trees_all_close(updates, wanted, rtol=1e-5, atol=1e-7)
    assert [int(s.gradient_step) for s in states] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4]


# --- the length of a window -----------------------------------------------------------------


@pytest.mark.parametrize("every", [3, np.int64(3), np.uint8(3), jnp.int32(3), np.array(3)])
def test_every_may_be_any_integer(every):
    params = params_like()
    _, states = run(gcx.accumulate_gradients(optax.sgd(1.0), every), params, [params] * 7)
    assert emissions(states) == [False, False, True] * 2 + [False]
    assert [int(s.mini_step) for s in states] == [1, 2, 0, 1, 2, 0, 1]


def test_every_of_one_is_the_inner_optimizer():
    params = params_like()
    grads = [gradients(i, params) for i in range(3)]
    updates, states = run(gcx.accumulate_gradients(optax.adam(0.1), 1), params, grads)
    wanted, _ = run(optax.adam(0.1), params, grads)
    chex.assert_trees_all_close(updates, wanted, rtol=1e-6)
    assert emissions(states) == [True] * 3


def test_every_may_be_traced_under_inject_hyperparams():
    params = params_like()
    make = optax.inject_hyperparams(gcx.accumulate_gradients)
    tx = make(optax.sgd(1.0), every=2)
    _, states = run(tx, params, [params] * 4)
    assert emissions(states) == [False, True, False, True]
    assert jnp.issubdtype(states[-1].hyperparams["every"].dtype, jnp.integer)
    state = states[-1]
    state.hyperparams["every"] = jnp.asarray(3, state.hyperparams["every"].dtype)
    _, states = run(tx, params, [params] * 6, state=state)
    assert emissions(states) == [False, False, True] * 2


def test_a_schedule_sees_the_gradient_step_and_may_shrink_the_window():
    lengths = jnp.array([4, 2, 1, 1])
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(1.0), lambda step: lengths[step])
    _, states = run(tx, params, [params] * 8)
    assert emissions(states) == [False] * 3 + [True, False, True, True, True]
    assert [int(s.accumulation_steps) for s in states] == [4, 4, 4, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("length", [0, -3])
def test_a_traced_schedule_below_one_counts_as_one(length):
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(1.0), lambda step: 0 * step + length)
    state = jax.jit(tx.init)(params)
    for _ in range(2):
        _, state = jax.jit(tx.update)(params, state, params)
        assert gcx.has_updated(state)


@pytest.mark.parametrize("length", ["8", [8], jnp.ones(2), None, -3, 0, True, np.nan])
def test_a_schedule_that_returns_no_length_is_refused(length):
    tx = gcx.accumulate_gradients(optax.sgd(1.0), lambda step: length)
    message = (
        r"accumulate_gradients: `every\(gradient_step\)` must be a number >= 1, got .*window\."
    )
    with pytest.raises((TypeError, ValueError), match=message):
        tx.init(params_like())


# --- when the inner optimizer runs, and what it sees ----------------------------------------


@pytest.mark.parametrize("fast", [False, True], ids=["update", "apply_gradients"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_inner_optimizer_runs_only_at_emission(wrap, fast):
    seen, params = [], params_like()
    tx = gcx.accumulate_gradients(watcher(seen), 3)
    step = wrap(functools.partial(gcx.apply_gradients, tx) if fast else tx.update)
    state = tx.init(params)
    for _ in range(8):
        _, state = step(params, state, params)
    jax.effects_barrier()
    assert seen == [0, 1]


def test_the_inner_optimizer_runs_only_at_emission_inside_scan():
    seen, params = [], params_like()
    tx = gcx.accumulate_gradients(watcher(seen), 4)

    @jax.jit
    def epoch(params, state):
        def step(carry, _):
            params, state = carry
            return gcx.apply_gradients(tx, params, state, params), gcx.has_updated(state)

        return jax.lax.scan(step, (params, state), length=11)

    epoch(params, tx.init(params))
    jax.effects_barrier()
    assert seen == [0, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "complex64"])
def test_the_inner_optimizer_sees_the_precision_of_the_accumulator(dtype):
    seen = []

    def update(updates, state, params=None):
        seen.append({x.dtype for x in jax.tree.leaves(updates)})
        return updates, state

    params = params_like(dtype)
    tx = gcx.accumulate_gradients(optax.GradientTransformation(lambda p: (), update), 2)
    updates, states = run(tx, params, [params] * 2)
    wide = jnp.dtype("complex64" if dtype == "complex64" else "float32")
    assert seen[-1] == {wide}
    chex.assert_trees_all_equal_dtypes(*updates, params)
    assert {x.dtype for x in jax.tree.leaves(states[-1].acc_grads)} == {wide}


def test_small_bfloat16_gradients_are_not_lost_in_a_long_window():
    # 1 + 2^-9 is 1 in bfloat16: added up there, all but the first would vanish.
    params = {"w": jnp.zeros((2,), jnp.bfloat16)}
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 257, reduction="sum")
    state = tx.init(params)
    _, state = tx.update(bias_correction(params, 1.0), state, params)
    update = jax.jit(tx.update)
    for _ in range(256):
        updates, state = update(bias_correction(params, 2.0**-9), state, params)
    np.testing.assert_array_equal(updates["w"], jnp.full((2,), -1.5, jnp.bfloat16))


def test_update_dtypes_are_those_the_inner_optimizer_gives_on_plain_gradients():
    params = {"low": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2), "half": jnp.ones(2, "float16")}
    inner = optax.adamw(0.1)
    plain, _ = inner.update(params, inner.init(params), params)
    for updates in run(gcx.accumulate_gradients(inner, 2), params, [params] * 2)[0]:
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, plain)


def test_accumulator_dtype_can_be_chosen():
    params = params_like("bfloat16")
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2, accumulator_dtype=jnp.bfloat16)
    _, states = run(tx, params, [params] * 2)
    chex.assert_trees_all_equal_dtypes(states[-1].acc_grads, params)


BY_LEAF = {"w": jnp.bfloat16, "b": "float32"}


@pytest.mark.parametrize("choice", [BY_LEAF, lambda path: BY_LEAF[path]], ids=["tree", "function"])
def test_accumulator_dtype_can_be_chosen_leaf_by_leaf(choice):
    # 1, then 255 times 2^-9: each is a quarter of a unit of bfloat16, and lost there alone.
    params = {"w": jnp.zeros(2), "b": jnp.zeros(2)}
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 256, reduction="sum", accumulator_dtype=choice)
    update, state = jax.jit(tx.update), tx.init(params)
    assert jax.tree.map(lambda x: x.dtype.name, state.acc_grads) == {
        "w": "bfloat16",
        "b": "float32",
    }
    grads = jax.tree.map(jnp.ones_like, params)
    for scale in (1.0, *[2.0**-9] * 255):
        updates, state = update(jax.tree.map(lambda x, c=scale: c * x, grads), state, params)
    np.testing.assert_array_equal(updates["w"], np.float32([-1, -1]))
    np.testing.assert_array_equal(updates["b"], np.float32([-1, -1]) * (1 + 255 * 2.0**-9))
    assert update._cache_size() == 1


def test_a_choice_of_dtypes_keeps_complex_and_64_bit_leaves():
    with compat.x64():
        params = {"c": jnp.ones(2, "complex64"), "d": jnp.ones(2, "float64"), "n": None}
        dtypes = jax.tree.map(lambda _: jnp.bfloat16, params)
        tx = gcx.accumulate_gradients(optax.sgd(1.0), 2, accumulator_dtype=dtypes)
        acc = tx.init(params).acc_grads
        assert (acc["c"].dtype, acc["d"].dtype) == (jnp.complex64, jnp.float64)


def test_extra_arguments_reach_the_inner_optimizer_as_the_last_micro_batch_brings_them():
    params = params_like()
    tx = gcx.accumulate_gradients(recorder(), 2)
    values = [{"value": jnp.float32(v)} for v in (10, 11, 12, 13)]
    _, states = run(tx, params, [params] * 4, values)
    assert [float(s.inner_opt_state) for s in states] == [-1, 11, 11, 13]


def test_weight_and_flush_do_not_reach_the_inner_optimizer():
    def update(updates, state, params=None, **extra_args):
        assert set(extra_args) == {"value"}
        return updates, state

    params = params_like()
    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    extra = {"value": jnp.float32(1), "weight": jnp.float32(2), "flush": jnp.array(False)}
    run(gcx.accumulate_gradients(inner, 2), params, [params] * 2, [extra] * 2)


def test_updates_are_zero_between_emissions():
    params = params_like("bfloat16")
    updates, states = run(gcx.accumulate_gradients(optax.adamw(0.1), 3), params, [params] * 6)
    assert [is_zero(u) for u in updates] == [True, True, False] * 2
    assert emissions(states) == [False, False, True] * 2


# --- windows of one, and windows that the host closes ----------------------------------------


@pytest.mark.parametrize("fast", [False, True], ids=["update", "apply_gradients"])
@pytest.mark.parametrize("make", [lambda tx: tx, gcx.skip_nonfinite], ids=["plain", "guarded"])
def test_the_host_may_say_when_a_window_closes(make, fast):
    params = params_like()
    counting = make(gcx.accumulate_gradients(optax.adam(0.1), 3))
    told = make(gcx.accumulate_gradients(optax.adam(0.1), 1_000))

    def run_with(tx, **extra_args):
        def step(params, state, grads, **extra_args):
            if fast:
                return gcx.apply_gradients(tx, grads, state, params, **extra_args)
            updates, state = tx.update(grads, state, params, **extra_args)
            return optax.apply_updates(params, updates), state

        step = jax.jit(step, static_argnames="emit")
        now, state = params, tx.init(params)
        for i in range(7):
            given = {"emit": i % 3 == 2} if extra_args else {}
            now, state = step(now, state, gradients(i, params), weight=1.0 + i, **given)
        return now, state

    ours, state = run_with(told, emit=True)
    wanted, _ = run_with(counting)
    chex.assert_trees_all_close(ours, wanted, rtol=1e-5, atol=1e-7)
    assert gcx.diagnostics.accumulation_stats(state).total_updates == 2


def test_a_window_of_zero_weight_that_the_host_closes_emits_nothing():
    params = params_like()
    tx = gcx.accumulate_gradients(optax.adam(0.1), 2)
    step = jax.jit(tx.update, static_argnames="emit")
    updates, state = step(params, tx.init(params), params, weight=jnp.float32(0), emit=True)
    assert is_zero(updates) and not bool(gcx.has_updated(state))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_of_one_weighs_and_skips_as_a_longer_window_does(reduction):
    params = params_like()
    grads = [gradients(i, params) for i in range(4)]
    grads[1] = bias_correction(params, jnp.nan)
    extra = [{"weight": jnp.float32(w), "flush": jnp.array(w == 2)} for w in (3, 0, 2, 1)]
    one = gcx.accumulate_gradients(optax.trace(0.9), 1, reduction=reduction)
    scheduled = gcx.accumulate_gradients(optax.trace(0.9), lambda step: 1, reduction=reduction)
    ours, states = run(one, params, grads, extra)
    wanted, theirs = run(scheduled, params, grads, extra)
    chex.assert_trees_all_close(ours, wanted, rtol=1e-6)
    assert states[-1].acc_grads == () and emissions(states) == [True, False, True, True]
    for name in ("mini_step", "gradient_step", "micro_batch_count", "emitted"):
        chex.assert_trees_all_equal(getattr(states[-1], name), getattr(theirs[-1], name))
    updates, flushed = gcx.flush(one, states[-1], params)
    assert is_zero(updates)
    chex.assert_trees_all_equal(flushed, states[-1])


# --- leaves that are not gradients ----------------------------------------------------------


def by_leaf(path):
    return {"most": "max", "now": "last", "count": "sum"}.get(path.split("/")[-1], "mean")


@pytest.mark.parametrize(
    "reduction", [by_leaf, {"w": "mean", "stats": {"most": "max", "now": "last", "count": "sum"}}]
)
def test_each_leaf_may_have_its_own_reduction(reduction):
    zero = jnp.zeros(())
    params = {"w": zero, "stats": {"most": zero, "now": zero, "count": zero}}
    tx = gcx.accumulate_gradients(optax.identity(), 3, reduction=reduction)
    grads = [jax.tree.map(lambda _, v=v: jnp.float32(v), params) for v in (-1, -4, 7, -2, 5, 3)]
    extra = [{"weight": jnp.float32(w)} for w in (2, 3, 0, 2, 1, 0)]
    updates, _ = run(tx, params, grads, extra)
    first = {"w": -14 / 5, "stats": {"most": -1.0, "now": -4.0, "count": -14.0}}
    second = {"w": 1 / 3, "stats": {"most": 5.0, "now": 5.0, "count": 1.0}}
    chex.assert_trees_all_close([updates[2], updates[5]], [first, second], rtol=1e-6)


def test_accumulated_gradients_takes_the_same_reduction():
    params = {"w": jnp.zeros(()), "most": jnp.zeros(())}
    tx = gcx.accumulate_gradients(optax.identity(), 3, reduction=by_leaf)
    _, states = run(tx, params, [{"w": jnp.float32(v), "most": jnp.float32(v)} for v in (4, 2)])
    mean = gcx.accumulated_gradients(states[-1], reduction=by_leaf)
    assert (float(mean["w"]), float(mean["most"])) == (3, 4)


# --- weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weighted_window_is_the_weighted_mean_or_sum(reduction):
    params, weights = params_like(), [1.0, 9.0, 2.5]
    grads = [gradients(i, params) for i in range(3)]
    tx = gcx.accumulate_gradients(optax.identity(), 3, reduction=reduction)
    updates, _ = run(tx, params, grads, [{"weight": jnp.float32(w)} for w in weights])
    scale = 1 if reduction == "mean" else sum(weights)
    wanted = jax.tree.map(lambda g: g * scale, weighted_mean(grads, weights))
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, updates[-1]), wanted, rtol=1e-5, atol=1e-6 * scale
    )


def test_weights_may_be_integers_and_change_nothing_when_equal():
    params = params_like()
    grads = [gradients(i, params) for i in range(2)]
    tx = gcx.accumulate_gradients(optax.identity(), 2)
    plain, _ = run(tx, params, grads)
    weighted, _ = run(tx, params, grads, [{"weight": 4}] * 2)
    chex.assert_trees_all_close(weighted, plain, rtol=1e-6)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_micro_batch_of_zero_weight_counts_but_adds_nothing(place):
    params = params_like()
    grads = [gradients(i, params) for i in range(3)]
    weights = [1.0, 2.0, 3.0]
    grads[place], weights[place] = bias_correction(params, jnp.nan), 0.0
    tx = gcx.accumulate_gradients(optax.identity(), 3)
    updates, states = run(tx, params, grads, [{"weight": jnp.float32(w)} for w in weights])
    assert emissions(states) == [False, False, True]
    rest = [i for i in range(3) if i != place]
    wanted = weighted_mean([grads[i] for i in rest], [weights[i] for i in rest])
    chex.assert_trees_all_close(jax.tree.map(np.float64, updates[-1]), wanted, rtol=1e-5, atol=1e-6)


def test_a_window_of_zero_weight_emits_nothing_and_leaves_the_inner_state_alone():
    seen, params = [], params_like()
    tx = gcx.accumulate_gradients(optax.chain(optax.adam(0.1), watcher(seen)), 2)
    grads = [gradients(i, params) for i in range(6)]
    grads[2] = grads[3] = bias_correction(params, jnp.nan)
    extra = [{"weight": jnp.float32(w)} for w in (1, 1, 0, 0, 1, 1)]
    updates, states = run(tx, params, grads, extra)
    jax.effects_barrier()
    assert emissions(states) == [False, True, False, False, False, True]
    assert seen == [0, 1]
    assert is_zero(updates[3])
    chex.assert_trees_all_equal(states[3].inner_opt_state, states[1].inner_opt_state)
    assert [int(s.gradient_step) for s in states] == [0, 1, 1, 1, 1, 2]
    assert [int(s.mini_step) for s in states] == [1, 0, 1, 0, 1, 0]
    chex.assert_tree_all_finite(updates[-1])


# --- a bad micro-batch ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_micro_batch_spoils_only_its_own_window(bad, place):
    params = params_like()
    grads = [gradients(i, params) for i in range(6)]
    clean = list(grads)
    grads[place] = bias_correction(params, bad)
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 3)
    updates, _ = run(tx, params, grads)
    wanted, _ = run(tx, params, clean)
    assert not np.isfinite(updates[2]["w"]).any()
    chex.assert_trees_all_equal(updates[3:], wanted[3:])


def test_a_nan_weight_spoils_only_its_own_window():
    params = params_like()
    grads = [gradients(i, params) for i in range(4)]
    tx = gcx.accumulate_gradients(optax.adam(0.1), 2)
    extra = [{"weight": jnp.float32(w)} for w in (jnp.nan, 1, 1, 1)]
    updates, states = run(tx, params, grads, extra)
    assert emissions(states) == [False, False, False, True]
    chex.assert_tree_all_finite((updates, states[-1].inner_opt_state))


def test_a_guard_inside_drops_the_window_for_a_bad_loss_of_its_last_micro_batch():
    params = params_like()
    tx = gcx.accumulate_gradients(gcx.skip_nonfinite(optax.adam(0.1)), 2)
    values = [{"value": jnp.float32(v)} for v in (jnp.nan, 1, 1, jnp.nan)]
    updates, _ = run(tx, params, [params] * 4, values)
    assert [is_zero(u) for u in updates] == [True, False, True, True]


# --- flush ----------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_the_flush_argument_emits_now_divided_by_what_was_accumulated(traced):
    params = params_like()
    grads = [gradients(i, params) for i in range(3)]
    tx = gcx.accumulate_gradients(optax.identity(), 100)
    state = tx.init(params)
    for i, g in enumerate(grads):
        flush = i == 2
        if traced:
            updates, state = jax.jit(tx.update)(g, state, params, flush=jnp.array(flush))
        else:
            updates, state = tx.update(g, state, params, flush=flush)
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, updates), weighted_mean(grads), rtol=1e-5, atol=1e-6
    )
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    assert bool(gcx.has_updated(state))


def test_flush_emits_the_open_window_by_its_weights():
    params = params_like()
    grads = [gradients(i, params) for i in range(2)]
    tx = gcx.accumulate_gradients(optax.identity(), 5)
    _, states = run(tx, params, grads, [{"weight": jnp.float32(w)} for w in (1, 7)])
    updates, state = jax.jit(lambda s: gcx.flush(tx, s, params))(states[-1])
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, updates), weighted_mean(grads, [1, 7]), rtol=1e-5, atol=1e-6
    )
    assert bool(gcx.has_updated(state))
    assert int(state.micro_batch_count) == 2  # a flush is no micro-batch


def test_flush_of_a_sum_is_the_sum_so_far():
    params = params_like()
    tx = gcx.accumulate_gradients(optax.identity(), 5, reduction="sum")
    _, states = run(tx, params, [bias_correction(params, 1.5)] * 2)
    updates, _ = gcx.flush(tx, states[-1], params)
    chex.assert_trees_all_equal(updates, bias_correction(params, 3.0))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("seen", [0, 2], ids=["from the start", "after a window"])
def test_flush_of_an_empty_window_is_no_op(wrap, seen):
    params, calls = params_like(), []
    inner = optax.chain(optax.adam(0.1), watcher(calls))
    # The window grows after the first emission: that is not to be seen before it opens.
    tx = gcx.accumulate_gradients(inner, lambda step: 2 + step, noise_scale_decay=0.9)
    state = tx.init(params)
    for i in range(seen):
        _, state = tx.update(gradients(i, params), state, params)
    updates, flushed = wrap(lambda s: gcx.flush(tx, s, params))(state)
    jax.effects_barrier()
    assert is_zero(updates) and len(calls) == seen // 2
    chex.assert_trees_all_equal(flushed, state)


@pytest.mark.parametrize("guard", [gcx.skip_nonfinite, lambda tx: gcx.skip_large_norm(tx, 1.0)])
def test_flush_of_an_empty_window_changes_nothing_around_it(guard):
    params = params_like()
    tx = optax.chain(optax.trace(0.9), guard(gcx.accumulate_gradients(optax.adam(0.1), 3)))
    _, states = run(tx, params, [bias_correction(params, jnp.nan)] * 2)
    assert int(gcx.metrics(states[-1])["consecutive_skips"]) == 2
    for flush in (gcx.flush, jax.jit(gcx.flush, static_argnums=0)):
        updates, flushed = flush(tx, states[-1], params)
        assert is_zero(updates)
        for ours, before in zip(jax.tree.leaves(flushed), jax.tree.leaves(states[-1]), strict=True):
            np.testing.assert_array_equal(ours, before)


def test_training_goes_on_after_a_flush():
    params = params_like()
    grads = [gradients(i, params) for i in range(5)]
    tx = gcx.accumulate_gradients(optax.identity(), 3)
    updates, states = run(tx, params, grads, [{"flush": jnp.array(i == 1)} for i in range(5)])
    assert emissions(states) == [False, True, False, False, True]
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, updates[-1]), weighted_mean(grads[2:]), rtol=1e-5, atol=1e-6
    )


WRAPPED = {
    "chain": lambda tx: optax.chain(gcx.clip_by_global_norm(1e6), tx),
    "skip_nonfinite": gcx.skip_nonfinite,
    "skip_large_norm": lambda tx: gcx.skip_large_norm(tx, 1e6),
    "masked": lambda tx: optax.masked(tx, True),
    "named_chain": lambda tx: optax.named_chain(("accumulate", tx)),
    "partition": lambda tx: optax.partition({"all": tx}, "all"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_flush_reaches_through_wrappers(name):
    params = params_like()
    tx = WRAPPED[name](gcx.accumulate_gradients(optax.identity(), 5))
    grads = [gradients(i, params) for i in range(2)]
    _, states = run(tx, params, grads)
    updates, state = gcx.flush(tx, states[-1], params)
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, updates), weighted_mean(grads), rtol=1e-5, atol=1e-6
    )
    assert bool(gcx.has_updated(state))
    nothing, state = gcx.flush(tx, state, params)
    assert is_zero(nothing) and bool(gcx.has_updated(state))


def test_an_accumulation_of_some_of_the_leaves_can_be_flushed():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    parts = {"a": gcx.accumulate_gradients(optax.identity(), 5), "b": optax.set_to_zero()}
    tx = optax.partition(parts, {"a": "a", "b": "b"})
    _, state = tx.update(params, tx.init(params), params)
    updates, _ = gcx.flush(tx, state, params)
    chex.assert_trees_all_equal(updates, {"a": jnp.ones(2), "b": jnp.zeros(3)})


def test_flush_hands_extra_arguments_on():
    params = params_like()
    tx = gcx.accumulate_gradients(recorder(), 5)
    _, state = tx.update(params, tx.init(params), params, value=1.0)
    _, state = gcx.flush(tx, state, params, value=7.0)
    assert float(state.inner_opt_state) == 7


def test_flush_of_low_precision_and_integer_parameters():
    params = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.ones((3,), jnp.int32)}
    grads = {"w": jnp.ones(2, jnp.bfloat16), "n": np.zeros((3,), jax.dtypes.float0)}
    tx = gcx.accumulate_gradients(optax.identity(), 5)
    _, state = tx.update(grads, tx.init(params), params)
    updates, _ = gcx.flush(tx, state, params)
    assert updates["w"].dtype == jnp.bfloat16 and updates["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["w"], grads["w"])


# --- reset, has_updated, accumulated gradients, counts --------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [None, *WRAPPED])
def test_reset_discards_the_window_without_a_step(wrapped):
    seen, params = [], params_like()
    tx = gcx.accumulate_gradients(optax.chain(optax.trace(0.9), watcher(seen)), 3)
    tx = tx if wrapped is None else WRAPPED[wrapped](tx)
    grads = [gradients(i, params) for i in range(5)]
    _, states = run(tx, params, grads[:2])
    state = gcx.reset_accumulation(states[-1])
    chex.assert_trees_all_equal_shapes_and_dtypes(state, states[-1])
    updates, states = run(tx, params, grads[2:], state=state)
    jax.effects_barrier()
    fresh, _ = run(gcx.accumulate_gradients(optax.trace(0.9), 3), params, grads[2:])
    chex.assert_trees_all_close(updates, fresh, rtol=1e-6)
    assert seen == [0]
    assert gcx.diagnostics.accumulation_stats(states[-1]).total_micro_batches == 5


def test_reset_after_an_emission_says_that_nothing_was_updated():
    params = params_like()
    _, states = run(gcx.accumulate_gradients(optax.sgd(0.1), 1), params, [params])
    assert bool(gcx.has_updated(states[-1]))
    assert not bool(gcx.has_updated(gcx.reset_accumulation(states[-1])))


def test_has_updated_is_false_at_init():
    params = params_like()
    assert not bool(gcx.has_updated(gcx.accumulate_gradients(optax.sgd(0.1), 1).init(params)))


def test_has_updated_can_be_traced():
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 2)

    def step(state, _):
        _, state = tx.update(params, state, params)
        return state, gcx.has_updated(state)

    _, flags = jax.jit(lambda s: jax.lax.scan(step, s, length=4))(tx.init(params))
    assert flags.tolist() == [False, True, False, True]


def test_accumulated_gradients_is_the_mean_so_far():
    params = params_like()
    grads = [gradients(i, params) for i in range(2)]
    tx = optax.chain(gcx.accumulate_gradients(optax.sgd(0.1), 5))
    _, states = run(tx, params, grads, [{"weight": jnp.float32(w)} for w in (1, 3)])
    mean = gcx.accumulated_gradients(states[-1])
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, mean), weighted_mean(grads, [1, 3]), rtol=1e-5, atol=1e-6
    )
    chex.assert_trees_all_equal_dtypes(mean, states[-1][0].acc_grads)


@pytest.mark.parametrize("case", ["init", "emitted", "zero weight"])
def test_accumulated_gradients_of_an_empty_window_is_an_error_on_the_host_and_zero_in_jit(case):
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 2)
    state = tx.init(params)
    if case == "emitted":
        _, states = run(tx, params, [params] * 2)
        state = states[-1]
    if case == "zero weight":
        _, state = tx.update(bias_correction(params, jnp.nan), state, params, weight=0)
    with pytest.raises(ValueError, match="^accumulated_gradients: `state` must be"):
        gcx.accumulated_gradients(state)
    assert is_zero(jax.jit(gcx.accumulated_gradients)(state))


def test_stats_count_micro_batches_updates_and_parameters():
    params = params_like()
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.adam(0.1), 3))
    _, states = run(tx, params, [params] * 7)
    stats = gcx.diagnostics.accumulation_stats(states[-1])
    assert stats == gcx.diagnostics.AccumulationStats(
        total_micro_batches=7,
        total_updates=2,
        accumulation_steps=3,
        registered_params=2,
        total_param_elements=7,
        effective_batch_multiplier=3,
    )
    assert all(isinstance(x, int) for x in stats)
    traced = jax.jit(gcx.diagnostics.accumulation_stats)(states[-1])
    assert tuple(int(x) for x in traced) == tuple(stats)


def test_counters_saturate():
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 1)
    full = jnp.int32(INT32_MAX)
    state = tx.init(params)._replace(gradient_step=full, micro_batch_count=full)
    _, states = run(tx, params, [params] * 2, state=state)
    assert int(states[-1].gradient_step) == int(states[-1].micro_batch_count) == INT32_MAX
    assert emissions(states) == [True, True]


def test_the_longest_window_does_not_wrap():
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(0.1), INT32_MAX)
    state = tx.init(params)._replace(mini_step=jnp.int32(INT32_MAX - 2), total_weight=jnp.ones(()))
    _, states = run(tx, params, [params] * 3, state=state)
    assert emissions(states) == [False, True, False]
    assert [int(s.mini_step) for s in states] == [INT32_MAX - 1, 0, 1]


def test_metrics_tell_the_place_in_the_window():
    params = params_like()
    tx = optax.chain(gcx.clip_by_global_norm(1.0), gcx.accumulate_gradients(optax.adam(0.1), 2))
    _, states = run(tx, params, [params] * 3)
    told = gcx.metrics(states[-1])
    assert (int(told["mini_step"]), int(told["gradient_step"])) == (1, 1)


# --- alike everywhere -----------------------------------------------------------------------


def test_eager_jit_vmap_and_scan_agree():
    params = params_like()
    tx = gcx.accumulate_gradients(optax.adam(0.1), 2)
    grads = [gradients(i, params) for i in range(4)]
    weights = jnp.array([1.0, 0.0, 2.0, 3.0])
    jitted, states = run(tx, params, grads, [{"weight": w} for w in weights])
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)

    def step(state, batch):
        updates, state = tx.update(batch[0], state, params, weight=batch[1])
        return state, updates

    wanted = jax.tree.map(lambda *u: jnp.stack(u), *jitted)
    state, scanned = jax.jit(lambda s: jax.lax.scan(step, s, (stacked, weights)))(tx.init(params))
    chex.assert_trees_all_close((scanned, state), (wanted, states[-1]), rtol=1e-5, atol=1e-7)

    state = tx.init(params)
    for g, w, expected in zip(grads, weights, jitted, strict=True):
        eager, state = tx.update(g, state, params, weight=w)
        chex.assert_trees_all_close(eager, expected, rtol=1e-5, atol=1e-7)

    def by_row(states, grads, weights):
        return jax.vmap(lambda s, g, w: tx.update(g, s, params, weight=w))(states, grads, weights)

    # Two replicas at different places of their windows: one emits, the other holds.
    pair = jax.tree.map(lambda *x: jnp.stack(x), states[0], states[1])
    twice = jax.tree.map(lambda *x: jnp.stack(x), grads[1], grads[2])
    updates, _ = jax.jit(by_row)(pair, twice, weights[1:3])
    for row, expected in enumerate(jitted[1:3]):
        mine = jax.tree.map(lambda x, row=row: x[row], updates)
        chex.assert_trees_all_close(mine, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("emits", [True, False])
def test_differentiable_through_update_in_both_modes(emits):
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(0.5), 2)
    state = tx.init(params)
    if emits:
        _, state = tx.update(params, state, params, weight=1.0)

    def out(grads, weight):
        updates, after = tx.update(grads, state, params, weight=weight)
        # After an emission the sum means nothing.
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates if emits else after.acc_grads))

    zero, weight = bias_correction(params, 0.0), jnp.float32(3)
    grads = jax.jit(jax.grad(out))(zero, weight)
    wanted = -0.5 * 3 / 4 if emits else 3.0
    chex.assert_trees_all_close(grads, bias_correction(params, wanted), rtol=1e-6)
    slope = jax.jvp(lambda g: out(g, weight), (zero,), (bias_correction(params, 1.0),))[1]
    np.testing.assert_allclose(slope, 7 * wanted, rtol=1e-6)  # 7 elements


def test_state_never_changes_its_structure_shapes_or_dtypes():
    params = params_like("bfloat16")
    tx = gcx.accumulate_gradients(optax.adamw(0.1), 2, noise_scale_decay=0.9)
    _, states = run(tx, params, [params] * 3)
    for state in states:
        chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(params))
    _, state = gcx.flush(tx, states[-1], params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(params))


@pytest.mark.parametrize("name", ["empty", "only_none", "masked", "zero_size", "float0", "scalars"])
def test_any_tree_passes_through(name):
    grads = trees.build(name)
    params = jax.tree.map(
        lambda g: jnp.zeros(g.shape, jnp.int32) if g.dtype == jax.dtypes.float0 else g, grads
    )
    updates, states = run(gcx.accumulate_gradients(optax.identity(), 2), params, [grads] * 2)
    chex.assert_trees_all_equal_structs(updates[0], grads)
    for out, g in zip(jax.tree.leaves(updates[1]), jax.tree.leaves(grads), strict=True):
        assert out.dtype == g.dtype
        np.testing.assert_array_equal(np.asarray(out), np.asarray(g))
    assert emissions(states) == [False, True]


@hypothesis.settings(derandomize=True, max_examples=15, deadline=None)
@hypothesis.given(
    calls=st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from(["step", "flush", "reset"])),
        min_size=1,
        max_size=12,
    )
)
def test_any_sequence_of_steps_flushes_and_resets_follows_the_definition(calls):
    params = {"w": jnp.zeros(2)}
    window, wanted = [], []  # what the definition says, on the host
    tx = MODEL
    state = tx.init(params)
    got = []
    for i, (weight, flush, kind) in enumerate(calls):
        grads = gradients(i, params)
        if kind == "reset":
            state, window = gcx.reset_accumulation(state), []
            continue
        if kind == "flush":
            updates, state = MODEL_FLUSH(state, params)
            closes = True
        else:
            updates, state = MODEL_STEP(
                grads, state, params, weight=jnp.float32(weight), flush=jnp.array(flush)
            )
            window.append((grads, weight))
            closes = flush or len(window) == 3
        emits = closes and sum(w for _, w in window) > 0
        wanted.append(
            weighted_mean(*zip(*window, strict=True)) if emits else bias_correction(params, 0.0)
        )
        got.append(jax.tree.map(np.float64, updates))
        window = [] if closes else window
        assert int(state.mini_step) in (0, len(window))
    chex.assert_trees_all_close(got, jax.tree.map(np.float64, wanted), rtol=1e-5, atol=1e-6)


MODEL = gcx.accumulate_gradients(optax.identity(), 3)
MODEL_STEP = jax.jit(MODEL.update)
MODEL_FLUSH = jax.jit(lambda state, params: gcx.flush(MODEL, state, params))


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("every", 0, ValueError),
        ("every", 2**31, ValueError),
        ("every", 2.0, TypeError),
        ("every", True, TypeError),
        ("every", np.array([2]), TypeError),
        ("reduction", {"w": "mean", "b": "median"}, ValueError),
        ("rounding", "up", ValueError),
        ("inner", "adam", TypeError),
        ("noise_scale_decay", 1.5, ValueError),
    ],
)
def test_bad_arguments_are_refused_when_built(name, value, error):
    with pytest.raises(error, match=rf"^accumulate_gradients: `{name}.*` must be"):
        gcx.accumulate_gradients(**{"inner": optax.sgd(0.1), "every": 2, name: value})


BAD_GRADIENTS = {
    "shape": ({"enc": {"w": jnp.zeros((3, 2))}, "b": jnp.zeros(4)}, "updates['enc']['w']"),
    "missing": ({"b": jnp.zeros(4)}, "params['enc']['w']"),
    "renamed": ({"enc": {"v": jnp.zeros((2, 3))}, "b": jnp.zeros(4)}, "updates['enc']['v']"),
    "list": ({"enc": [jnp.zeros((2, 3))], "b": jnp.zeros(4)}, "updates['enc'][0]"),
    "integer": (
        {"enc": {"w": jnp.zeros((2, 3), jnp.int32)}, "b": jnp.zeros(4)},
        "updates['enc']['w']",
    ),
}
BAD_ARGUMENTS = {
    "weight per example": ({"weight": jnp.ones(8)}, TypeError, "weight"),
    "negative weight": ({"weight": -1}, ValueError, "weight"),
    "flush of shape 1": ({"flush": np.array([True])}, TypeError, "flush"),
    "number as flush": ({"flush": 1.0}, TypeError, "flush"),
    "traced emit": ({"emit": jnp.array(True)}, TypeError, "emit"),
    "both": ({"emit": True, "flush": False}, TypeError, "flush"),
}
NESTED = {"enc": {"w": jnp.zeros((2, 3))}, "b": jnp.zeros(4)}


def refused(grads, error, pattern, **extra_args):
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 2)
    for step in (tx.update, functools.partial(gcx.apply_gradients, tx)):
        with pytest.raises(error, match=f"^accumulate_gradients: .*{pattern}"):
            step(grads, tx.init(NESTED), NESTED, **extra_args)


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_gradients_unlike_the_parameters_name_the_path(name):
    grads, path = BAD_GRADIENTS[name]
    refused(grads, TypeError, re.escape(path))


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_wrong_extra_argument_is_named(name):
    extra_args, error, argument = BAD_ARGUMENTS[name]
    refused(NESTED, error, f"`{argument}` must be", **extra_args)


def test_windows_of_one_cannot_stay_open():
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 1)
    with pytest.raises(TypeError, match="^accumulate_gradients: `emit` must be"):
        tx.update(NESTED, tx.init(NESTED), NESTED, emit=False)


def test_the_argument_of_multi_steps_is_explained():
    with pytest.raises(TypeError, match="every_k_schedule.*`every`"):
        gcx.accumulate_gradients(optax.sgd(0.1), every_k_schedule=4)


def test_state_and_gradients_the_wrong_way_round_are_named():
    params = params_like()
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 2)
    with pytest.raises(TypeError, match="^accumulate_gradients: `updates`.*AccumulationState"):
        tx.update(tx.init(params), params, params)


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(gcx.clip(1.0), tx)])
def test_an_accumulation_inside_another_is_refused(wrap):
    inner = wrap(gcx.accumulate_gradients(optax.sgd(0.1), 2))
    with pytest.raises(TypeError, match="^accumulate_gradients: `inner` must be"):
        gcx.accumulate_gradients(inner, 3).init(params_like())


def test_an_error_of_the_inner_optimizer_is_its_own():
    def update(updates, state, params=None):
        raise TypeError(f"mine on {jax.tree.leaves(updates)[0].dtype}")

    params = params_like("bfloat16")
    tx = gcx.accumulate_gradients(optax.GradientTransformation(lambda params: (), update), 2)
    with pytest.raises(TypeError, match="mine on bfloat16"):  # whose types zero updates need
        tx.update(params, tx.init(params), params)
    with pytest.raises(TypeError, match="mine on float32"):
        gcx.apply_gradients(tx, params, tx.init(params), params, flush=True)


@pytest.mark.parametrize(
    "function",
    [
        gcx.reset_accumulation,
        gcx.diagnostics.accumulation_stats,
        gcx.accumulated_gradients,
        lambda state: gcx.flush(optax.adam(0.1), state, jnp.zeros(2)),
    ],
)
def test_a_state_without_accumulation_is_refused(function):
    with pytest.raises(TypeError, match="^(reset|acc|flush).*: `state` must be"):
        function(optax.adam(0.1).init(jnp.zeros(2)))


def test_flush_of_what_is_no_transformation_is_refused():
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2)
    state = tx.init(jnp.zeros(2))
    with pytest.raises(TypeError, match="flush: `tx` must be"):
        gcx.flush(optax.sgd, state, jnp.zeros(2))


def test_counts_of_a_state_that_was_vmapped_over_seeds():
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2)
    params = {"w": jnp.zeros((3, 2, 4))}
    state = jax.vmap(tx.init)(params)
    _, state = jax.vmap(tx.update)(params, state, params)
    counts = gcx.diagnostics.accumulation_stats(state)
    assert counts.total_micro_batches.tolist() == [1, 1, 1]
    assert (counts.registered_params, counts.total_param_elements) == (1, 8)
