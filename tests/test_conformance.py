"""The invariants of the design, for every public transformation.

What has only one place in the library is tested there, in depth:

| invariant | here | in depth |
| --- | --- | --- |
| 1 structure, dtypes, odd leaves | updates_have, pass_through, refused_by_path | clipping/test_scale |
| 2 unclipped is unchanged | unchanged_bit_for_bit | clipping/test_step |
| 3 the norm after clipping | are_bounded_after_clipping | clipping/test_properties |
| 4 exact norms | | clipping/test_norm, test_gpu |
| 5 no bad value stays | does_not_outlive_its_step | guarding/test_faults |
| 6 fixed states | keeps_structure, can_be_donated | accumulation/test_resume |
| 7 eager, jit, scan, vmap, pmap | agree_on_one_trace, vmap_is | clipping/test_transform |
| 8 extra arguments | reach_the_inner_one | accumulation/test_wrapping |
| 9 many devices | eight_devices, pmap_over | clipping/test_sharding, test_collectives, test_processes |
| 10 micro-batches are the batch | | accumulation/test_microbatch |
| 11 derivatives | finite_also_at_zero | clipping/test_norm |
| 12 scratch | at_most_one_params_size | accumulation/test_memory |
| 13 errors when built | | wherever something is built |
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx
from registry import ALWAYS_SCALES, TRANSFORMATIONS, WRAPPERS

every = pytest.mark.parametrize("name", list(TRANSFORMATIONS))


def make(name, **axes):
    return optax.with_extra_args_support(TRANSFORMATIONS[name](**axes))


def example(dtype="float32", scale=1.0):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,), "s": ()}
    return {k: jnp.asarray(scale * rng.standard_normal(s), dtype) for k, s in shapes.items()}


def states_equal(a, b):
    return jax.tree.all(
        jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y, equal_nan=True)), a, b)
    )


def types(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_updates_have_structure_shapes_and_dtypes_of_the_input(name, dtype):
    tx, grads = make(name), example(dtype)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert types(updates) == types(grads)


# The optimizers of Optax refuse float0 themselves.
ODD_TREES = {
    "clip_by_group_norm": lambda: gcx.clip_by_group_norm({"a": 1.0}, "a"),
    "accumulate_gradients": lambda: gcx.accumulate_gradients(optax.identity(), 1),
    "skip_nonfinite": lambda: gcx.skip_nonfinite(optax.identity()),
    "skip_large_norm": lambda: gcx.skip_large_norm(optax.identity(), 100.0),
}


@every
def test_none_masked_zero_size_scalar_and_float0_leaves_pass_through(name):
    tx = ODD_TREES.get(name, TRANSFORMATIONS[name])()
    params = {
        "n": None,
        "m": optax.MaskedNode(),
        "z": jnp.zeros((0, 3)),
        "i": jnp.int32(3),
        "x": jnp.ones(()),
    }
    float0 = np.zeros((), jax.dtypes.float0)
    grads = {**params, "i": float0, "x": jnp.float32(0.25)}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["n"] is None and isinstance(updates["m"], optax.MaskedNode)
    assert updates["z"].shape == (0, 3) and updates["i"].dtype == jax.dtypes.float0
    assert jnp.isfinite(updates["x"])


@every
def test_empty_tree_passes_through(name):
    is_grouped = name == "clip_by_group_norm"
    tx = gcx.clip_by_group_norm({"a": 1.0}, {}) if is_grouped else make(name)
    updates, _ = tx.update({}, tx.init({}), {})
    assert updates == {}


@every
def test_integer_leaf_is_refused_by_path(name):
    tx, params = make(name), example()
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"int32\[4, 3\] at updates\['w'\]"):
        tx.update({**params, "w": jnp.ones((4, 3), jnp.int32)}, state, params)


@every
def test_small_gradients_are_unchanged_bit_for_bit(name):
    if name in ALWAYS_SCALES:
        pytest.skip("takes a step of its own")  # an optimizer, or a normaliser by definition
    tx, params = make(name), example()
    grads = example(scale=1e-6)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    chex.assert_trees_all_equal(updates, grads)


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_does_not_outlive_its_step(name, bad):
    if name == "stable_adamw":
        pytest.skip("like Adam it keeps it; its docstring says to wrap it")
    tx, params, good = make(name), example(), example(scale=0.1)
    spoilt = {**good, "b": good["b"].at[1].set(bad)}
    update = jax.jit(tx.update)
    state, clean = tx.init(params), tx.init(params)
    for grads in (good, spoilt, good, good, good, good):
        updates, state = update(grads, state, params)
        _, clean = update(good, clean, params)
    chex.assert_tree_all_finite(updates)
    assert not any(jnp.isnan(x).any() for x in jax.tree.leaves(state))
    # A threshold may be infinite, and an empty place of a window; but not more of them are.
    for kept, expected in zip(jax.tree.leaves(state), jax.tree.leaves(clean), strict=True):
        assert jnp.sum(~jnp.isfinite(kept)) <= jnp.sum(~jnp.isfinite(expected)) + (kept.ndim > 0)


@every
def test_state_keeps_structure_shapes_and_dtypes_for_ever(name):
    tx, params = make(name), example()
    first = tx.init(params)

    def body(state, scale):
        grads = jax.tree.map(lambda x: x * scale, params)
        _, state = tx.update(grads, state, params)
        return state, None

    last, _ = jax.jit(lambda s: jax.lax.scan(body, s, jnp.arange(1.0, 6.0)))(first)
    assert jax.tree.structure(last) == jax.tree.structure(first)
    assert types(last) == types(first)
    either = jax.lax.cond(True, lambda s: tx.update(params, s, params)[1], lambda s: s, last)
    assert types(either) == types(first)


@every
def test_state_can_be_donated_from_init_on(name):
    tx, params = make(name), example()
    step = jax.jit(tx.update, donate_argnums=1)
    state = tx.init(params)
    for _ in range(2):
        _, state = step(params, state, params)


@every
def test_eager_jit_and_scan_agree_on_one_trace(name):
    chex.clear_trace_counter()
    tx, params = make(name), example()
    stream = [example(scale=scale) for scale in (0.3, 3.0, 30.0, 0.1)]
    traces = chex.assert_max_traces(lambda g, s: tx.update(g, s, params), n=1)
    jitted, eager_state, jit_state = jax.jit(traces), tx.init(params), tx.init(params)
    eager, compiled = [], []
    for grads in stream:
        updates, eager_state = tx.update(grads, eager_state, params)
        eager.append(updates)
        updates, jit_state = jitted(grads, jit_state)
        compiled.append(updates)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *stream)
    _, scanned = jax.lax.scan(lambda s, g: tx.update(g, s, params)[::-1], tx.init(params), stacked)
    chex.assert_trees_all_close(eager, compiled, rtol=2e-6, atol=1e-7)
    chex.assert_trees_all_close(
        jax.tree.map(lambda *xs: jnp.stack(xs), *compiled), scanned, rtol=2e-6, atol=1e-7
    )


@every
def test_vmap_is_one_transformation_for_each(name):
    tx, params = make(name), example()
    several = jax.tree.map(lambda x: jnp.stack([x, 20 * x]), params)
    states = jax.vmap(tx.init)(several)
    updates, _ = jax.vmap(tx.update)(several, states, several)
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], several)
        alone, _ = tx.update(one, tx.init(one), one)
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, i=i: x[i], updates), alone, rtol=2e-6, atol=1e-7
        )


class TestChexVariants(chex.TestCase):
    @chex.all_variants(with_pmap=True)
    def test_clip_agrees_with_optax(self):
        ours, theirs = gcx.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)
        grads = example()
        clipped = self.variant(lambda g: ours.update(g, None)[0])(grads)
        expected, _ = theirs.update(grads, optax.EmptyState())
        chex.assert_trees_all_close(clipped, expected, rtol=1e-6)


@every
def test_extra_arguments_are_taken_and_reach_the_inner_one(name):
    seen = []

    def inner_update(updates, state, params=None, *, marker=None, **extra):
        seen.append(marker)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), inner_update)
    if name in WRAPPERS:
        tx = {
            "accumulate_gradients": lambda: gcx.accumulate_gradients(spy, 1),
            "skip_nonfinite": lambda: gcx.skip_nonfinite(spy),
            "skip_large_norm": lambda: gcx.skip_large_norm(spy, 100.0),
            "u_clip": lambda: gcx.u_clip(spy),
        }[name]()
    else:
        tx = optax.chain(TRANSFORMATIONS[name](), spy)
    params = example(scale=0.1)
    tx.update(params, tx.init(params), params, marker="here")
    assert "here" in seen


@every
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_eight_devices_give_what_one_gives(name, mode):
    tx = make(name)
    rng = np.random.default_rng(1)
    params = {
        "w": jnp.asarray(rng.standard_normal((8, 4)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal((4,)), jnp.float32),
    }
    if name == "adaptive_grad_clip":  # their units must not be spread over devices
        specs = {"w": P(None, "data"), "b": P()}
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    else:
        specs = {"w": P("data"), "b": P()}
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = jax.tree.map(lambda x: 3 * x, params)
    alone, state_alone = jax.jit(tx.update)(grads, tx.init(params), params)
    sharded = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), grads, specs)
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    if mode == "jit":
        updates, state = jax.jit(tx.update)(sharded, tx.init(placed), placed)
        for key, spec in specs.items():
            wanted = NamedSharding(mesh, spec)
            assert updates[key].sharding.is_equivalent_to(wanted, updates[key].ndim)
    else:
        step = jax.shard_map(
            lambda g, p: tx.update(g, tx.init(p), p)[0],
            mesh=mesh,
            in_specs=(specs, specs),
            out_specs=specs,
        )
        updates = jax.jit(step)(sharded, placed)
    chex.assert_trees_all_close(updates, alone, rtol=3e-6, atol=1e-7)
    chex.assert_trees_all_equal_structs(state_alone, tx.init(params))


@every
def test_pmap_over_a_named_axis_gives_what_one_device_gives(name):
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)}
    axis = 0
    if name == "adaptive_grad_clip":  # their units must not be spread over devices
        axis = 1
    else:
        params["b"] = jnp.asarray(rng.standard_normal(8), jnp.float32)
    grads = jax.tree.map(lambda x: 3 * x, params)
    tx = make(name)
    alone, _ = tx.update(grads, tx.init(params), params)

    def cut(tree):
        return jax.tree.map(lambda x: jnp.stack(jnp.split(x, x.shape[axis], axis)), tree)

    mapped = make(name, axis_name="data")
    step = jax.pmap(lambda g, p: mapped.update(g, mapped.init(p), p)[0], axis_name="data")
    parts = step(cut(grads), cut(params))
    updates = jax.tree.map(lambda x: jnp.concatenate(list(x), axis), parts)
    chex.assert_trees_all_close(updates, alone, rtol=3e-6, atol=1e-7)


@every
def test_forward_and_reverse_derivatives_are_finite_also_at_zero(name):
    tx, params = make(name), example()
    if name == "accumulate_gradients":
        tx = gcx.accumulate_gradients(SGD_FOR_DERIVATIVES, 1)
    state = tx.init(params)

    def total(grads):
        updates, _ = tx.update(grads, state, params)
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(updates))

    @jax.jit
    def derivatives(grads):
        return jax.grad(total)(grads), jax.jvp(total, (grads,), (params,))[1]

    for grads in (params, jax.tree.map(jnp.zeros_like, params)):
        chex.assert_tree_all_finite(derivatives(grads))


SGD_FOR_DERIVATIVES = optax.sgd(0.5)


# Two clips in a row, or gradient and carry, or moments and an update, all at once: the first
# tree has to be there while the norm of the second is taken.
SCRATCH = {"adagc": 2.1, "u_clip": 2.1, "stable_spam_clip": 2.1, "acclip": 1.6}
SCRATCH |= {"spam_clip": 1.3, "stable_adamw": 1.3}
if jax.__version_info__ < (0, 8):  # its XLA fuses less on CPU
    SCRATCH |= {"adaptive_grad_clip": 2.1, "u_clip": 3.1}
    SCRATCH |= {"spam_clip": 1.6, "stable_adamw": 2.3}


@every
def test_scratch_is_at_most_one_params_size(name):
    tx = make(name)
    params = {f"w{i}": jnp.ones((256, 512)) for i in range(4)}
    if name == "clip_by_group_norm":
        tx = gcx.clip_by_group_norm({"a": 1.0}, "a")
    size = sum(x.nbytes for x in jax.tree.leaves(params))

    def step(params, state, grads):
        return gcx.apply_gradients(tx, grads, state, params)

    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    scratch = compiled.memory_analysis().temp_size_in_bytes / size
    assert scratch <= SCRATCH.get(name, 1.1)


# What a unit is, and its threshold, or the metric that tells it.
BOUNDS = {
    "clip_by_global_norm": ("tree", 1.0),
    "autoclip": ("tree", "clip_threshold"),
    "zclip": ("tree", "clip_threshold"),
    "quantile_clip": ("tree", "clip_threshold"),
    "u_clip": ("tree", 1.0),
    "clip_by_group_norm": ("leaf", 1.0),
    "clip_by_leaf_norm": ("leaf", 1.0),
    "adagc": ("leaf", "clip_threshold/1"),
    "clip_by_block_rms": ("leaf", 0.5 * np.sqrt(64 * 8)),
    "adaptive_grad_clip": ("column", 0.1),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_norms_are_bounded_after_clipping(name, dtype):
    rng = np.random.default_rng(2)
    w = jnp.asarray(rng.uniform(0.1, 0.7, (64, 8)), dtype)
    params = {"w": w} if name == "clip_by_group_norm" else {"v": -w, "w": w}
    tx = make(name)
    state = tx.init(params)
    for scale in (0.5, 0.5, 4.0):  # a level to learn, where there is one, and a spike
        grads = jax.tree.map(lambda x, scale=scale: (scale * x).astype(dtype), params)
        updates, state = tx.update(grads, state, params)
    unit, threshold = BOUNDS[name]
    if isinstance(threshold, str):
        threshold = float(gcx.metrics(state)[threshold])
    exact = np.stack([np.asarray(x, np.float64) for x in updates.values()])
    if unit == "tree":
        norms = np.linalg.norm(exact)
    elif unit == "leaf":
        norms = np.linalg.norm(exact, axis=(1, 2))
    else:
        norms = np.linalg.norm(exact, axis=1)
        threshold *= np.linalg.norm(np.asarray(w, np.float64), axis=0)
    eps = float(jnp.finfo(dtype).eps)
    assert np.all(norms <= threshold * (1 + 2 * eps))
    assert np.any(norms > 0.8 * threshold)  # it was clipped to the threshold, not far below


@every
def test_strict_promotion_and_x64_are_no_problem(name):
    tx = make(name)
    with compat.strict():  # promotion is checked when a function is traced
        params = example("bfloat16")
        jax.eval_shape(tx.update, params, tx.init(params), params)
    with compat.x64():
        params = example("float64")
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert types(updates) == types(params)


def test_config_of_jax_is_left_alone():
    before = functools.partial(jax.config.read, "jax_enable_x64")()
    gcx.clip_by_global_norm(1.0).update(example(), None)
    assert jax.config.read("jax_enable_x64") == before
