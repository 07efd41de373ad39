"""`accumulate_gradients` and its companions: what a window is, and what comes out of it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
import oracles
import trees
from accumulation_cases import emissions, gradients, is_zero, params_like, run


def filled(params, value):
    return jax.tree.map(lambda p: jnp.full_like(p, value), params)


def weighted(*weights):
    return [{"weight": jnp.float32(w)} for w in weights]


def weighted_mean(grads, weights=None):
    """In float64 NumPy."""
    return jax.tree.map(
        lambda *g: np.average([np.asarray(x, np.float64) for x in g], 0, weights), *grads
    )


def assert_close(tree, wanted, scale=1.0):
    """Compare with the result of NumPy."""
    wide = jax.tree.map(np.float64, tree)
    chex.assert_trees_all_close(wide, wanted, rtol=1e-5, atol=1e-6 * scale)


def recorder():
    """An inner optimizer whose state is the `value` it was last given; it takes nothing else."""

    def update(updates, state, params=None, *, value=-1.0):
        return updates, jnp.asarray(value, jnp.float32)

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(-1), update)


# --- equal to MultiSteps on ordinary gradients ----------------------------------------------


def by_table(gradient_step):
    return jnp.array([3, 1, 2, 2])[gradient_step]


@pytest.mark.parametrize(("every", "reduction"), [(3, "sum"), (by_table, "mean")])
@pytest.mark.sampled
def test_updates_and_counts_are_those_of_multi_steps(every, reduction):
    params = params_like()
    grads = [gradients(i, params) for i in range(8)]
    adamw = optax.adamw(optax.linear_schedule(0.1, 0.0, 10))
    inner = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    ours = gcx.accumulate_gradients(inner, every, reduction=reduction)
    theirs = optax.MultiSteps(inner, every, use_grad_mean=reduction == "mean")
    updates, states = run(ours, params, grads)
    wanted, their_states = run(theirs.gradient_transformation(), params, grads)
    # MultiSteps keeps a running mean, which rounds otherwise; Adam divides by a root of it.
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-7)
    close(updates, wanted)
    for state, their_state in zip(states, their_states, strict=True):
        window = state.accumulation
        for name in ("mini_step", "gradient_step"):
            assert getattr(window, name) == getattr(their_state, name)
        close(state.inner_state, their_state.inner_opt_state)
        assert gcx.has_updated(state) == (window.mini_step == 0)
        length = every(window.gradient_step) if callable(every) else every
        assert window.accumulation_steps == length or gcx.has_updated(state)
    total = states[-1].accumulation.gradient.total
    chex.assert_trees_all_equal_shapes_and_dtypes(total, their_states[-1].acc_grads)


# --- the length of a window -----------------------------------------------------------------


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


# --- when the inner optimizer runs, and what it sees ----------------------------------------


def test_the_inner_optimizer_sees_the_precision_of_the_accumulator():
    seen = []

    def update(updates, state, params=None):
        seen.append({name: x.dtype.name for name, x in updates.items()})
        return updates, state

    kinds = ("bfloat16", "float16", "float32", "float8_e4m3fn", "complex64")
    params = {kind: jnp.ones(2, kind) for kind in kinds}
    tx = gcx.accumulate_gradients(optax.GradientTransformation(lambda p: (), update), 2)
    updates, _ = run(tx, params, [params] * 2)
    assert {x: "complex64" if x == "complex64" else "float32" for x in kinds} in seen
    chex.assert_trees_all_equal_dtypes(*updates, params)


def test_a_flush_passes_the_mean_loss_of_its_window_if_it_is_given_a_loss():
    params = params_like()
    tx = gcx.accumulate_gradients(recorder(), 2)
    ours = {"weight": jnp.float32(2), "flush": jnp.array(False)}
    values = [{"value": jnp.float32(v), **ours} for v in (10, 11, 12, 13, 14)]
    _, states = run(tx, params, [params] * 5, values)
    assert [float(s.inner_state) for s in states] == [-1, 10.5, 10.5, 12.5, 12.5]
    _, flushed = jax.jit(lambda s: gcx.flush(tx, s, params, value=7.0))(states[-1])
    assert float(flushed.inner_state) == 14
    # Without a loss in the window, the loss of the flush is the only one.
    state = tx.update(params, tx.init(params), params)[1]
    assert float(gcx.flush(tx, state, params, value=7.0)[1].inner_state) == 7


# --- reductions and weights -----------------------------------------------------------------


@pytest.mark.parametrize(("reduction", "place"), [("mean", 1), ("sum", 3)])
def test_a_window_is_weighted_and_a_nan_of_zero_weight_counts_but_adds_nothing(reduction, place):
    params = params_like()
    grads, weights = [gradients(i, params) for i in range(3)], [1.0, 9.0, 2.5]
    scale = 1 if reduction == "mean" else sum(weights)
    wanted = jax.tree.map(lambda g: g * scale, weighted_mean(grads, weights))
    grads.insert(place, filled(params, jnp.nan))
    weights.insert(place, 0.0)
    tx = gcx.accumulate_gradients(optax.scale(1.0), 4, reduction=reduction)
    updates, states = run(tx, params, grads, weighted(*weights))
    assert emissions(states) == [False, False, False, True]
    assert_close(updates[-1], wanted, scale)


# --- dtypes of sums and weights ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulator_is_of_the_dtype_chosen_or_the_complex_or_64_bit_type_over_it(dtype):
    with compat.x64():
        kinds = (*trees.REAL, "complex64", "float64", "complex128")
        params = {kind: jax.ShapeDtypeStruct((2, 3), kind) for kind in kinds}
        tx = gcx.accumulate_gradients(optax.scale(1.0), 2, accumulator_dtype=np.dtype(dtype))
        for kind, acc in jax.eval_shape(tx.init, params).accumulation.gradient.total.items():
            assert acc.dtype == (dtype if kind in trees.REAL else kind)
            assert acc.shape == (2, 3)


def test_the_weighted_sum_of_every_dtype_is_exact_to_float32():
    weights = np.float32([3, 0, 1000, 7])
    dtypes = ("float32", "bfloat16", "float16", "complex64", "float8_e4m3fn")
    grads = [{x: trees.normal((5,), x, seed=i) for x in dtypes} for i in range(len(weights))]
    tx = gcx.accumulate_gradients(optax.scale(1.0), 5)
    _, states = run(tx, grads[0], grads, [{"weight": weight} for weight in weights])
    gradient = states[-1].accumulation.gradient
    assert float(gradient.weight) == weights.sum()
    for dtype, found in gradient.total.items():
        terms = weights[:, None] * np.stack([oracles.wide(g[dtype]) for g in grads])
        # Each product and sum rounds once, to half an eps of the largest partial sum.
        bound = 6 * 2.0**-23 * np.abs(terms).sum(axis=0)
        assert np.all(np.abs(found - terms.sum(axis=0)) <= bound)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_weights_may_be_larger_than_the_accumulator_can_hold(dtype):
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2, accumulator_dtype=dtype)
    weights = [{"weight": weight} for weight in (40_001.0, 40_003.0)]
    updates, _ = run(tx, jnp.zeros(3), [jnp.full(3, 0.5)] * 2, weights)
    np.testing.assert_allclose(updates[-1], -0.5, rtol=2 * float(jnp.finfo(dtype).eps))


# --- flush ----------------------------------------------------------------------------------


def test_flush_emits_the_open_window_by_its_weights():
    params = params_like()
    grads = [gradients(i, params) for i in range(2)]
    tx = gcx.accumulate_gradients(optax.scale(1.0), 5)
    _, states = run(tx, params, grads, weighted(1, 7))
    updates, state = jax.jit(lambda s: gcx.flush(tx, s, params))(states[-1])
    assert_close(updates, weighted_mean(grads, [1, 7]))
    assert bool(gcx.has_updated(state))
    assert not gcx.has_updated(gcx.reset_accumulation(state))
    assert state.accumulation.micro_batch_count == 2  # a flush is no micro-batch
    chex.assert_trees_all_equal_shapes_and_dtypes(state, states[-1])


@pytest.mark.slow
def test_reset_and_flush_reach_through_wrappers():
    params = params_like()
    grads = [gradients(i, params) for i in range(4)]
    window = gcx.skip_spikes(gcx.accumulate_gradients(optax.scale(1.0), 5), norm=1e6)
    tx = gcx.watch(optax.chain(gcx.clip_by_global_norm(1e6), optax.masked(window, True)))
    _, states = run(tx, params, grads[:2])
    _, states = run(tx, params, grads[2:], state=gcx.reset_accumulation(states[-1]))
    updates, state = gcx.flush(tx, states[-1], params)
    assert_close(updates, weighted_mean(grads[2:]))
    assert gcx.diagnostics.accumulation_stats(state).total_micro_batches == 4
    nothing, state = gcx.flush(tx, state, params)
    assert is_zero(nothing) and not gcx.has_updated(state)


def test_stats_count_micro_batches_updates_and_parameters():
    params = params_like()
    tx = gcx.watch(gcx.skip_nonfinite(gcx.accumulate_gradients(optax.adam(0.1), 3)))
    _, states = run(tx, params, [params] * 7)
    assert emissions(states) == [False, False, True] * 2 + [False]
    stats = gcx.diagnostics.accumulation_stats(states[-1])
    # Micro-batches, updates, the length of a window, parameters and elements.
    assert stats == gcx.diagnostics.AccumulationStats(7, 2, 3, 2, 7)
    assert all(isinstance(x, int) for x in stats)
    traced = jax.jit(gcx.diagnostics.accumulation_stats)(states[-1])
    assert tuple(int(x) for x in traced) == tuple(stats)


# --- apply_gradients, and the types of what a step returns -----------------------------------


def test_a_state_keeps_its_dtypes_whatever_the_step_returns():
    carry = {
        "half": jnp.ones((2,), jnp.bfloat16),
        "count": jnp.int8(3),
        "complex": jnp.ones((2,), jnp.complex64),
        "key": jax.random.key(0),
        "none": None,
    }

    def update(updates, carry, params=None):
        return updates, {
            "half": carry["half"].astype(jnp.float32) * 3,
            "count": carry["count"].astype(jnp.int32) + 1,
            "complex": carry["complex"].real,
            "key": jax.random.split(carry["key"])[0],
            "none": None,
        }

    x, inner = jnp.ones(3), optax.GradientTransformation(lambda params: carry, update)
    tx = gcx.accumulate_gradients(inner, 2)
    state, step = tx.init(x), jax.jit(tx.update)
    for half, count in ((1, 3), (3, 4)):
        _, state = step(x, state, x)
        chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, carry)
        assert float(state.inner_state["half"][0]) == half
        assert int(state.inner_state["count"]) == count


def test_apply_gradients_rounds_low_precision_parameters_once_under_strict_promotion():
    # The update, four times the gradient, is not rounded to bfloat16 before it is added.
    tx = gcx.accumulate_gradients(optax.sgd(4.0), 2)
    step = jax.jit(functools.partial(gcx.apply_gradients, tx))
    params = params_like("bfloat16")
    exact = jax.tree.map(jnp.float32, params)
    state, exact_state = tx.init(params), tx.init(exact)
    with compat.strict():
        for i in range(2):
            grads = gradients(i, params)
            params, state = step(grads, state, params)
            exact, exact_state = step(jax.tree.map(jnp.float32, grads), exact_state, exact)
    chex.assert_trees_all_equal(params, jax.tree.map(jnp.bfloat16, exact), strict=True)


def test_a_held_step_returns_the_parameters_themselves():
    tx = gcx.accumulate_gradients(optax.adam(0.1), 2)
    params = params_like()
    held, _ = gcx.apply_gradients(tx, gradients(0, params), tx.init(params), params)
    assert all(a is b for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(params), strict=True))


@pytest.mark.parametrize("every", [None, 2])
def test_a_parameter_without_gradient_stays_as_it_is(every):
    params = {"w": jnp.ones(3), "n": jnp.array([1, 2])}
    grads = {"w": jnp.ones(3), "n": np.zeros((2,), jax.dtypes.float0)}
    tx = optax.masked(optax.sgd(0.5), {"w": True, "n": False})
    tx = tx if every is None else gcx.accumulate_gradients(tx, every)
    after, state = params, tx.init(params)
    for _ in range(every or 1):
        after, state = jax.jit(lambda p, s: gcx.apply_gradients(tx, grads, s, p))(after, state)
    np.testing.assert_array_equal(after["w"], 0.5)
    np.testing.assert_array_equal(after["n"], params["n"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [jnp.inf, 3e9, np.int64(2**31), 2**40], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.sampled
def test_a_window_longer_than_int32_never_closes(length, compiled):
    tx, params = gcx.accumulate_gradients(optax.sgd(1.0), lambda step: length), jnp.ones(2)
    update, state = jax.jit(tx.update) if compiled else tx.update, tx.init(params)
    for _ in range(3):
        _, state = update(params, state, params)
        assert not gcx.has_updated(state)


@pytest.mark.parametrize("count, bound", [(10**4, "1.5e-4"), (10**6, "1.5e-2")])
def test_constants_are_accumulated_with_the_documented_error(count, bound):
    """The error depends on the mantissa; it is the largest near 1.635 and near 1 + 1/32."""
    near = jnp.linspace(-1e-3, 1e-3, 16)
    terms = jnp.concatenate(
        [jnp.array([0.1]), jnp.linspace(1, 2, 48), 1.635 + near, 1.03125 + near]
    )
    tx, params = gcx.accumulate_gradients(optax.sgd(1.0), count), jnp.zeros_like(terms)

    def step(state, _):
        _, state = tx.update(terms, state, params)
        return state, None

    def run():
        state, _ = jax.lax.scan(step, tx.init(params), length=count - 1)
        return tx.update(terms, state, params)[0]

    error = np.max(np.abs(np.float64(jax.jit(run)()) / -np.float64(terms) - 1))
    assert 0.9 * float(bound) < error <= float(bound)
    text = " ".join(gcx.accumulate_gradients.__doc__.split())
    assert f"{bound} for n = {count:.0e}".replace("e+0", "e") in text
