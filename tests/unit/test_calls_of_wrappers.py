"""Calls of guards, accumulations and `watch`: bits, memory, extra arguments, counts and readers."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from compat import needs_eight_devices
from guard_cases import INT_MAX, saturated
from marks import slow

PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(1)}
ONES = jax.tree.map(jnp.ones_like, PARAMS)
NAN = jnp.float32(jnp.nan)
sgd = optax.sgd(1.0)
clip, accumulate = gcx.clip_by_global_norm(1.0), gcx.accumulate_gradients
microbatched, watch = gcx.microbatched_value_and_grad, gcx.watch
nonfinite, spikes = gcx.skip_nonfinite, functools.partial(gcx.skip_spikes, norm=1e4)


def run(tx, calls, params=PARAMS, *, fast=False, jit=False):
    """The parameters and the state after `(grads, extra_args)` calls."""
    state, tx = tx.init(params), optax.with_extra_args_support(tx)

    def step(params, state, grads, extra):
        if fast:
            return gcx.apply_gradients(tx, grads, state, params, **extra)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for grads, extra in calls:
        params, state = step(params, state, grads, extra)
    return params, state


def recorder():
    """A transformation that subtracts the gradient, and the extra arguments that it received."""
    received = []

    def update(grads, state, params=None, **extra):
        received.append(extra)
        return grads, state

    return optax.GradientTransformationExtraArgs(sgd.init, update), received


GUARDS = {
    "nonfinite": nonfinite,
    "step": functools.partial(nonfinite, check="step"),
    "spikes": spikes,
    "skip_if": functools.partial(gcx.skip_if, predicate=lambda *args, **kwargs: False),
    "scale": functools.partial(gcx.dynamic_loss_scale, init_scale=1.0),
}
AROUND = {**GUARDS, "watch": watch, "watch(nonfinite)": lambda tx: watch(nonfinite(tx))}
AROUND.pop("step")  # it keeps the old state
OPTIMIZER = optax.chain(clip, optax.adamw(1e-2))


@functools.cache
def bits_of_bfloat16(wrap=lambda tx: tx):
    shape = (64,)
    keys = jax.random.split(jax.random.key(0), 9)
    params = {"w": jax.random.normal(keys[0], shape, jnp.bfloat16)}
    calls = [({"w": jax.random.normal(k, shape, jnp.bfloat16)}, {}) for k in keys]
    return np.asarray(
        run(wrap(accumulate(OPTIMIZER, 3)), calls, params, fast=True)[0]["w"]
    ).tobytes()


@pytest.mark.parametrize(
    "name", ["scale", *slow("spikes", "nonfinite", "skip_if", "watch", "watch(nonfinite)")]
)
def test_a_wrapper_does_not_change_bits_of_bfloat16_parameters(name):
    assert bits_of_bfloat16(AROUND[name]) == bits_of_bfloat16()


# XLA on CPU has no kernel that writes parameters and returns sums, so `watch` copies the parameters
# to measure updates. tests/integration/compiled/test_steps.py tests an H100 and a TPU.
@pytest.mark.parametrize("num_leaves", [4, *slow(16)])
@pytest.mark.parametrize(  # a loss scale divides gradients
    "name, limit",
    [("skip_if", 0.005), ("watch gradient", 0.005), ("watch", 1.01)]
    + [pytest.param(x, 0.005, marks=pytest.mark.slow) for x in ("nonfinite", "spikes")],
)
def test_a_wrapper_of_an_accumulation_needs_no_scratch_except_for_norms_of_updates_on_a_cpu(
    name, limit, num_leaves
):
    wrap = {**AROUND, "watch gradient": functools.partial(watch, of=("gradient",))}[name]
    params = {f"w{i}": jnp.ones((256, 256)) for i in range(num_leaves)}
    tx = wrap(accumulate(OPTIMIZER, 3))
    step = jax.jit(lambda p, s, g: gcx.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
    analysis = step.lower(params, tx.init(params), params).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < limit * num_leaves * 256 * 256 * 4


def test_the_argument_grad_is_the_gradient_of_the_window_or_raises():
    inner, received = recorder()
    calls = [({"w": g * ONES["w"], "b": g * ONES["b"]}, {}) for g in (1.0, 3.0)]
    calls = [(g, {"value": jnp.float32(1.0), "grad": g}) for g, _ in calls]
    try:
        with jax.disable_jit():
            run(accumulate(inner, 2), calls)
    except (TypeError, ValueError) as error:
        assert "`grad`" in str(error)
    else:
        np.testing.assert_allclose(received[-1]["grad"]["w"], [2.0, 2.0])


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: accumulate(tx, 1)])
@pytest.mark.sampled
def test_the_argument_grad_is_unscaled_like_the_gradient(wrap):
    inner, received = recorder()

    def predicate(grads, params, **extra):
        received.append(extra)
        return jnp.bool_(False)

    tx = gcx.dynamic_loss_scale(gcx.skip_if(wrap(inner), predicate), init_scale=8.0)
    with jax.disable_jit():
        run(tx, [(ONES, {"grad": ONES})])
    for extra in received:
        np.testing.assert_allclose(extra["grad"]["w"], ONES["w"] / 8)


def test_reduction_sum_passes_the_sum_of_the_losses_of_a_window():
    inner, received = recorder()
    with jax.disable_jit():
        calls = [(ONES, {"value": jnp.float32(x)}) for x in (1.0, 3.0)]
        run(accumulate(inner, 2, reduction="sum"), calls)
    assert float(received[-1]["value"]) == 4.0


# An optimizer behind an accumulator of float32 takes no squares in float8.
@pytest.mark.parametrize("dtype, every", [("float16", 1), ("float16", 2), ("float8_e4m3fn", 2)])
@pytest.mark.sampled
def test_each_leaf_is_checked_by_the_range_of_its_own_dtype(dtype, every):
    params = {"h": jnp.zeros(1, dtype), "q": jnp.zeros(1, ml_dtypes.float8_e4m3fn)}
    grads = {"h": jnp.full(1, 100.0, dtype), "q": jnp.ones(1, ml_dtypes.float8_e4m3fn)}
    _, state = run(nonfinite(accumulate(sgd, every)), [(grads, {})], params)
    assert int(gcx.metrics(state)["skipped_nonfinite"]) == 0


def guarded():
    return nonfinite(accumulate(optax.chain(clip, sgd), 2))


@functools.cache
def watched_state():
    return run(watch(guarded()), [(ONES, {})])[1]


@pytest.mark.parametrize(
    "read",
    [gcx.has_updated, gcx.metrics, gcx.reset_accumulation, gcx.last_row]
    + [lambda state: gcx.flush(watch(guarded()), state, PARAMS)],
    ids=["has_updated", "metrics", "reset_accumulation", "last_row", "flush"],
)
@pytest.mark.sampled
def test_readers_outside_jit_move_nothing_to_the_device(read):
    state = watched_state()
    with jax.transfer_guard("disallow"):
        read(state)


@pytest.mark.filterwarnings("error")
def test_an_error_of_the_inner_update_is_raised_once_without_a_warning():
    calls = []

    def update(grads, state, params=None):
        calls.append(1)
        raise ValueError("mine")

    tx = nonfinite(accumulate(optax.GradientTransformation(sgd.init, update), 2))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(ValueError, match="^mine"):
        run(tx, [(params, {})], params)
    assert len(calls) == 1


WITHIN = {
    "chain": lambda guard: optax.chain(optax.scale(1.0), guard),
    "watch": watch,
    "masked": lambda guard: optax.masked(guard, {"w": True, "b": True}),
    "partition": lambda guard: optax.partition({"a": guard}, {"w": "a", "b": "a"}),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.sampled
def test_consecutive_skips_count_skips_of_guards_inside_other_transformations(name):
    guard = spikes(sgd, norm=10.0, max_consecutive_skips=4)
    tx = nonfinite(WITHIN[name](guard), max_consecutive_skips=4)
    scales = np.nan, 1e3, np.nan, 1e3
    _, state = run(tx, [(optax.tree.scale(x, ONES), {}) for x in scales])
    metrics = gcx.metrics(state)
    assert (int(metrics["consecutive_skips"]), int(metrics["guard_failed"])) == (4, 1)


def test_sums_of_saturated_counters_stay_saturated():
    tx = nonfinite(spikes(sgd))
    assert int(gcx.metrics(saturated(tx.init(PARAMS)))["skipped_nonfinite"]) == INT_MAX


@pytest.mark.parametrize("weight", [np.nan, np.float32("nan"), np.array(np.nan), NAN])
def test_a_concrete_weight_of_nan_is_skipped_by_a_guard(weight):
    params, state = run(nonfinite(accumulate(sgd, 2)), [(ONES, {"weight": weight})], jit=False)
    assert int(gcx.metrics(state)["skipped_nonfinite"]) == 1
    np.testing.assert_array_equal(params["w"], 0)


@pytest.mark.slow
@needs_eight_devices
@pytest.mark.parametrize(
    ("wrap", "first"),
    [(lambda inner: accumulate(inner, 2), 1), (nonfinite, jnp.nan), (GUARDS["step"], jnp.nan)],
    ids=["accumulation", "guard", "step"],
)
def test_wrappers_of_explicitly_sharded_gradients_run_outside_jit(wrap, first):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    tx = wrap(optax.adafactor(0.1))
    with jax.sharding.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((256, 128)), P("x", None))}
        run(tx, [({"w": first * params["w"]}, {}), (params, {})], params, jit=False)


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.bfloat16, jnp.complex64, "float0"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_sum_of_weighted_gradients_needs_no_implicit_promotion(dtype, every):
    is_float0 = dtype == "float0"
    grads = {"w": np.zeros(2, jax.dtypes.float0) if is_float0 else jnp.ones(2, dtype)}
    tx = gcx.accumulate_gradients(recorder()[0], every, reduction="sum")
    state = tx.init({"w": jnp.ones(2, jnp.int32 if is_float0 else dtype)})
    with jax.numpy_dtype_promotion("strict"):
        for _ in range(every):
            updates, state = tx.update(grads, state, weight=2.0)
    if not is_float0:
        np.testing.assert_array_equal(updates["w"].astype(jnp.complex64), 2 * every)


def test_flush_accepts_arguments_without_a_hash():
    inner, received = recorder()
    tx = accumulate(inner, 2)
    _, state = run(tx, [(ONES, {})])
    gcx.flush(tx, state, PARAMS, names=["a", "b"], group={"a"})
    assert received[-1] == {"names": ["a", "b"], "group": {"a"}}


# tests/conformance/test_gates_machine.py compares others with its model, to a tolerance.
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(watch, spikes), *slow((nonfinite, GUARDS["skip_if"]), (spikes, watch))]
    + slow((GUARDS["scale"], GUARDS["step"]), (GUARDS["skip_if"], nonfinite)),
)
def test_apply_gradients_of_nested_wrappers_equals_update_and_apply_updates(outer, inner):
    tx = outer(accumulate(inner(OPTIMIZER), 2))
    calls = [(optax.tree.scale(x, ONES), {"value": jnp.float32(1.0)}) for x in (1, np.nan, 3, 4, 5)]
    found, expected = (run(tx, calls, fast=fast, jit=True) for fast in (True, False))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    "tx",
    [
        spikes(accumulate(sgd, 2), norm=gcx.thresholds.mean_std(), loss=4.0),
        pytest.param(watch(nonfinite(accumulate(gcx.autoclip(), 2))), marks=pytest.mark.slow),
        optax.chain(gcx.zclip(), gcx.adagc(), sgd),
    ],
    ids=["spikes", "watch", "clips"],
)
def test_debug_nans_does_not_stop_a_finite_run(tx):
    with jax.debug_nans(True):
        scales = 1.0, 2.0, 0.0
        run(
            tx, [(optax.tree.scale(x, ONES), {"value": jnp.float32(1.0)}) for x in scales], jit=True
        )
