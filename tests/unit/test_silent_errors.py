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


WRAPPERS = {
    "nonfinite": gcx.skip_nonfinite,
    "step": functools.partial(gcx.skip_nonfinite, check="step"),
    "norm": functools.partial(gcx.skip_spikes, norm=10.0),
    "loss": functools.partial(gcx.skip_spikes, loss=10.0),
    "scale": gcx.dynamic_loss_scale,
    "accumulation": functools.partial(accumulate, every=2),
}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_leaf_norm,
        lambda rule: gcx.clip_by_group_norm({"a": rule, "b": rule}, {"a": "a", "b": "b"}),
        lambda rule: gcx.clip_by_norm(rule, granularity=gcx.granularities.axis(-1)),
    ],
    ids=["leaf", "group", "axis"],
)
def test_a_step_that_is_discarded_does_not_change_the_rules_of_other_leaves(make, bad):
    clip = make(gcx.thresholds.ema(2.0, decay=0.5, warmup_steps=1, warmup_max=jnp.inf))
    grads = [
        {"a": jnp.array([a]), "b": jnp.array([b])}
        for a, b in ((1.0, 1.0), (2.0, bad), (100.0, 1.0))
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


@pytest.mark.parametrize("shape", [(1, 2), (1,), (3,)])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.sampled
def test_gradients_of_another_shape_than_their_parameters_raise(name, shape):
    tx = WRAPPERS[name](sgd)
    for call in (tx.update, functools.partial(gcx.apply_gradients, tx)):
        with pytest.raises(TypeError, match="`(updates|grads)` must.*shape"):
            jax.jit(call)(jnp.ones(shape), tx.init(PARAMS), PARAMS, value=1.0)


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
