"""Calls that once gave a wrong result, a wrong count or a misleading error without a sign."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx

NAN = jnp.array([jnp.nan, 1.0])
ONES = jnp.ones(2)
PARAMS = jnp.zeros(2)
sgd = optax.sgd(1.0)
accumulate = gcx.accumulate_gradients


def run(tx, calls, params=PARAMS):
    """The last update and the state after `(grads, extra_args)` calls."""
    state, update = tx.init(params), jax.jit(tx.update)
    for grads, extra in calls:
        updates, state = update(grads, state, params, **extra)
    return updates, state


def recorder(received, update=lambda grads, extra: grads):
    """A transformation that appends the extra arguments it receives."""

    def record(grads, state, params=None, **extra):
        received.append(extra)
        return update(grads, extra), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), record)


# --- wrappers are transparent or raise --------------------------------------------------------------


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: tx,
        lambda tx: optax.chain(tx),
        lambda tx: optax.named_chain(("watched", tx)),
        lambda tx: optax.masked(tx, True),
    ],
    ids=["direct", "chain", "named_chain", "masked"],
)
def test_watch_between_a_guard_and_an_accumulation_raises_at_init(around):
    tx = gcx.skip_nonfinite(around(gcx.watch(accumulate(sgd, 4))))
    with pytest.raises((TypeError, ValueError), match="watch"):
        tx.init(PARAMS)


@pytest.mark.parametrize(
    "grads, loss", [(ONES, 1e20), (jnp.full(2, 1e26), 1.0)], ids=["loss", "norm"]
)
def test_infinite_measurements_of_watch_do_not_skip_a_finite_step(grads, loss):
    tx = gcx.skip_nonfinite(gcx.watch(optax.sgd(1e-26)), check="step")
    updates, state = run(tx, [(grads, {"value": loss})])
    np.testing.assert_allclose(updates, -1e-26 * grads, rtol=1e-6)
    assert int(gcx.metrics(state)["skipped_nonfinite"]) == 0


@pytest.mark.parametrize("extra", [{"measure": 2.0}, {"batch_id": 7}], ids=["measure", "batch_id"])
def test_extra_arguments_that_watch_reads_reach_the_inner_transformation(extra):
    received = []
    tx = gcx.watch(recorder(received))
    tx.update(ONES, tx.init(PARAMS), PARAMS, **extra)
    assert {k: float(v) for k, v in received[0].items()} == {k: float(v) for k, v in extra.items()}


@pytest.mark.parametrize("guard", [gcx.skip_nonfinite, gcx.dynamic_loss_scale])
def test_an_argument_named_almost_like_weight_reaches_the_inner_transformation(guard):
    received = []
    tx = guard(recorder(received))
    with pytest.warns(UserWarning, match="weight"):
        tx.update(ONES, tx.init(PARAMS), PARAMS, weights=3.0)
    assert float(received[0]["weights"]) == 3.0


def after_flush(tx, params, grads):
    state = tx.init(params)
    _, before = tx.update(grads, state, params)
    return before, *gcx.flush(tx, before, params)


def test_flush_does_not_move_groups_of_a_partition_without_a_window():
    tx = optax.partition({"x": accumulate(sgd, 4), "y": optax.adamw(0.1)}, {"x": "x", "y": "y"})
    params = {"x": jnp.ones(2), "y": jnp.ones(2)}
    before, updates, after = after_flush(tx, params, params)
    np.testing.assert_array_equal(updates["x"], -jnp.ones(2))
    np.testing.assert_array_equal(updates["y"], jnp.zeros(2))
    jax.tree.map(np.testing.assert_array_equal, before.inner_states["y"], after.inner_states["y"])


def test_flush_is_not_a_good_step_of_a_loss_scale():
    tx = gcx.dynamic_loss_scale(accumulate(sgd, 4), growth_interval=2, init_scale=4.0)
    _, updates, state = after_flush(tx, PARAMS, 4 * ONES)
    np.testing.assert_array_equal(updates, -ONES)
    assert float(gcx.metrics(state)["loss_scale"]) == 4.0


def test_flush_does_not_advance_a_clip_outside_the_accumulation():
    clip = gcx.clip_by_global_norm(lambda count: 1.0 + count)
    before, _, after = after_flush(optax.chain(clip, accumulate(sgd, 4)), PARAMS, ONES)
    jax.tree.map(np.testing.assert_array_equal, before[0], after[0])


def test_flush_keeps_the_measurements_of_guards():
    before, _, after = after_flush(gcx.skip_large_norm(accumulate(sgd, 4), 10.0), PARAMS, ONES)
    jax.tree.map(
        np.testing.assert_array_equal,
        before._replace(inner_state=()),
        after._replace(inner_state=()),
    )


@pytest.mark.parametrize("read", [gcx.accumulated_gradients, gcx.diagnostics.accumulation_stats])
def test_a_state_with_two_accumulations_raises(read):
    tx = optax.partition({k: accumulate(sgd, 4) for k in "xy"}, {"x": "x", "y": "y"})
    _, state = run(tx, [({"x": ONES, "y": 5 * ONES}, {})], {"x": PARAMS, "y": PARAMS})
    with pytest.raises((TypeError, ValueError), match="accumulation"):
        read(state)


# --- counts ------------------------------------------------------------------------------------------

GUARDS = {
    "nonfinite": lambda tx, **kw: gcx.skip_nonfinite(tx, **kw),
    "step": lambda tx, **kw: gcx.skip_nonfinite(tx, check="step", **kw),
    "norm": lambda tx, **kw: gcx.skip_large_norm(tx, 10.0, **kw),
    "loss": lambda tx, **kw: gcx.skip_spikes(tx, loss=10.0, **kw),
    "scale": lambda tx: gcx.dynamic_loss_scale(tx, init_scale=1.0),
}


@pytest.mark.parametrize("name", ["nonfinite", "step", "norm"])
def test_windows_without_weight_set_guard_failed(name):
    tx = GUARDS[name](accumulate(sgd, 2), max_consecutive_skips=5)
    calls = [(ONES, {"weight": jnp.float32(0)})] * 10
    assert int(gcx.metrics(run(tx, calls[:8])[1])["guard_failed"]) == 0
    assert int(gcx.metrics(run(tx, calls)[1])["guard_failed"]) == 1


@pytest.mark.parametrize("name", GUARDS)
def test_a_nan_gradient_of_weight_zero_is_counted_in_the_window_and_not_as_a_skip(name):
    tx = GUARDS[name](accumulate(sgd, 2))
    calls = [(ONES, {"weight": 1.0, "value": 1.0}), (NAN, {"weight": 0.0, "value": 1.0})]
    updates, state = run(tx, calls)
    np.testing.assert_array_equal(updates, -ONES)
    assert gcx.has_updated(state)
    assert not any(int(v) for k, v in gcx.metrics(state).items() if k.startswith("skipped"))


@pytest.mark.parametrize(
    "tx, scale",
    [
        (gcx.skip_large_norm(optax.chain(gcx.clip_by_global_norm(1.0), sgd), 10.0), 1.0),
        (gcx.skip_nonfinite(optax.chain(gcx.clip_by_global_norm(1.0), sgd)), 1.0),
        (gcx.skip_nonfinite(sgd), 1.0),
        (gcx.skip_nonfinite(gcx.skip_large_norm(sgd, 10.0)), 1.0),
        (gcx.skip_nonfinite(accumulate(optax.chain(gcx.clip_by_global_norm(1.0), sgd), 3)), 1.0),
        (
            gcx.dynamic_loss_scale(gcx.skip_large_norm(sgd, 10.0), init_scale=8.0, min_scale=8.0),
            8.0,
        ),
    ],
    ids=["large_norm", "clip", "nonfinite", "nested", "accumulation", "scale"],
)
def test_grad_norm_is_the_unscaled_norm_of_this_call(tx, scale):
    for last in (100.0, np.nan):
        _, state = run(tx, [(scale * ONES, {}), (scale * last * ONES, {})])
        np.testing.assert_allclose(gcx.metrics(state)["grad_norm"], last * np.sqrt(2), rtol=1e-6)


def test_nested_guards_count_consecutive_skips_together():
    limit = {"max_consecutive_skips": 6}
    tx = gcx.skip_nonfinite(gcx.skip_large_norm(sgd, 10.0, **limit), **limit)
    calls = [(ONES, {}), *[(NAN, {}), (100 * ONES, {})] * 3]
    before, after = gcx.metrics(run(tx, calls[:-1])[1]), gcx.metrics(run(tx, calls)[1])
    assert int(before["consecutive_skips"]) == 5 and int(before["guard_failed"]) == 0
    assert int(after["consecutive_skips"]) == 6 and int(after["guard_failed"]) == 1


def test_a_spike_is_counted_once_if_the_refused_call_closes_the_window():
    tx = gcx.skip_spikes(accumulate(gcx.skip_spikes(sgd, loss=4.0), 3), loss=4.0)
    calls = [(ONES, {"value": 1.0, "flush": False}), (NAN, {"value": 50.0, "flush": True})]
    updates, state = run(tx, calls)
    np.testing.assert_array_equal(updates, -ONES)
    assert (
        sum(int(v) for k, v in gcx.metrics(state).items() if re.fullmatch("skipped_[a-z_]+", k))
        == 1
    )


def test_has_updated_is_false_after_an_open_step_of_multisteps():
    tx = optax.MultiSteps(sgd, 2).gradient_transformation()
    found = [bool(gcx.has_updated(run(tx, [(ONES, {})] * steps)[1])) for steps in (1, 2, 3)]
    assert found == [False, True, False]


@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_leaf_norm,
        lambda rule: gcx.clip_by_group_norm({"a": rule, "b": rule}, {"a": "a", "b": "b"}),
        lambda rule: gcx.clip_by_norm(rule, granularity=gcx.granularities.axis(-1)),
    ],
    ids=["leaf", "group", "axis"],
)
def test_a_step_that_a_nan_discards_does_not_change_the_rules_of_other_leaves(make):
    clip = make(gcx.thresholds.ema(2.0, decay=0.5, warmup_steps=1, warmup_max=jnp.inf))
    grads = [
        {"a": jnp.array([a]), "b": jnp.array([b])}
        for a, b in ((1.0, 1.0), (2.0, np.nan), (100.0, 1.0))
    ]
    updates, _ = run(clip, [(g, {}) for g in jax.tree.map(jnp.float32, grads)], grads[0])
    np.testing.assert_allclose(updates["a"], 2.0, rtol=1e-6)


# --- leaves and devices -------------------------------------------------------------------------------

MIXED = {"t": jnp.array([3.0, 4.0]), "f": jnp.array([1e3, jnp.nan])}


@pytest.mark.parametrize("mask", [{"t": True, "f": False}, lambda params: {"t": True, "f": False}])
@pytest.mark.parametrize("name", ["nonfinite", "step", "norm", "scale"])
def test_leaves_outside_the_mask_of_a_guard_are_not_checked_and_reach_inner_as_zeros(name, mask):
    inner = optax.chain(gcx.clip_by_global_norm(1.0), sgd)
    guards = GUARDS | {"scale": lambda tx, **kw: gcx.dynamic_loss_scale(tx, init_scale=1.0, **kw)}
    updates, state = run(guards[name](inner, mask=mask), [(MIXED, {})], MIXED)
    np.testing.assert_allclose(updates["t"], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_array_equal(updates["f"], [0, 0])
    assert gcx.has_updated(state)


def test_leaves_outside_the_mask_of_watch_pass_unchanged_and_are_not_measured():
    tx = gcx.watch(optax.identity(), mask={"t": True, "f": False})
    updates, state = run(tx, [(MIXED, {})], MIXED)
    np.testing.assert_array_equal(updates["f"], MIXED["f"])
    np.testing.assert_allclose(gcx.metrics(state)["gradient_norm"], 5.0, rtol=1e-6)


def per_device(fun):
    """`fun` of the gradients of two devices, whose results are averaged."""
    mesh = jax.make_mesh(
        (2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    grads = jnp.array([[3.0, 4.0], [0.15, 0.2]])
    local = lambda g: jax.lax.pmean(fun(g[0]), "i")  # noqa: E731
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P()))(grads)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    "clip",
    [
        lambda g: gcx.clip_by_global_norm(1.0, axis_name=()).update(g, None)[0],
        lambda g: gcx.clip_by_leaf_norm(1.0, axis_name=()).update(g, None)[0],
        lambda g: gcx.clip_grad_norm(g, 1.0, axis_name=())[0],
        lambda g: g / jnp.maximum(1.0, gcx.global_norm(g, axis_name=())),
    ],
    ids=["clip_by_global_norm", "clip_by_leaf_norm", "clip_grad_norm", "global_norm"],
)
def test_an_empty_axis_name_means_the_norm_of_this_device(clip):
    np.testing.assert_allclose(per_device(clip), [0.375, 0.5], rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 2), (1,), (3,)], ids=str)
@pytest.mark.parametrize("name", GUARDS)
def test_gradients_of_another_shape_than_their_parameters_raise_in_guards(name, shape):
    tx = GUARDS[name](sgd)
    for call in (tx.update, lambda *args, **kw: gcx.apply_gradients(tx, *args, **kw)):
        with pytest.raises((TypeError, ValueError), match="shape"):
            jax.jit(call)(jnp.ones(shape), tx.init(PARAMS), PARAMS, value=1.0)


# --- ranges --------------------------------------------------------------------------------------------


def test_norms_of_small_elements_are_not_zero():
    tiny = jnp.full(10**6, 1e-13)
    np.testing.assert_allclose(gcx.global_norm(tiny), 1e-10, rtol=1e-6)
    clipped, _ = gcx.clip_by_global_norm(1e-11).update(tiny, None)
    np.testing.assert_allclose(clipped, 1e-14, rtol=1e-5)


# --- accepted in silence -------------------------------------------------------------------------------


def test_scale_loss_raises_if_a_clip_receives_scaled_gradients():
    tx = optax.chain(gcx.clip_by_global_norm(1.0), gcx.dynamic_loss_scale(sgd))
    with pytest.raises((TypeError, ValueError), match="clip"):
        gcx.scale_loss(tx.init(PARAMS), jnp.float32(1.0))


@pytest.mark.parametrize(
    "tx",
    [
        gcx.dynamic_loss_scale(optax.chain(gcx.clip_by_global_norm(1.0), sgd)),
        optax.chain(gcx.dynamic_loss_scale(sgd), gcx.clip_by_global_norm(1.0)),
    ],
    ids=["inside", "after"],
)
def test_scale_loss_finds_the_scale_beside_parameters(tx):
    assert float(gcx.scale_loss((PARAMS, tx.init(PARAMS)), jnp.float32(3.0))) == 3.0


@pytest.mark.parametrize("name", ["nonfinite", "step", "scale"])
def test_a_vector_as_the_loss_warns(name):
    tx = GUARDS[name](sgd)
    with pytest.warns(UserWarning, match="`value` should be the mean loss"):
        tx.update(ONES, tx.init(PARAMS), PARAMS, value=jnp.ones(3))


@pytest.mark.parametrize("key", ["value", "loss"])
@pytest.mark.parametrize("weights, mean", [((1, 1, 1, 1), 3.75), ((1, 0, 3, 4), 18 / 8)])
def test_the_inner_transformation_receives_the_mean_loss_of_the_window(key, weights, mean):
    inner = recorder([], lambda grads, extra: jnp.full_like(grads, extra[key]))
    calls = [
        (ONES, {key: jnp.float32(loss), "weight": jnp.float32(weight)})
        for loss, weight in zip((8, 4, 2, 1), weights, strict=True)
    ]
    np.testing.assert_allclose(run(accumulate(inner, 4), calls)[0], mean, rtol=1e-6)


def test_a_loss_guard_inside_an_accumulation_checks_the_mean_loss():
    tx = accumulate(gcx.skip_spikes(sgd, loss=4.0), 2)
    assert not gcx.has_updated(run(tx, [(ONES, {"value": 9.0}), (ONES, {"value": 1.0})])[1])
    assert gcx.has_updated(run(tx, [(ONES, {"value": 1.0}), (ONES, {"value": 5.0})])[1])


# --- crashes and errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        *(guard(sgd) for guard in GUARDS.values()),
        gcx.skip_spikes(accumulate(sgd, 2), norm=gcx.thresholds.mean_std(), loss=4.0),
        gcx.watch(gcx.skip_nonfinite(accumulate(gcx.autoclip(), 2))),
        optax.chain(gcx.zclip(), gcx.adagc(), sgd),
    ],
    ids=[*GUARDS, "spikes", "watch", "clips"],
)
def test_debug_nans_does_not_stop_a_finite_run(tx):
    with jax.debug_nans(True):
        run(tx, [(x * ONES, {"value": jnp.float32(1.0)}) for x in (1.0, 2.0, 0.0)])


def test_a_static_number_of_real_micro_batches_compiles_no_loop_inside_the_scan():
    fun = gcx.microbatched_value_and_grad(lambda w, x: jnp.mean(x @ w), 4, num_real_microbatches=1)
    assert "while" not in str(jax.make_jaxpr(fun)(jnp.ones(3), jnp.ones((8, 3))))


def test_none_as_a_number_of_layer_axes_means_zero():
    clip = gcx.clip_by_leaf_norm(1.0, num_layer_axes={"a": None, "b": 1})
    grads = {"a": jnp.full((2, 2), 5.0), "b": jnp.full((2, 1), 5.0)}
    updates, _ = clip.update(grads, clip.init(grads))
    np.testing.assert_allclose(updates["a"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], 1.0, rtol=1e-6)
