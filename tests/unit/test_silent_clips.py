"""Norms, clips and rules that once gave a wrong result without a sign."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from compat import needs_eight_devices
from marks import slow

GRADS = jnp.array([3.0, 4.0])
TREE = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
rules, granularities = gcx.thresholds, gcx.granularities
sgd = optax.sgd(1.0)


def clipped(tx, grads=GRADS, params=None):
    return tx.update(grads, tx.init(grads), grads if params is None else params)[0]


def test_traced_bounds_of_clip_by_value_below_0_give_zeros_or_values_within_the_bounds():
    grads = jnp.array([-3.0, 0.0, 3.0])
    found = jax.jit(lambda a, b: clipped(gcx.clip_by_value(a, min_value=b), grads))(-1.0, -2.0)
    assert not np.any(found) or np.all((found >= -2) & (found <= -1))


@pytest.mark.parametrize("bad", [np.nan, *slow(np.inf, 3e38)], ids=["nan", "inf", "overflow"])
@pytest.mark.parametrize(
    "tx",
    [gcx.clip_by_global_norm(1.0), gcx.clip_by_leaf_norm(1.0), gcx.adaptive_grad_clip(0.1)],
    ids=["global", "leaf", "agc"],
)
def test_forward_derivatives_of_a_bad_step_are_zero_as_reverse_ones(tx, bad):
    grads = jnp.array([bad, bad, 1.0])
    params = jnp.ones(3)
    _, tangent = jax.jvp(lambda g: clipped(tx, g, params), (grads,), (jnp.ones(3),))
    cotangent = jax.grad(lambda g: clipped(tx, g, params).sum())(grads)
    np.testing.assert_array_equal(tangent, jnp.zeros(3))
    np.testing.assert_array_equal(cotangent, jnp.zeros(3))


MAPPED = {
    "num_layer_axes": lambda: gcx.clip_by_leaf_norm(rules.ema(), num_layer_axes={"w": 1, "b": 0}),
    "labels": lambda: gcx.clip_by_group_norm(1.0, {"w": "a", "b": "b"}),
    "granularity": lambda: gcx.watch(
        sgd, granularity=granularities.group({"w": "a", "b": "b"}), of=("gradient",)
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_map_params_accepts_transformations_with_prefix_trees(name):
    tx = optax.chain(MAPPED[name](), optax.trace(0.9))
    doubled = optax.tree.map_params(tx, lambda x: 2 * x + 1, tx.init(TREE))
    np.testing.assert_array_equal(doubled[1].trace["w"], jnp.ones((4, 2)))


EXPLICIT = {
    "zero": {"threshold": 1.0, "reaction": "zero"},
    "function": {"threshold": 1.0, "reaction": lambda norm, threshold: threshold / (norm + 1)},
    "ema": {"threshold": rules.ema(warmup_steps=1)},
    "mean_std": {"threshold": rules.mean_std(window=4, warmup_steps=1)},
    "relative": {"threshold": rules.relative_to_params(0.1)},
}


@needs_eight_devices
@pytest.mark.parametrize("name", ["mean_std", *slow(*(x for x in EXPLICIT if x != "mean_std"))])
def test_explicitly_sharded_norms_are_clipped_as_on_one_device(name):
    tx = gcx.clip_by_norm(**EXPLICIT[name], granularity=granularities.axis(-1))
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))
    grads = jnp.arange(32.0).reshape(8, 4)
    update = jax.jit(functools.partial(clipped, tx))
    with jax.set_mesh(mesh):
        found = update(jax.device_put(grads, NamedSharding(mesh, P("i"))))
    np.testing.assert_allclose(found, clipped(tx, grads), rtol=1e-6)


FACTORIES = [getattr(rules, x) for x in ("zscore", "mean_std", "percentile", "quantile", "ema")]
FACTORIES += [rules.relative_to_params, rules.capped]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda x: x.__name__)
def test_a_factory_of_rules_that_was_not_called_raises_with_the_call(factory):
    for argument, make in (("max_norm", gcx.clip_by_leaf_norm), ("rule", rules.capped)):
        with pytest.raises(TypeError, match=rf"`{argument}.* must be .*{factory.__name__}\("):
            make(factory, 1.0) if make is rules.capped else make(factory)
