"""Many devices: the result is that of one, and costs one all-reduce. Eight virtual CPU devices."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx
import hlo
import oracles
import trees
from accumulation_cases import collectives

pytestmark = [pytest.mark.slow, compat.needs_eight_devices]

# XLA merges the all-reduces of one program into one, but its CPU backend does not do so in
# JAX 0.7; GPU and TPU backends do. There only the number inside `shard_map` is ours.
MERGES_ALL_REDUCES = compat.VERSION >= (0, 8)

# FSDP shards every parameter over the data axis.
SPECS = {
    "fsdp": {"embed": P("data"), "in": P("data"), "out": P(None, "data"), "norm": P()},
    "both": {
        "embed": P("data"),
        "in": P("data", "model"),
        "out": P("model", "data"),
        "norm": P("model"),
    },
    "replicated": {"embed": P(), "in": P(), "out": P(), "norm": P()},
}
SHAPES = {"embed": (16, 8), "in": (8, 32), "out": (32, 8), "norm": (8,)}


@functools.cache
def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def grads():
    return {name: trees.normal(x, seed=i) for i, (name, x) in enumerate(SHAPES.items())}


LABELS = {"embed": "rest", "in": "body", "out": "body", "norm": "rest"}
CLIPS = {
    "global": gcx.clip_by_global_norm(0.5),
    "global 1-norm": gcx.clip_by_global_norm(0.5, ord=1.0),
    "global inf": gcx.clip_by_global_norm(0.5, ord=math.inf),
    "leaf": gcx.clip_by_leaf_norm(0.5),
    "group": gcx.clip_by_group_norm({"body": 0.5, "rest": 0.1}, LABELS),
    "block rms": gcx.clip_by_block_rms(0.5),
    "unit": gcx.adaptive_grad_clip(0.1),
}
NORM_CLIPS = [name for name in CLIPS if name != "unit"]


def assert_same(got, wanted):
    chex.assert_trees_all_close(got, wanted, rtol=1e-6, atol=1e-30)


def norms_of(tree, **options):
    return gcx.global_norm(tree, **options), gcx.leaf_norms(tree, **options)


# --- jit with sharded arrays ----------------------------------------------------------------


@pytest.mark.parametrize(("layout", "num_sets"), [("fsdp", 1), ("both", 3)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["global", "leaf"])
def test_no_shard_is_gathered_and_one_all_reduce_per_set_of_axes(layout, num_sets, kind, name):
    # Small leaves of mixed layouts, which would be joined on one device.
    specs, copies = SPECS[layout], range(4 if name == "global" and kind == AxisType.Auto else 1)
    tree = [
        {k: jax.device_put(x, NamedSharding(mesh(kind), specs[k])) for k, x in grads().items()}
        for _ in copies
    ]
    text = hlo.compiled(lambda g: CLIPS[name].update(g, None), tree)
    assert collectives(text, branches=True).keys() <= {"all-reduce"}
    if MERGES_ALL_REDUCES:
        assert hlo.count(text, "all-reduce") <= num_sets


# --- shard_map ------------------------------------------------------------------------------


def mapped(fun, specs, out_specs, **kwargs):
    return jax.jit(jax.shard_map(fun, mesh=mesh(), in_specs=specs, out_specs=out_specs, **kwargs))


def state_specs(clip):
    return jax.tree.map(lambda _: P(), clip.init(grads()))


@pytest.mark.parametrize(
    ("layout", "name", "all_reduces"),
    [
        *(("both", name, 1) for name in NORM_CLIPS),
        ("fsdp", "global", 1),
        ("replicated", "global", 0),
    ],
)
def test_shard_map_is_the_same_as_one_device_and_costs_one_all_reduce(layout, name, all_reduces):
    """Sharded and replicated leaves in one tree; the axes are read from their types."""
    clip, specs = CLIPS[name], SPECS[layout]
    fun = mapped(lambda g: clip.update(g, None), (specs,), (specs, state_specs(clip)))
    assert_same(fun(grads()), jax.jit(clip.update)(grads(), None))
    text = fun.lower(grads()).compile().as_text()
    assert hlo.count(text, "all-reduce") == all_reduces
    assert collectives(text, branches=True).keys() == ({"all-reduce"} if all_reduces else set())


@pytest.mark.parametrize("make", [gcx.clip_by_global_norm, gcx.clip_by_leaf_norm])
def test_replicated_parameters_count_once_beside_gradients_that_vary(make):
    clip = make(gcx.thresholds.relative_to_params(0.1))
    fun = mapped(
        lambda g, p: clip.update(g, clip.init(p), p)[1].clip_threshold,
        ({"w": P(("data", "model"))}, {"w": P()}),
        P(),
    )
    threshold = fun({"w": jnp.arange(32.0)}, {"w": jnp.ones(4)})
    np.testing.assert_allclose(threshold, 0.2, rtol=1e-6)  # 0.1 times the norm of four ones


@pytest.mark.parametrize("name", [*NORM_CLIPS, "unit"])
def test_bad_value_on_one_device_reaches_all(name):
    # Units must not be sharded inside `shard_map`: their norm runs over axis 0.
    specs = {**dict.fromkeys(SHAPES, P(None, ("data", "model"))), "norm": P()}
    clip = CLIPS[name]
    fun = mapped(lambda g: clip.update(g, None, g), (specs,), (specs, state_specs(clip)))
    for bad in (math.nan, math.inf):
        tree = grads()
        tree["in"] = tree["in"].at[7, 31].set(bad)
        updates, state = fun(tree)
        assert all(np.isnan(x).all() for x in updates.values())
        assert not np.isfinite(np.float32(jax.tree.leaves(state.grad_norm))).all()
        assert state.clip_fraction == 1
        np.testing.assert_array_equal(jax.tree.leaves(state.clip_factor), math.nan)


# --- where types are silent -----------------------------------------------------------------


@pytest.mark.parametrize("axis_name", ["data", ("data", "model")])
def test_axis_name_where_types_are_not_checked(axis_name):
    spec = P("data") if axis_name == "data" else P("data", "model")
    tree = {"a": trees.normal((8, 4)), "b": trees.normal((4, 2), seed=1)}
    specs = dict.fromkeys(tree, spec)
    clip = gcx.clip_by_global_norm(0.5, axis_name=axis_name)
    fun = mapped(
        lambda g: (clip.update(g, None)[0], norms_of(g, axis_name=axis_name)),
        (specs,),
        (specs, (P(), dict.fromkeys(tree, P()))),
        check_vma=False,
    )
    assert_same(fun(tree), (jax.jit(CLIPS["global"].update)(tree, None)[0], norms_of(tree)))


def test_no_axis_name_after_pmean_where_types_are_not_checked():
    """With `axis_name=`, the norm of equal gradients is too large by the root of 8."""
    tree = {"a": trees.normal((8, 4)), "b": trees.normal((8, 2), seed=1)}
    mean = {name: x.reshape(8, 1, -1).mean(0) for name, x in tree.items()}
    expected = CLIPS["global"].update(mean, None)[0], gcx.global_norm(mean)

    def clip(g):
        g = jax.lax.pmean(g, "data")
        norms = gcx.global_norm(g), gcx.global_norm(g, axis_name="data")
        return CLIPS["global"].update(g, None)[0], *norms

    flat = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": flat, "in_specs": P("data"), "out_specs": P(), "check_vma": False}
    *found, wrong = jax.jit(jax.shard_map(clip, **specs))(tree)
    assert_same(tuple(found), expected)
    np.testing.assert_allclose(wrong, math.sqrt(8) * expected[1], rtol=1e-6)


def test_axis_name_is_harmless_where_types_speak():
    """The types win: a replicated leaf is not counted once for each device."""
    specs = SPECS["fsdp"]
    fun = mapped(lambda g: gcx.global_norm(g, axis_name="data"), (specs,), P())
    assert oracles.ulps(fun(grads()), oracles.global_norm(trees.leaves(grads()))) <= 8


def test_an_empty_axis_name_means_the_norm_of_this_device():
    def clipped(g):
        return (
            gcx.clip_by_global_norm(1.0, axis_name=()).update(g, None)[0],
            gcx.clip_by_leaf_norm(1.0, axis_name=()).update(g, None)[0],
            gcx.clip_grad_norm(g, 1.0, axis_name=())[0],
            g / jnp.maximum(1.0, gcx.global_norm(g, axis_name=())),
        )

    spec, rows = P(("data", "model")), trees.normal((8, 5))
    exact = rows / np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True))
    for found in mapped(clipped, (spec,), spec)(rows):
        np.testing.assert_allclose(found, exact, rtol=1e-6)


EXPLICIT = {
    "zero": {"threshold": 1.0, "reaction": "zero"},
    "function": {"threshold": 1.0, "reaction": lambda norm, threshold: threshold / (norm + 1)},
    "ema": {"threshold": gcx.thresholds.ema(warmup_steps=1)},
    "mean_std": {"threshold": gcx.thresholds.mean_std(window=4, warmup_steps=1)},
    "relative": {"threshold": gcx.thresholds.relative_to_params(0.1)},
}


@pytest.mark.parametrize("options", EXPLICIT.values(), ids=EXPLICIT)
def test_explicitly_sharded_norms_are_clipped_as_on_one_device(options):
    clip = gcx.clip_by_norm(**options, granularity=gcx.granularities.axis(-1))
    update = jax.jit(lambda grads: clip.update(grads, clip.init(grads), grads)[0])
    tree = jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        found = update(jax.device_put(tree, NamedSharding(mesh(AxisType.Explicit), P("data"))))
    np.testing.assert_allclose(found, update(tree), rtol=1e-6)
