"""Calls that once gave a wrong result, a wrong count or a misleading error without a sign."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx

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


@pytest.mark.parametrize(
    "grads, loss", [(ONES, 1e20), (jnp.full(2, 1e26), 1.0)], ids=["loss", "norm"]
)
def test_infinite_measurements_of_watch_do_not_skip_a_finite_step(grads, loss):
    tx = gcx.skip_nonfinite(gcx.watch(optax.sgd(1e-26)), check="step")
    updates, state = run(tx, [(grads, {"value": loss})])
    np.testing.assert_allclose(updates, -1e-26 * grads, rtol=1e-6)
    assert int(gcx.metrics(state)["skipped_nonfinite"]) == 0


def test_extra_arguments_that_watch_reads_reach_the_inner_transformation():
    received = {}

    def record(grads, state, params=None, **extra):
        received.update(extra)
        return grads, state

    tx = gcx.watch(optax.GradientTransformationExtraArgs(optax.identity().init, record))
    jax.eval_shape(functools.partial(tx.update, batch_id=7), ONES, tx.init(PARAMS), PARAMS)
    assert received == {"batch_id": 7}


GUARDS = {
    "nonfinite": lambda tx, **kw: gcx.skip_nonfinite(tx, **kw),
    "step": lambda tx, **kw: gcx.skip_nonfinite(tx, check="step", **kw),
    "norm": lambda tx, **kw: gcx.skip_spikes(tx, norm=10.0, **kw),
    "loss": lambda tx, **kw: gcx.skip_spikes(tx, loss=10.0, **kw),
    "scale": lambda tx: gcx.dynamic_loss_scale(tx, init_scale=1.0),
}


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


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_an_empty_axis_name_means_the_norm_of_this_device():
    def clipped(g):
        return (
            gcx.clip_by_global_norm(1.0, axis_name=()).update(g, None)[0],
            gcx.clip_by_leaf_norm(1.0, axis_name=()).update(g, None)[0],
            gcx.clip_grad_norm(g, 1.0, axis_name=())[0],
            g / jnp.maximum(1.0, gcx.global_norm(g, axis_name=())),
        )

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("i",), axis_types=auto, devices=jax.devices()[:2])
    spread = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P())
    mean = jax.jit(spread(lambda g: jax.lax.pmean(clipped(g[0]), "i")))
    for found in mean(jnp.array([[3.0, 4.0], [0.15, 0.2]])):
        np.testing.assert_allclose(found, [0.375, 0.5], rtol=1e-6)


@pytest.mark.parametrize("name", GUARDS)
def test_gradients_of_another_shape_than_their_parameters_raise_in_guards(name):
    tx = GUARDS[name](sgd)
    for call in (tx.update, lambda *args, **kw: gcx.apply_gradients(tx, *args, **kw)):
        with pytest.raises((TypeError, ValueError), match="shape"):
            jax.jit(call)(jnp.ones((1, 2)), tx.init(PARAMS), PARAMS, value=1.0)


def test_scale_loss_raises_if_a_clip_receives_scaled_gradients():
    tx = optax.chain(gcx.clip_by_global_norm(1.0), gcx.dynamic_loss_scale(sgd))
    with pytest.raises((TypeError, ValueError), match="clip"):
        gcx.scale_loss(tx.init(PARAMS), jnp.float32(1.0))


@pytest.mark.parametrize(
    "tx",
    [
        gcx.skip_spikes(accumulate(sgd, 2), norm=gcx.thresholds.mean_std(), loss=4.0),
        gcx.watch(gcx.skip_nonfinite(accumulate(gcx.autoclip(), 2))),
        optax.chain(gcx.zclip(), gcx.adagc(), sgd),
    ],
    ids=["spikes", "watch", "clips"],
)
def test_debug_nans_does_not_stop_a_finite_run(tx):
    with jax.debug_nans(True):
        run(tx, [(x * ONES, {"value": jnp.float32(1.0)}) for x in (1.0, 2.0, 0.0)])
