"""The guards: what they skip, what a skip leaves untouched, and that they never lock up."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import compat
import gradclip_jax as gcx
from compat import strict, x64
from hlo import compiled
from trees import build, normal

INT_MAX = np.iinfo(np.int32).max
GUARDS = {
    "skip_nonfinite": gcx.skip_nonfinite,
    "skip_large_norm": functools.partial(gcx.skip_large_norm, max_norm=1e4),
    "both": lambda inner, **kwargs: gcx.skip_nonfinite(
        gcx.skip_large_norm(inner, 1e4, **kwargs), **kwargs
    ),
}
RULES = {
    "percentile": gcx.thresholds.percentile(90.0, window=50),
    "mean_std": gcx.thresholds.mean_std(6.0, window=50, warmup_steps=10),
    "zscore": gcx.thresholds.zscore(),
    "ema": gcx.thresholds.ema(2.0, warmup_steps=10, warmup_max=jnp.inf),
    "quantile": gcx.thresholds.quantile(0.9),
}
EVERYTHING = {
    name: build(name) for name in ("dense", "mixed_dtypes", "masked", "zero_size", "float0")
}
each_guard = pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def naive_zscore(z=3.0, decay=0.9, warmup=5):
    """As published ones lock up: a zero variance, and a level that skipped norms never move."""

    def init(norm):
        return {"count": jnp.zeros((), jnp.int32), "mean": norm, "var": jnp.zeros_like(norm)}

    def update(norm, s, param_norm):
        threshold = jnp.where(s["count"] < warmup, jnp.inf, s["mean"] + z * jnp.sqrt(s["var"]))
        first = s["count"] == 0
        mean = jnp.where(first, norm, decay * s["mean"] + (1 - decay) * norm)
        var = jnp.where(first, 0.0, decay * s["var"] + (1 - decay) * (norm - mean) ** 2)
        learned = {"count": s["count"] + 1, "mean": mean, "var": var}
        return threshold, jax.tree.map(
            lambda new, old: jnp.where(norm <= threshold, new, old), learned, s
        )

    return gcx.thresholds.Rule(init, update)


def params_and_grads():
    params = {"w": normal((4, 3), seed=1), "b": normal((3,), "bfloat16", seed=2)}
    return params, jax.tree.map(lambda p: (p * 0.5 + 0.1).astype(p.dtype), params)


def spoiled(grads, value=np.nan):
    return {**grads, "w": grads["w"].at[1, 2].set(value)}


def adamw():
    schedule = optax.cosine_decay_schedule(0.1, 10)
    # Old releases of Optax round b2 to the dtype of the first gradient: in bfloat16 to one.
    make = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)
    return make(schedule, weight_decay=0.1)


def feed(tx, norms):
    """Runs a guard on gradients of the given norms; the skips of each step, and the last state.

    Several streams of norms, one a row, are fed by one program.
    """

    def step(state, norm):
        _, state = tx.update(jnp.stack([norm * 0.6, norm * 0.8]), state)
        return state, state.consecutive_skips > 0

    def run(stream):
        return jax.lax.scan(step, tx.init(jnp.zeros(2)), stream)

    norms = jnp.asarray(np.asarray(norms), jnp.float32)
    state, skipped = jax.jit(run if norms.ndim == 1 else jax.vmap(run))(norms)
    return np.asarray(skipped), jax.tree.map(np.asarray, state)


def train(tx, stream):
    """Takes a step on a gradient of each number; the parameters and skips so far, last state."""

    def step(carry, grad):
        params, state = gcx.apply_gradients(tx, jnp.full(2, grad), carry[1], carry[0])
        return (params, state), (params, state.skipped_nonfinite)

    start = (jnp.zeros(2), tx.init(jnp.zeros(2)))
    (_, state), (params, skipped) = jax.jit(lambda s: jax.lax.scan(step, s, stream))(start)
    return params, skipped, state


# What a skip is


@each_guard
def test_a_skip_changes_nothing(guard):
    params, grads = params_and_grads()
    tx = guard(adamw())
    for run in (lambda f: f, jax.jit):
        update, apply = run(tx.update), run(functools.partial(gcx.apply_gradients, tx))
        moved, state = update(grads, tx.init(params), params)
        for bad in (np.nan, np.inf, -np.inf):
            updates, after = update(spoiled(grads, bad), state, params)
            # No step of momentum, no weight decay, no step of the schedule.
            chex.assert_trees_all_equal(after.inner_state, state.inner_state)
            chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, moved))
            stay, again = apply(spoiled(grads, bad), state, params)
            chex.assert_trees_all_equal((stay, again), (params, after))
            assert dtypes((updates, after, stay)) == dtypes((moved, state, params))


@each_guard
def test_a_good_step_is_that_of_the_inner_optimizer(guard):
    params, grads = params_and_grads()
    inner = optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    tx = guard(inner)
    state, bare = tx.init(params), inner.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
        expected, bare = inner.update(grads, bare, params)
        chex.assert_trees_all_equal(updates, expected)
        assert state.skipped_nonfinite == state.consecutive_skips == 0
        grads = jax.tree.map(lambda g: (g * 1.5).astype(g.dtype), grads)


def test_any_tree_passes():
    for tree in (EVERYTHING, *map(build, ("array", "empty", "only_none", "only_zero_size"))):
        tx = gcx.skip_nonfinite(gcx.skip_large_norm(optax.identity(), jnp.inf))
        updates, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
        chex.assert_trees_all_equal(updates, tree)
        assert state.skipped_nonfinite == state.inner_state.consecutive_skips == 0


def test_gradients_and_parameters_may_differ_in_dtype():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16), "b": jnp.ones(2, jnp.float32)}
    grads = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    for inner in (adamw(), optax.lion(0.1)):
        tx = GUARDS["both"](inner)
        state = tx.init(params)
        update, apply = jax.jit(tx.update), jax.jit(functools.partial(gcx.apply_gradients, tx))
        for batch in (grads, spoiled_all(grads), grads):
            updates, _ = update(batch, state, params)
            after, next_state = apply(batch, state, params)
            assert dtypes((after, next_state)) == dtypes((params, state))
            assert not gcx.nonfinite_leaves((updates, after, next_state))
            state = next_state
        assert state.skipped_nonfinite == 1


def dtypes(tree):
    return [x.dtype.name for x in jax.tree.leaves(tree)]


def spoiled_all(tree):
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tree)


@each_guard
def test_a_bad_step_is_never_applied_whatever_the_limit(guard):
    params, grads = params_and_grads()
    tx = guard(optax.sgd(0.1), max_consecutive_skips=2)
    state, failed = tx.init(params), []
    for batch in [grads] + 5 * [spoiled(grads)] + [grads, grads]:
        before = params
        params, state = gcx.apply_gradients(tx, batch, state, params)
        is_bad = bool(jnp.isnan(batch["w"]).any())
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, params, before))) == is_bad
        failed.append(bool(state.guard_failed))
    assert failed == [False, False, True, True, True, True, True, True]
    assert state.skipped_nonfinite == 5 and state.consecutive_skips == 0


@each_guard
def test_without_a_limit_the_guard_does_not_fail(guard):
    params, grads = params_and_grads()
    tx = guard(optax.sgd(0.1))
    state = tx.init(params)
    for _ in range(30):
        _, state = tx.update(spoiled(grads), state, params)
    assert state.consecutive_skips == 30 and not state.guard_failed


@each_guard
def test_counters_saturate(guard):
    params, grads = params_and_grads()
    tx = guard(optax.sgd(0.1), max_consecutive_skips=INT_MAX)
    state = tx.init(params)
    full = {"skipped_nonfinite": INT_MAX, "consecutive_skips": INT_MAX - 1}
    state = state._replace(**{name: jnp.int32(value) for name, value in full.items()})
    for _ in range(2):
        _, state = jax.jit(tx.update)(spoiled(grads), state, params)
        assert state.skipped_nonfinite == INT_MAX and state.consecutive_skips == INT_MAX
    assert state.guard_failed


def test_the_counter_of_large_norms_saturates():
    tx = gcx.skip_large_norm(optax.sgd(0.1), naive_zscore(warmup=1))
    _, state = feed(tx, [1.0])
    state = state._replace(skipped_large_norm=jnp.int32(INT_MAX), large_streak=jnp.int32(INT_MAX))
    state = state._replace(rules=jax.tree.map(jnp.asarray, state.rules))
    _, after = tx.update(jnp.array([1e3, 0.0]), state._replace(large_streak=jnp.int32(3)))
    assert after.skipped_large_norm == INT_MAX and after.large_streak == 4


# What reaches the guard, and what reaches the optimizer in it


@each_guard
def test_extra_arguments_reach_the_inner_transformation(guard):
    def update(updates, state, params=None, *, value, lucky, **extra_args):
        return jax.tree.map(lambda u: u * lucky, updates), state + value

    inner = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    params, grads = params_and_grads()
    grads = {"w": grads["w"]}
    tx = guard(inner)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads, value=2.0, lucky=7.0)
    chex.assert_trees_all_equal(updates, {"w": grads["w"] * 7.0})
    assert jax.tree.leaves(state)[-1] == 2.0
    assert isinstance(tx, optax.GradientTransformationExtraArgs)


@each_guard
def test_an_optimizer_that_takes_no_extra_arguments_is_spared_them(guard):
    params, grads = params_and_grads()
    tx = guard(optax.sgd(0.1))
    updates, _ = tx.update(grads, tx.init(params), params, value=1.0, anything=None)
    chex.assert_trees_all_equal(
        updates, optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))[0]
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, np.float16("inf"), jnp.array([1.0, jnp.nan])])
def test_a_loss_that_is_not_finite_is_skipped(value):
    params, grads = params_and_grads()
    tx = gcx.skip_nonfinite(adamw())
    for run in (lambda f: f, jax.jit):
        updates, state = run(tx.update)(grads, tx.init(params), params, value=value)
        assert state.skipped_nonfinite == 1
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, grads))
    _, state = tx.update(grads, tx.init(params), params, value=3)
    assert state.skipped_nonfinite == 0


def test_a_bad_update_of_a_good_gradient_is_skipped():
    params, grads = params_and_grads()
    tx = gcx.skip_nonfinite(optax.chain(optax.adam(0.1), optax.scale(np.inf)))
    start = tx.init(params)
    updates, state = tx.update(grads, start, params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, grads))
    chex.assert_trees_all_equal(state.inner_state, start.inner_state)


@pytest.mark.parametrize("ord", [1, 2, 3.5, np.inf])
def test_a_nan_is_skipped_in_a_large_leaf_whatever_the_order_of_the_norm(ord):
    # From 65,536 elements on, JAX on the CPU drops a NaN from a maximum.
    grads = jnp.ones(70_000).at[30_000].set(jnp.nan)
    for tx in (gcx.skip_nonfinite, functools.partial(gcx.skip_large_norm, max_norm=1e9, ord=ord)):
        updates, state = jax.jit(tx(optax.sgd(0.1)).update)(grads, tx(optax.sgd(0.1)).init(grads))
        assert state.skipped_nonfinite == 1 and not updates.any()


def test_the_guard_does_not_take_a_threshold_that_is_turned_off_for_a_fault():
    # ZClip has no threshold for norms that are no spikes, AdaGC none for the whole tree after
    # its warm-up: both go from a number to infinity.
    for clip in (gcx.zclip(max_norm=None, warmup_steps=3), gcx.adagc(warmup_steps=3)):
        tx = gcx.skip_nonfinite(optax.chain(clip, optax.sgd(0.1)))
        skipped, _ = feed(tx, [1.0, 1.1, 0.9, 1.0, 50.0, 1.0, 1.1, 0.9])
        assert not skipped.any()


@each_guard
def test_float64_is_guarded_in_float64(guard):
    with x64():
        tx = guard(optax.adam(0.1, mu_dtype=jnp.float32))
        grads = {"a": jnp.full(2, 0.5, jnp.float64), "b": jnp.ones(2, jnp.float32)}
        _, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
        assert state.skipped_nonfinite == 0
        bad = {**grads, "a": jnp.array([0.5, jnp.nan], jnp.float64)}
        _, state = jax.jit(tx.update)(bad, state, grads)
        assert state.skipped_nonfinite == 1


@each_guard
def test_nothing_is_promoted(guard):
    params, grads = params_and_grads()
    with strict():
        tx = guard(optax.trace(0.9), max_consecutive_skips=2)
        state = tx.init(params)
        for batch in (grads, spoiled(grads)):
            _, state = jax.jit(tx.update)(batch, state, params)
        assert state.skipped_nonfinite == 1


# Eager, jit, vmap, scan, devices


@each_guard
def test_eager_jit_and_scan_agree_in_one_trace(guard):
    params, grads = params_and_grads()
    tx = guard(optax.adam(0.1))
    sequence = [grads, spoiled(grads), grads, spoiled(grads, np.inf), grads]
    traces = []

    def step(state, batch):
        updates, state = tx.update(batch, state, params)
        traces.append(1)
        return state, updates

    eager = tx.init(params)
    for batch in sequence:
        eager, _ = step(eager, batch)
    traces.clear()
    jitted, traced = tx.init(params), jax.jit(step)
    for batch in sequence:
        jitted, _ = traced(jitted, batch)
    assert len(traces) == 1
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *sequence)
    scanned, _ = jax.lax.scan(step, tx.init(params), stacked)
    for other in (jitted, scanned):
        assert dtypes(other) == dtypes(eager)
        # The moments of one leaf are bfloat16.
        chex.assert_trees_all_close(other.inner_state, eager.inner_state, rtol=2.0**-6)
        assert other.skipped_nonfinite == eager.skipped_nonfinite == 2


@each_guard
def test_members_of_a_vmap_decide_for_themselves(guard):
    tx = guard(optax.sgd(1.0))
    grads = jnp.ones((4, 3)).at[2, 1].set(jnp.nan)
    state = jax.vmap(tx.init)(jnp.zeros((4, 3)))
    updates, state = jax.jit(jax.vmap(tx.update))(grads, state)
    assert state.skipped_nonfinite.tolist() == [0, 0, 1, 0]
    assert updates.sum(1).tolist() == [-3.0, -3.0, 0.0, -3.0]


def on_shards(tx, check_vma=True):
    """One step on a sharded and a replicated leaf; what each device decided, and the updates."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    shards, whole = PartitionSpec("data"), PartitionSpec()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=({"s": shards, "w": whole},) * 2,
        out_specs=({"s": shards, "w": whole}, shards, shards),
        check_vma=check_vma,
    )
    def step(grads, params):
        params, state = gcx.apply_gradients(tx, grads, tx.init(params), params)
        mine = jnp.zeros(1, jnp.int32) + (jax.lax.axis_index("data") * 0).astype(jnp.int32)
        return params, mine + state.skipped_nonfinite, mine + state.consecutive_skips

    return jax.jit(step)


@each_guard
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_nan_on_one_shard_is_skipped_by_all_devices(guard, check_vma):
    axis_name = None if check_vma else "data"
    tx = guard(optax.adam(0.1), axis_name=axis_name)
    params = {"s": jnp.zeros(16), "w": jnp.zeros(3)}
    grads = {"s": jnp.ones(16), "w": jnp.ones(3)}
    step = on_shards(tx, check_vma)
    after, nonfinite, streak = step(grads, params)
    assert nonfinite.tolist() == streak.tolist() == [0] * 8
    assert (after["s"] != 0).all() and (after["w"] != 0).all()
    for place in (0, 7, 15):
        bad = {**grads, "s": grads["s"].at[place].set(jnp.nan)}
        after, nonfinite, streak = step(bad, params)
        assert nonfinite.tolist() == [1] * 8 or streak.tolist() == [1] * 8
        chex.assert_trees_all_equal(after, params)


def test_the_norm_of_all_shards_decides():
    params = {"s": jnp.zeros(16), "w": jnp.zeros(2)}
    grads = {"s": jnp.full(16, 3.0), "w": jnp.array([0.0, 5.0])}  # norm 13, 3 * sqrt(2) a device
    for max_norm, skips in ((12.9, 1), (13.1, 0)):
        _, _, streak = on_shards(gcx.skip_large_norm(optax.sgd(1.0), max_norm))(grads, params)
        assert streak.tolist() == [skips] * 8


def test_devices_of_a_pmap_decide_alike():
    for guard in GUARDS.values():
        tx = guard(optax.sgd(1.0), axis_name="data")
        grads = jnp.ones((8, 2)).at[3, 1].set(jnp.nan)
        state = jax.pmap(tx.init)(grads)
        updates, state = jax.pmap(tx.update, axis_name="data")(grads, state)
        assert not updates.any() and (state.skipped_nonfinite == 1).all()


# Buffers


@each_guard
def test_a_fresh_state_can_be_donated_again_and_again(guard):
    params, grads = params_and_grads()
    tx = guard(optax.adam(0.1))
    step = jax.jit(
        lambda params, state, grads: gcx.apply_gradients(tx, grads, state, params),
        donate_argnums=(0, 1),
    )
    for _ in range(2):  # what `init` made the first time must not be part of the transformation
        own, state = jax.tree.map(jnp.copy, params), tx.init(params)
        for _ in range(2):
            own, state = step(own, state, grads)
    assert not gcx.nonfinite_leaves(own)


def test_a_state_with_a_rule_can_be_donated():
    for rule in (*RULES.values(), naive_zscore(), 1.0, lambda count: 1.0):
        tx = gcx.skip_large_norm(optax.sgd(0.1), rule)
        state = tx.init(jnp.ones(2))
        step = jax.jit(lambda s, tx=tx: tx.update(jnp.ones(2), s)[1], donate_argnums=0)
        step(step(state))


@each_guard
def test_a_skip_copies_no_buffer(guard):
    n = 300_000
    params = {"w": jnp.zeros((n // 100, 100)), "b": jnp.zeros(100)}
    tx = guard(optax.adamw(0.1))

    def step(params, state, grads):
        return gcx.apply_gradients(tx, grads, state, params)

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params)
    memory = lowered.compile().memory_analysis()
    # One temporary of the size of the parameters, in the branch that rescales a norm, or one flag
    # for each; both for the XLA of JAX 0.7. And all donated buffers reused: parameters, moments.
    limit = 1.1 if compat.VERSION >= (0, 8) else 1.3
    assert memory.temp_size_in_bytes <= limit * 4 * n
    assert memory.alias_size_in_bytes >= 3 * 4 * n
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", lowered.compile().as_text())
    assert not [shape for shape in copies if np.prod(list(map(int, shape.split(",")))) > 100]


def test_a_skip_for_the_norm_does_not_run_the_optimizer():
    def update(updates, state, params=None):
        jax.debug.callback(ran.append, 1)
        return updates, state

    ran = []
    inner = optax.GradientTransformation(lambda params: (), update)
    tx = gcx.skip_large_norm(inner, 1.0)
    step = jax.jit(tx.update)
    _, state = step(jnp.array([2.0]), tx.init(jnp.zeros(1)))
    jax.effects_barrier()
    assert not ran
    step(jnp.array([0.5]), state)
    jax.effects_barrier()
    assert ran == [1]


def test_the_verdict_costs_one_all_reduce_in_shard_map():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    spec = PartitionSpec("data")
    tx = gcx.skip_large_norm(optax.sgd(1.0), 1.0)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=({"a": spec, "b": spec},), out_specs=spec)
    def step(grads):
        return tx.update(grads, tx.init(grads))[0]["a"]

    text = compiled(step, {"a": jnp.ones(64), "b": jnp.ones((64, 4))})
    reduces = re.findall(r"all-reduce(?:-start)?\(", text.split("ENTRY")[1])
    assert len(reduces) == 1


# Thresholds


@pytest.mark.parametrize(
    ("norm", "max_norm", "taken"),
    [
        (1.0, 1.0, True),
        (np.nextafter(np.float32(1), np.float32(2)), 1.0, False),
        (0.0, 1.0, True),
        (2.0**100, np.inf, True),
        (np.inf, np.inf, False),
        (np.nan, np.inf, False),
    ],
)
def test_a_step_is_taken_up_to_the_threshold(norm, max_norm, taken):
    tx = gcx.skip_large_norm(optax.sgd(1.0), max_norm)
    updates, state = tx.update(jnp.array([norm, 0.0], jnp.float32), tx.init(jnp.zeros(2)))
    assert (state.consecutive_skips == 0) == taken
    assert updates.tolist() == [-norm if taken else 0.0, 0.0]
    np.testing.assert_equal(np.asarray(state.grad_norm), np.float32(norm))
    assert state.clip_threshold == max_norm
    counts = int(state.skipped_large_norm), int(state.skipped_nonfinite)
    assert counts == ((0, 0) if taken else (1, 0) if np.isfinite(norm) else (0, 1))


def test_a_schedule_counts_all_steps():
    tx = gcx.skip_large_norm(optax.sgd(1.0), lambda count: 10.0 - count, relearn_after=1)
    skipped, state = feed(tx, [9.5, 9.5, np.nan, 6.5, 6.5, 6.5])
    assert skipped.tolist() == [False, True, True, False, True, True]
    assert state.clip_threshold == 5.0
    capped = gcx.thresholds.capped(lambda count: 10.0 - count, 20.0)
    _, state = feed(gcx.skip_large_norm(optax.sgd(1.0), capped, relearn_after=1), np.full(6, 20.0))
    assert state.clip_threshold == 5.0  # it has no level to learn anew


@pytest.mark.parametrize("ord", [1, 2, np.inf])
def test_the_order_of_the_norm_is_a_choice(ord):
    grads = jnp.array([3.0, -4.0])
    tx = gcx.skip_large_norm(optax.sgd(1.0), 100.0, ord=ord)
    _, state = tx.update(grads, tx.init(grads))
    assert state.grad_norm == np.linalg.norm([3, 4], ord)


def test_a_traced_threshold_works():
    def step(max_norm, grads):
        tx = gcx.skip_large_norm(optax.sgd(1.0), max_norm)
        return tx.update(grads, tx.init(grads))[1].consecutive_skips

    assert jax.jit(step)(4.9, jnp.array([3.0, 4.0])) == 1
    assert jax.jit(step)(5.1, jnp.array([3.0, 4.0])) == 0


def test_a_threshold_may_follow_the_parameters():
    tx = gcx.skip_large_norm(optax.sgd(1.0), gcx.thresholds.relative_to_params(0.1))
    params = jnp.array([30.0, 40.0])
    for norm, skips in ((4.9, 0), (5.1, 1)):
        _, state = tx.update(jnp.array([norm, 0.0]), tx.init(params), params)
        assert state.consecutive_skips == skips and state.clip_threshold == 5.0


def test_hyperparameters_can_be_injected():
    params, grads = params_and_grads()
    schedule = optax.piecewise_constant_schedule(1e-6, {2: 1e9})
    injected = optax.inject_hyperparams(gcx.skip_large_norm)(optax.adam(0.1), max_norm=schedule)
    state = injected.init(params)
    skips = []
    for _ in range(4):
        _, state = jax.jit(injected.update)(grads, state, params)
        skips.append(int(gcx.metrics(state)["skipped_large_norm"]))
    assert skips == [1, 2, 2, 2] and "max_norm" in state.hyperparams
    injected = optax.inject_hyperparams(gcx.skip_nonfinite)(optax.adam(0.1))
    _, state = injected.update(spoiled(grads), injected.init(params), params)
    assert gcx.metrics(state)["skipped_nonfinite"] == 1


# No lock-up


def normals(count, level=1.0, seed=0):
    return level * (1 + 0.1 * np.random.default_rng(seed).standard_normal(count))


@each_rule
def test_a_constant_norm_from_step_0_is_not_skipped_for_good(rule):
    skipped, _ = feed(gcx.skip_large_norm(optax.sgd(0.1), rule), np.full(300, 0.7))
    # A rule that aims at the 0.9 quantile skips one norm of ten: that is its definition.
    assert skipped.mean() <= (0.15 if rule is RULES["quantile"] else 0)


def test_a_constant_norm_does_not_lock_up_a_rule_that_would():
    # Its threshold is the mean, which rounds to either side of the norm.
    tx = gcx.skip_large_norm(optax.sgd(0.1), naive_zscore(), relearn_after=5)
    skipped, _ = feed(tx, np.full(200, 0.7))
    assert longest_run(skipped) <= 5 and skipped.mean() < 0.9


def longest_run(skipped):
    longest = run = 0
    for skip in skipped:
        run = run + 1 if skip else 0
        longest = max(longest, run)
    return longest


@each_rule
def test_a_lasting_rise_is_learned(rule):
    tx = gcx.skip_large_norm(optax.sgd(0.1), rule, relearn_after=25)
    rises = (30.0, 1e4, 1e8)
    skips, state = feed(tx, [np.r_[normals(100), rise * normals(300)] for rise in rises])
    for skipped in skips:
        assert longest_run(skipped) <= 25
        # Learned: no more is skipped of the new level than of the old one; a percentile of 90
        # or a quantile of 0.9 skips one norm of ten by its definition.
        assert skipped[-100:].mean() <= 0.35
    assert not np.isnan(state.clip_threshold).any()


def test_a_lasting_rise_is_learned_where_the_rule_itself_would_never():
    tx = gcx.skip_large_norm(optax.sgd(0.1), naive_zscore(), relearn_after=10)
    skipped, _ = feed(tx, np.r_[normals(50), 30 * normals(100)])
    assert skipped[50:60].all() and not skipped[60:65].any()
    assert skipped[-50:].mean() < 0.3


@pytest.mark.parametrize("relearn_after", [1, 3, 25])
def test_the_level_is_learned_anew_after_so_many_skips(relearn_after):
    frozen = gcx.thresholds.Rule(  # twice the first norm, for ever
        lambda norm: norm,
        lambda norm, first, _: (
            jnp.where(first > 0, 2 * first, jnp.inf),
            jnp.where(first > 0, first, norm),
        ),
    )
    tx = gcx.skip_large_norm(optax.sgd(0.1), frozen, relearn_after=relearn_after)
    skipped, state = feed(tx, [1.0] + (relearn_after + 3) * [100.0])
    assert skipped.tolist() == [False] + relearn_after * [True] + 3 * [False]
    assert state.skipped_large_norm == relearn_after and state.rules[0] == 100.0


def test_a_norm_that_is_not_finite_does_not_count_towards_learning_anew():
    frozen = gcx.thresholds.Rule(lambda norm: norm + 1, lambda norm, level, _: (level, level))
    tx = gcx.skip_large_norm(optax.sgd(0.1), frozen, relearn_after=2)
    skipped, state = feed(tx, [1.0, np.nan, np.inf, np.nan, 9.0, np.nan, 9.0])
    assert skipped.tolist() == [False] + 6 * [True]
    assert state.large_streak == 2 and state.consecutive_skips == 6
    assert state.skipped_nonfinite == 4 and state.skipped_large_norm == 2


def test_a_fixed_number_is_not_learned_anew_but_the_flag_tells():
    tx = gcx.skip_large_norm(optax.sgd(0.1), 1.0, relearn_after=3, max_consecutive_skips=10)
    skipped, state = feed(tx, np.full(50, 2.0))
    assert skipped.all() and state.guard_failed
    tx = gcx.skip_large_norm(optax.sgd(0.1), lambda count: 1.0 + count // 20, relearn_after=3)
    skipped, _ = feed(tx, np.full(50, 1.5))
    assert skipped.tolist() == 20 * [True] + 30 * [False]


@each_rule
def test_norms_that_are_not_finite_do_not_enter_the_history(rule):
    tx = gcx.skip_large_norm(optax.sgd(0.1), rule)
    stream = normals(60)
    _, clean = feed(tx, stream)
    holes = np.insert(stream, [0, 5, 5, 30, 59], [np.nan, np.inf, np.nan, -np.inf, np.nan])
    skipped, state = feed(tx, holes)
    chex.assert_trees_all_equal(state.rules, clean.rules)
    assert skipped[~np.isfinite(holes)].all()


@each_rule
def test_the_warm_up_blocks_what_is_not_finite(rule):
    tx = gcx.skip_large_norm(optax.sgd(0.1), rule)
    skipped, state = feed(tx, [np.nan, np.inf, 0.5, np.nan])
    assert skipped.tolist() == [True, True, False, True]
    assert state.skipped_nonfinite == 3


SPIKES = (1e3, 1e10, 1e20, 1e30, 3e38)


@each_rule
def test_a_spike_during_warm_up_does_not_lock_up(rule):
    tx = gcx.skip_large_norm(optax.sgd(0.1), rule)
    skips, _ = feed(tx, [np.r_[normals(3), spike, normals(400)] for spike in SPIKES])
    for skipped in skips:
        assert longest_run(skipped) <= 25
        assert skipped[-100:].mean() <= 0.35


@each_rule
def test_a_spike_does_not_switch_the_guard_off_for_good(rule):
    tx = gcx.skip_large_norm(optax.sgd(0.1), rule)
    streams = [np.r_[normals(100), spike, normals(200, seed=1), 1e3] for spike in SPIKES]
    skips, _ = feed(tx, streams)
    assert skips[:, 100].all() and skips[:, -1].all()


@each_rule
def test_zero_gradients_do_not_lock_up(rule):
    tx = gcx.skip_large_norm(optax.sgd(0.1), rule)
    skipped, _ = feed(tx, np.r_[np.zeros(150), normals(300)])
    assert not skipped[:150].any()
    assert longest_run(skipped) <= 25 and skipped[-100:].mean() <= 0.35


# Reactions, and how guards compose


def test_reactions_to_what_is_not_finite_are_uniform():
    params, grads = params_and_grads()
    bad = spoiled(grads)
    adam = optax.adam(0.1)
    _, moved = adam.update(jax.tree.map(jnp.zeros_like, grads), adam.init(params))

    skip = gcx.skip_nonfinite(adam)  # the optimizer does not run
    updates, state = skip.update(bad, skip.init(params), params)
    assert state.inner_state[0].count == 0 and not updates["w"].any()

    for clip in (  # the optimizer runs on a zero gradient
        gcx.clip_by_global_norm(1.0, nonfinite="zero"),
        gcx.zero_large_norm(jnp.inf),
    ):
        zero = optax.chain(clip, adam)
        updates, state = zero.update(bad, zero.init(params), params)
        chex.assert_trees_all_equal(state[1], moved)
        assert not gcx.nonfinite_leaves((updates, state[1]))


def test_reactions_to_a_large_norm_are_uniform():
    grads = jnp.array([3.0, 4.0])
    adam = optax.trace(0.5)
    for reaction, seen in (
        (gcx.skip_large_norm(adam, 1.0), None),
        (optax.chain(gcx.zero_large_norm(1.0), adam), [0.0, 0.0]),
        (optax.chain(gcx.clip_by_global_norm(1.0), adam), [0.6, 0.8]),
    ):
        _, before = reaction.update(grads / 10, reaction.init(grads))
        updates, after = reaction.update(grads, before)
        found = gcx.metrics(after)
        assert found["grad_norm"] == 5.0 and found["clip_threshold"] == 1.0
        if seen is None:
            chex.assert_trees_all_equal(after.inner_state, before.inner_state)
            assert updates.tolist() == [0.0, 0.0] and found["skipped_large_norm"] == 1
        else:
            np.testing.assert_allclose(
                after[1].trace, 0.5 * before[1].trace + np.array(seen), rtol=1e-6
            )


def test_inside_an_accumulation_a_window_is_dropped():
    tx = gcx.accumulate_gradients(gcx.skip_nonfinite(optax.sgd(1.0)), 2)
    params = jnp.zeros(1)
    state = tx.init(params)
    for grad in (1.0, np.nan, 3.0, 5.0):
        params, state = gcx.apply_gradients(tx, jnp.array([grad]), state, params)
    assert params.tolist() == [-4.0]
    assert gcx.metrics(state)["skipped_nonfinite"] == 1


def test_around_an_accumulation_a_micro_batch_is_dropped():
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.sgd(1.0), 2))
    params = jnp.zeros(1)
    state = tx.init(params)
    for grad in (1.0, np.nan, 3.0, 5.0):
        params, state = gcx.apply_gradients(tx, jnp.array([grad]), state, params)
    assert params.tolist() == [-2.0]  # the mean of 1 and 3; 5 waits
    found = gcx.metrics(state)
    assert found["skipped_nonfinite"] == 1 and found["mini_step"] == 1


def test_weight_and_flush_reach_an_accumulation_in_a_guard():
    for guard in GUARDS.values():
        tx = guard(gcx.accumulate_gradients(optax.sgd(1.0), 10))
        params = jnp.zeros(1)
        state = tx.init(params)
        _, state = tx.update(jnp.array([2.0]), state, params, weight=1.0)
        _, state = tx.update(jnp.array([np.nan]), state, params, weight=5.0)
        updates, state = tx.update(jnp.array([6.0]), state, params, weight=3.0, flush=True)
        assert updates.tolist() == [-5.0]


ACCUMULATIONS = {
    "alone": gcx.accumulate_gradients(optax.adam(0.1), 4),
    "chain": optax.chain(
        gcx.clip_by_global_norm(1e30), gcx.accumulate_gradients(optax.adam(0.1), 4)
    ),
    "in a guard": gcx.skip_large_norm(gcx.accumulate_gradients(optax.adam(0.1), 4), 1e30),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
}


@pytest.mark.parametrize("inner", ACCUMULATIONS.values(), ids=ACCUMULATIONS)
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_window_whose_step_would_not_be_finite_does_not_lock_up(inner, bad):
    # 1e25 is finite and so is the mean of its window, but not its square in Adam. The guard
    # cannot know before the window closes; then the window has to go, or it refuses for ever.
    stream = jnp.ones(16).at[bad].set(1e25)
    params, skipped, state = train(gcx.skip_nonfinite(inner), stream)
    assert not gcx.nonfinite_leaves((params[-1], state.inner_state)) and params[-1].all()
    # At the end of the window it goes alone; before, it takes the window and one more with it.
    assert skipped[-1] == (1 if bad == 3 else 2)
    assert state.consecutive_skips == 0


def test_a_window_whose_sum_overflows_does_not_lock_up():
    # What is only being added up is not looked at, which would cost more than the addition. The
    # sum is, when the window closes: the last batch of it is refused, the next one too, and then
    # the window goes.
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.sgd(0.1), 4))
    params, skipped, state = train(tx, jnp.ones(16).at[1:3].set(3e38))
    steps = np.repeat([0, 1, 2], [8, 4, 4])
    np.testing.assert_allclose(params, -0.1 * np.stack([steps, steps], 1), rtol=1e-6)
    assert skipped.tolist() == [0] * 3 + [1] + [2] * 12
    assert not gcx.nonfinite_leaves(state)


@pytest.mark.parametrize("bad", [3e38, 1e25])
def test_a_window_that_a_flush_cannot_close_goes(bad):
    # `every` is never reached, and what comes after a refused flush is only held.
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.adam(0.1), 10_000))

    @jax.jit
    def step(params, state, grad, flush):
        return gcx.apply_gradients(tx, jnp.full(2, grad), state, params, flush=flush)

    params = jnp.zeros(2)
    state = tx.init(params)
    for i, grad in enumerate([bad, bad] + [1.0] * 10):
        before = params
        params, state = step(params, state, grad, i % 4 == 3)
        if i > 3:
            assert bool((params != before).any()) == (i % 4 == 3)
    assert int(state.skipped_nonfinite) == 1
    assert not gcx.nonfinite_leaves((params, state))


def test_a_flush_that_one_micro_batch_spoils_leaves_the_window_alone():
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.scale_by_adam(), 10_000))
    params = jnp.zeros(1)
    step = jax.jit(lambda s, g, flush: tx.update(g, s, params, flush=flush))
    state = tx.init(params)
    for grad, flush in ((1.0, False), (3.0, False), (1e25, True)):
        _, state = step(state, jnp.array([grad]), flush)
    assert int(state.skipped_nonfinite) == 1
    assert gcx.accumulated_gradients(state).tolist() == [2.0]
    assert int(gcx.metrics(state)["mini_step"]) == 2
    updates, _ = step(state, jnp.array([2.0]), True)
    np.testing.assert_allclose(updates, [1.0], rtol=1e-5)


@pytest.mark.parametrize("use_grad_mean", [True, False])
def test_a_window_of_optax_that_is_lost_starts_from_zero(use_grad_mean):
    seen = optax.chain(optax.scale_by_adam(), optax.stateless(lambda u, p: u))
    multi = optax.MultiSteps(seen, 2, use_grad_mean=use_grad_mean)
    tx = gcx.skip_nonfinite(multi.gradient_transformation())
    params = jnp.zeros(1)
    state = tx.init(params)
    for grad in (1e25, 1.0, 1.0):
        _, state = tx.update(jnp.array([grad]), state, params)
    assert int(state.skipped_nonfinite) == 2
    assert not state.inner_state.acc_grads.any() and int(state.inner_state.mini_step) == 0
    _, state = tx.update(jnp.array([3.0]), state, params)
    assert state.inner_state.acc_grads.tolist() == [3.0]


def test_a_window_inside_a_window_that_is_lost_goes_too():
    inside = gcx.accumulate_gradients(optax.adam(0.1), 2)
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(inside, 2))
    params, skipped, state = train(tx, jnp.ones(24).at[0].set(1e25))
    assert int(skipped[-1]) == 2 and params[-1].all()
    assert not gcx.nonfinite_leaves((params[-1], state))


@pytest.mark.parametrize("extra", [{"flush": None}, {"weight": "mean"}, {"weight": [-np.inf]}])
def test_extra_arguments_of_another_meaning_are_left_to_the_inner_one(extra):
    def update(updates, state, params=None, **extra_args):
        assert extra_args == extra
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = gcx.skip_nonfinite(inner)
    params = jnp.ones(1)
    updates, _ = tx.update(params, tx.init(params), params, **extra)
    assert updates.tolist() == [1.0]


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_drops_its_micro_batch(weight):
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.sgd(1.0), 2))
    params = jnp.zeros(1)
    state = tx.init(params)
    for grad, w in ((1.0, 1.0), (7.0, weight), (3.0, 1.0)):
        params, state = gcx.apply_gradients(tx, jnp.array([grad]), state, params, weight=w)
    assert params.tolist() == [-2.0] and int(state.skipped_nonfinite) == 1


def test_a_sum_that_overflows_when_it_is_rounded_is_not_taken():
    # 2^119 is half a step at the largest bfloat16: in float32 the sum would be finite.
    tx = gcx.skip_nonfinite(
        gcx.accumulate_gradients(optax.sgd(1.0), 2, accumulator_dtype=jnp.bfloat16)
    )
    largest = float(jnp.finfo(jnp.bfloat16).max)
    step = jax.jit(lambda p, s, g: gcx.apply_gradients(tx, g, s, p))
    params = jnp.zeros(3)
    state = tx.init(params)
    for grad in (largest, 2.0**119):
        params, state = step(params, state, jnp.full(3, grad))
    assert not params.any() and int(state.skipped_nonfinite) == 1


def test_a_guard_may_stand_anywhere_in_a_chain():
    params, grads = params_and_grads()
    tx = optax.chain(
        gcx.clip_by_global_norm(1.0), gcx.skip_nonfinite(optax.scale_by_adam()), optax.scale(-0.1)
    )
    updates, state = tx.update(spoiled(grads), tx.init(params), params)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, grads))
    assert gcx.metrics(state)["skipped_nonfinite"] == 1


@each_guard
def test_a_guard_is_differentiable(guard):
    tx = guard(optax.sgd(0.5))

    def loss(grads):
        updates, _ = tx.update(grads, tx.init(grads))
        return jnp.sum(updates**2)

    slope = jax.jit(jax.grad(loss))
    assert slope(jnp.array([2.0, 0.0])).tolist() == [1.0, 0.0]
    assert slope(jnp.array([jnp.nan, 1.0]))[1] == 0.0


# Errors


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: gcx.skip_nonfinite(0.1),
            TypeError,
            "skip_nonfinite: `inner` must be an `optax.GradientTransformation`, got 0.1. "
            "Pass an Optax optimizer such as `optax.adamw(1e-3)`.",
        ),
        (
            lambda: gcx.skip_large_norm(None, 1.0),
            TypeError,
            "skip_large_norm: `inner` must be an `optax.GradientTransformation`, got None. "
            "Pass an Optax optimizer such as `optax.adamw(1e-3)`.",
        ),
        (
            lambda: gcx.skip_nonfinite(optax.sgd(1.0), max_consecutive_skips=0),
            ValueError,
            "skip_nonfinite: `max_consecutive_skips` must be an integer >= 1, got 0. "
            "Pass None for no limit.",
        ),
        (
            lambda: gcx.skip_large_norm(optax.sgd(1.0), 1.0, max_consecutive_skips=2.5),
            TypeError,
            "skip_large_norm: `max_consecutive_skips` must be an integer >= 1, got 2.5. "
            "Pass None for no limit.",
        ),
        (
            lambda: gcx.skip_large_norm(optax.sgd(1.0), 1.0, relearn_after=0),
            ValueError,
            "skip_large_norm: `relearn_after` must be an integer >= 1, got 0. "
            "It bounds how long a new level of the norm is mistaken for spikes.",
        ),
        (
            lambda: gcx.skip_large_norm(optax.sgd(1.0), -1.0),
            ValueError,
            "skip_large_norm: `max_norm` must be a number > 0, got -1.0. "
            "Pass a positive number, a schedule, or a rule from `gcx.thresholds`; inf never clips.",
        ),
        (
            lambda: gcx.skip_large_norm(optax.sgd(1.0), "big"),
            TypeError,
            "skip_large_norm: `max_norm` must be a number > 0, got 'big'. "
            "Pass a positive number, a schedule, or a rule from `gcx.thresholds`; inf never clips.",
        ),
        (
            lambda: gcx.skip_large_norm(optax.sgd(1.0), 1.0, ord=0),
            ValueError,
            "skip_large_norm: `ord` must be a number > 0, got 0. "
            "Pass 1, 2, any other order > 0, or `jnp.inf`.",
        ),
        (
            lambda: gcx.skip_nonfinite(optax.sgd(1.0), axis_name=3),
            TypeError,
            "skip_nonfinite: `axis_name` must be a string, a tuple of strings or None, got 3. "
            "Name the mapped axes over which the leaves are sharded.",
        ),
    ],
)
def test_a_wrong_argument_is_named(build, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        build()


@pytest.mark.parametrize("guard", [gcx.skip_nonfinite, GUARDS["skip_large_norm"]])
def test_an_integer_leaf_is_named_by_its_path(guard):
    tx = guard(optax.identity())
    grads = {"enc": {"n": jnp.ones((2, 3), jnp.int32)}, "w": jnp.ones(2)}
    with pytest.raises(
        TypeError,
        match=re.escape(
            "every leaf of `updates` must be floating or complex, got int32[2, 3] at "
            "updates['enc']['n']. Leave such leaves out with `optax.masked`."
        ),
    ):
        tx.update(grads, tx.init(grads), grads)


@each_guard
def test_a_skip_right_after_an_emission_is_no_update(guard):
    params, grads = params_and_grads()
    tx = guard(gcx.accumulate_gradients(optax.sgd(0.1), 1))
    updates, state = tx.update(grads, tx.init(params), params)
    assert gcx.has_updated(state)
    updates, skipped = tx.update(spoiled(grads), state, params)
    assert not gcx.has_updated(skipped)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, grads))
    _, state = tx.update(grads, skipped, params)
    assert gcx.has_updated(state)


def test_a_rule_that_looks_at_parameters_needs_them():
    params, grads = params_and_grads()
    tx = gcx.skip_large_norm(optax.sgd(0.1), gcx.thresholds.relative_to_params(0.1))
    expected = "skip_large_norm: `params` must be given for this threshold, got None."
    with pytest.raises(ValueError, match=expected):
        tx.update(grads, tx.init(params))
    with pytest.raises(TypeError, match=r"skip_large_norm: `updates` must be a tree like `params`"):
        tx.update(grads, tx.init(params), {"w": params["w"]})
