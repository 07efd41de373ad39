"""The invariants of the design, for every public transformation.

The rows are those of `registry.py`. One compiled program for each row, `jitted`, serves most tests.
What has only one place in the library is tested there, in depth:

| invariant | here | in depth |
| --- | --- | --- |
| 1 structure, dtypes, odd leaves | have_the_types, float0, that_is_no_gradient | clipping/test_formula |
| 2 unclipped is unchanged | unchanged_bit_for_bit | clipping/test_formula |
| 3 the norm after clipping | | clipping/test_formula, test_clip, test_grid |
| 4 exact norms | | clipping/test_norm, test_gpu |
| 5 no bad value stays | does_not_outlive_its_step | test_gates_machine |
| 6 fixed states | have_the_types, jit_and_scan | accumulation/test_transform |
| 7 eager, jit, scan, vmap, pmap | eager_agrees, jit_and_scan, vmap_is, traced_again | clipping/test_clip |
| 8 extra arguments | reach_the_inner_one | accumulation/test_wrapping |
| 9 many devices | eight_devices | clipping/test_sharding, test_collectives, test_processes |
| 10 micro-batches are the batch | | accumulation/test_microbatch, test_fuzz |
| 11 derivatives | finite_also_at_zero | clipping/test_norm |
| 12 scratch | at_most_one_params_size | accumulation/test_memory |
| 13 errors when built | | wherever something is built |
"""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from registry import SGD, TRANSFORMATIONS

import compat
import gradclip_jax as gcx
from guard_cases import INT_MAX, sharded

every = pytest.mark.parametrize("name", TRANSFORMATIONS)

close = partial(chex.assert_trees_all_close, rtol=3e-6, atol=1e-7)


@cache
def make(name):
    return optax.with_extra_args_support(TRANSFORMATIONS[name]())


def example(dtype="float32", scale=1.0):
    """Normal numbers, a leaf without elements, and two places without a leaf."""
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,), "s": (), "z": (0, 3)}
    leaves = {k: (scale * rng.standard_normal(s)).astype(dtype) for k, s in shapes.items()}
    return {**leaves, "n": None, "m": optax.MaskedNode()}


def types(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


@cache
def jitted(name):
    """One step for all tests of a row; it donates its state and counts its traces."""
    tx = make(name)

    def step(grads, state, params):
        step.traces += 1
        return tx.update(grads, state, params)

    step.traces = 0
    return step, jax.jit(step, donate_argnums=1)


def run(name, stream, state=None):
    """The updates and the states of a stream of gradients, one after the other."""
    params, update = example(), jitted(name)[1]
    state = make(name).init(params) if state is None else state
    for grads in stream:
        updates, state = jax.tree.map(np.array, update(grads, state, params))
        yield updates, state


@every
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.sampled
def test_updates_have_the_types_of_the_input_and_states_those_of_init(name, dtype):
    if dtype not in TRANSFORMATIONS[name].keeps_dtypes:
        pytest.skip("this dtype is that of other tests: registry.py")
    tx = make(name)
    # Types and promotion are settled by the trace.
    with compat.x64(), compat.strict():
        params = example(dtype)
        first = jax.eval_shape(tx.init, params)
        updates, state = jax.eval_shape(tx.update, params, first, params)
    assert types(updates) == types(params)
    assert types(state) == types(first)
    # Checkpoints by tensorstore on several devices restore no bool.
    assert not [x for x in jax.tree.leaves(first) if x.dtype == jnp.bool_]


@every
def test_float0_leaves_and_empty_trees_pass_through(name):
    row = TRANSFORMATIONS[name]
    # The optimizers of Optax refuse float0 themselves.
    tx = row.around(optax.identity()) if row.around else row()
    params = {"i": jnp.int32(3), "x": jnp.ones(())}
    grads = {"i": np.zeros((), jax.dtypes.float0), "x": jnp.float32(0.25)}
    updates = jax.eval_shape(lambda g: tx.update(g, tx.init(params), params)[0], grads)
    assert updates["i"].dtype == jax.dtypes.float0 and updates["x"].dtype == jnp.float32
    assert jax.eval_shape(lambda: make(name).update({}, make(name).init({}), {}))[0] == {}


@every
def test_map_params_of_optax_keeps_the_structure_of_a_state(name):
    state = make(name).init(example())
    mapped = optax.tree.map_params(make(name), lambda x: x, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


@every
@pytest.mark.parametrize("leaf", [jnp.ones((4, 3), jnp.int32), "a"], ids=["integers", "string"])
def test_a_leaf_that_is_no_gradient_is_refused_by_path(name, leaf):
    tx, params = make(name), example()
    got = r"int32\[4, 3\]" if isinstance(leaf, jax.Array) else "str"
    with pytest.raises(TypeError, match=rf"{got} at updates\['w'\]"):
        tx.update({**params, "w": leaf}, tx.init(params), params)


@pytest.mark.parametrize("name", [n for n, row in TRANSFORMATIONS.items() if row.reads_state])
def test_a_state_that_is_swapped_missing_or_of_another_transformation_is_named(name):
    params = example()
    state = make(name).init(params)
    with pytest.raises(TypeError, match=r"^\w+: `(updates|state)`"):
        jax.eval_shape(make(name).update, state, params, params)
    for state in (None, {}, optax.EmptyState()):
        with pytest.raises(TypeError, match=r"^\w+: `state` must be "):
            make(name).update(params, state, params)


SEVEN_SCALES = (0.3, 3.0, 30.0, 0.1, 0.3, 3.0, 0.1)


@pytest.mark.parametrize("name", [n for n, row in TRANSFORMATIONS.items() if row.is_identity_below])
@pytest.mark.sampled
def test_small_gradients_are_unchanged_bit_for_bit(name):
    grads = example(scale=1e-6)
    chex.assert_trees_all_equal(next(run(name, [grads]))[0], grads)


@pytest.mark.parametrize("name", [n for n, row in TRANSFORMATIONS.items() if row.recovers])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.sampled
def test_a_bad_value_does_not_outlive_its_step(name, bad):
    good = example(scale=0.1)
    spoilt = {**good, "b": np.array([good["b"][0], bad, good["b"][2]])}
    *_, (updates, state) = run(name, [good, spoilt, *[good] * 5])
    *_, (_, clean) = run(name, [good] * 7)
    chex.assert_tree_all_finite(updates)
    if name == "watch":  # its rows are measurements, also of the bad value
        state, clean = state.inner_state, clean.inner_state
    # A threshold may be infinite, and an empty place of a window; but not more of them are.
    for kept, expected in zip(*map(jax.tree.leaves, (state, clean)), strict=True):
        kept, expected = np.float32(kept), np.float32(expected)
        assert not np.isnan(kept).any()
        assert np.sum(np.isinf(kept)) <= np.sum(np.isinf(expected)) + (kept.ndim > 0)


@every
def test_jit_and_scan_take_one_trace_and_donated_states(name):
    function, traces = jitted(name)[0], jitted(name)[0].traces
    stream = [example(scale=scale) for scale in SEVEN_SCALES]
    *_, (_, state) = run(name, stream)
    assert function.traces <= max(traces, 1)

    def body(state, grads):
        return make(name).update(grads, state, example())[::-1]

    # A scan runs the same step; its trace raises if the type of a state changes.
    jax.eval_shape(
        partial(jax.lax.scan, body), state, jax.tree.map(lambda *x: np.stack(x), *stream)
    )


@pytest.mark.slow  # each operation is a program of its own
@every
def test_eager_agrees_with_jit(name):
    stream = [example(scale=scale) for scale in SEVEN_SCALES[:3]]
    _, (_, state), (expected, after) = run(name, stream)
    found = make(name).update(stream[2], jax.tree.map(jnp.asarray, state), example())
    close(found[0], expected)
    assert types(found[1]) == types(after)


# The counts of the one left out are bounded by its windows; it has tests of its own.
@pytest.mark.parametrize("name", sorted(TRANSFORMATIONS.keys() - {"accumulate_gradients"}))
def test_no_counter_wraps(name):
    def fill(x):
        return np.full(x.shape, INT_MAX if x.dtype == jnp.int32 else x, x.dtype)

    full = jax.tree.map(fill, make(name).init(example()))
    ((_, after),) = run(name, [example()], full)
    for path, x in jax.tree_util.tree_leaves_with_path(after):
        assert x.dtype != jnp.int32 or np.all(x >= 0), path


@pytest.mark.slow
@every
def test_vmap_is_one_transformation_for_each(name):
    tx = make(name)
    several = jax.tree.map(lambda x: np.stack([x, 20 * x]), example())
    found = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g), example())[0]))(several)
    pair = [jax.tree.map(lambda x, i=i: x[i], several) for i in range(2)]
    for i, grads in enumerate(pair):
        close(jax.tree.map(lambda x, i=i: x[i], found), next(run(name, [grads]))[0])


@every
@pytest.mark.filterwarnings("error")
def test_extra_arguments_are_taken_and_reach_the_inner_one(name):
    received = []
    given = {"marker": 1, "value_fn": 2, "grad": 3, "hessian": 4, "loss": "huber", "batch_id": 5}
    given |= {"values": 6, "weights": [7.0]}
    if name != "accumulate_gradients":  # for others, these have a meaning of their own
        given |= {"weight": [-np.inf], "flush": None}

    def inner_update(updates, state, params=None, **extra_args):
        received.append(extra_args)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), inner_update)
    spy, row = optax.chain(spy, SGD), TRANSFORMATIONS[name]
    tx = row.around(spy) if row.around else optax.chain(row(), spy)
    params = example(scale=0.1)
    state = tx.init(params)
    jax.eval_shape(lambda g: tx.update(g, state, params, **given), params)
    assert given in received


TREE = {"w": (8, 8), "v": (8, 8), "b": (8,)}
ON_TWO_AXES = {"w": P("data", "model"), "v": P(None, "data"), "b": P("model")}


@cache
def on_one_device(name):
    """Gradients, parameters, and the first update."""
    rng = np.random.default_rng(1)
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in TREE.items()}
    grads = jax.tree.map(lambda x: 3 * x, params)
    return grads, params, first_update(make(name))(grads, params)


def first_update(tx, wrap=jax.jit):
    return wrap(lambda g, p: tx.update(g, tx.init(p), p)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in TRANSFORMATIONS for mode in ("auto", "explicit", "shard_map")]
    + [(name, "pmap") for name, row in TRANSFORMATIONS.items() if row.takes_axis_name],
)
def test_eight_devices_give_what_one_gives(name, mode):
    """Spread over two axes under `jit`, otherwise over one, and `b` is whole in `shard_map`."""
    if compat.VERSION < (0, 8) and name == "watch" and mode == "explicit":
        pytest.skip("JAX 0.7 has no sharding rule for scatter")
    tx, row = make(name), TRANSFORMATIONS[name]
    grads, params, expected = on_one_device(name)
    if mode == "pmap":
        update = first_update(row(axis_name="data"), partial(jax.pmap, axis_name="data"))
        rows = jax.tree.map(lambda x: x.reshape(8, 1, *x.shape[1:]), (grads, params))
        close(jax.tree.map(lambda x, y: x.reshape(y.shape), update(*rows), expected), expected)
        return
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh, specs = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2), ON_TWO_AXES
    if mode == "shard_map":
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        matrix = P(*[None] * row.split_axis, "data")
        specs = {"w": matrix, "v": matrix, "b": P()}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    grads, params = jax.device_put((grads, params), (shardings, shardings))
    if mode == "shard_map":
        updates = first_update(tx, sharded((specs, specs), specs))(grads, params)
    else:
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    close(updates, expected)
    for key, x in updates.items():
        assert x.sharding.is_equivalent_to(shardings[key], x.ndim)


@pytest.mark.slow
@every
def test_forward_and_reverse_derivatives_are_finite_also_at_zero(name):
    row, params = TRANSFORMATIONS[name], example()
    tx = row.around(SGD) if row.around else make(name)
    state = tx.init(params)

    @jax.jit
    def derivatives(grads):
        def total(grads):
            updates, _ = tx.update(grads, state, params)
            return sum(jnp.sum(x * x) for x in jax.tree.leaves(updates))

        return jax.grad(total)(grads), jax.jvp(total, (grads,), (params,))[1]

    for grads in (params, jax.tree.map(np.zeros_like, params)):
        chex.assert_tree_all_finite(derivatives(grads))


@pytest.mark.slow
@every
def test_scratch_is_at_most_one_params_size(name):
    tx = make(name)
    params = {f"w{i}": jax.ShapeDtypeStruct((256, 512), "float32") for i in range(4)}
    size = sum(x.size * 4 for x in params.values())

    def step(params, state, grads):
        return gcx.apply_gradients(tx, grads, state, params)

    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
    scratch = compiled.memory_analysis().temp_size_in_bytes / size
    assert scratch <= TRANSFORMATIONS[name].scratch


def traces_where_closures_are_pytrees(make):
    """The number of traces of a step for two transformations, and their updates."""
    eqx = pytest.importorskip("equinox")
    eqxi = pytest.importorskip("equinox.internal")
    traces, grads = 0, {"a": jnp.ones(2)}

    @eqx.filter_jit
    def step(tx, grads):  # as `optimistix.OptaxMinimiser` does
        nonlocal traces
        traces += 1
        tx = optax.with_extra_args_support(tx)
        return tx.update(grads, tx.init(grads), grads, value=jnp.float32(0.5))[0]["a"]

    updates = [step(eqxi.closure_to_pytree(make(jnp.float32(x))), grads) for x in (1.0, 2.0)]
    return traces, updates


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.sampled
def test_another_learning_rate_is_not_traced_again_where_closures_are_pytrees(name):
    def make(rate):
        row, sgd = TRANSFORMATIONS[name], optax.sgd(rate)
        return row.around(sgd) if row.around else optax.chain(row(), sgd)

    traces, found = traces_where_closures_are_pytrees(make)
    assert traces == 1
    np.testing.assert_array_equal(found[1], 2 * found[0])


@pytest.mark.parametrize(
    "make",
    [
        gcx.clip_by_global_norm,
        gcx.clip_by_value,
        gcx.adaptive_grad_clip,
        gcx.adagc,
        gcx.stable_adamw,
        lambda x: gcx.zclip(x, decay=x / 4, max_norm=x),
        lambda x: gcx.clip_by_leaf_norm(gcx.thresholds.quantile(x / 4, x, x)),
        lambda x: gcx.clip_by_group_norm({0: gcx.thresholds.percentile(10 * x)}, 0),
        lambda x: gcx.watch(gcx.skip_spikes(SGD, norm=x, loss=gcx.thresholds.mean_std(x))),
        lambda x: gcx.accumulate_gradients(SGD, lambda step: x),
    ],
)
@pytest.mark.sampled
def test_another_hyperparameter_is_not_traced_again_where_closures_are_pytrees(make):
    assert traces_where_closures_are_pytrees(make)[0] == 1
