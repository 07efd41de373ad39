"""`microbatched_value_and_grad`: the whole batch's value, gradient and aux, in parts."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import compat
import gradclip_jax as gcx
import hlo
import trees
from accumulation_cases import collectives
from guard_cases import SHARDS, WHOLE, sharded

microbatched = gcx.microbatched_value_and_grad
BATCH = 24
X, Y = trees.normal((BATCH, 4), seed=1), trees.normal((BATCH, 3), seed=2)
PARAMS = {"w": trees.normal((4, 3), seed=3), "b": trees.normal((3,), seed=4)}
TOKENS = jnp.asarray(np.random.default_rng(5).integers(0, 9, BATCH), jnp.float32)


def errors(params, batch):
    """One error for each example."""
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2, axis=-1)


def loss(params, batch):
    return jnp.mean(errors(params, batch))


def token_loss(params, batch):
    """The mean over tokens, and their number."""
    count = jnp.sum(batch["tokens"])
    total = jnp.sum(errors(params, batch) * batch["tokens"])
    return total / jnp.where(count > 0, count, 1), count


def batch_of(size=BATCH):
    return {"x": X[:size], "y": Y[:size], "tokens": TOKENS[:size]}


def both(fun, parts, *args, has_aux=False, **kwargs):
    """What comes back in parts, and from the whole batch."""
    ours = jax.jit(microbatched(fun, parts, has_aux=has_aux, **kwargs))
    has_aux = has_aux or kwargs.pop("has_weight", False)
    argnums = kwargs.get("argnums", 0)
    return ours(*args), jax.jit(jax.value_and_grad(fun, argnums, has_aux=has_aux))(*args)


def agree(ours, wanted):
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, wanted)
    chex.assert_trees_all_close(ours, wanted, rtol=1e-5, atol=1e-6)


# --- equal to the whole batch ---------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 24])
def test_value_and_gradient_are_those_of_the_whole_batch(parts):
    agree(*both(loss, parts, PARAMS, batch_of()))
    agree(*both(token_loss, parts, PARAMS, batch_of(), has_weight=True))


def test_it_can_be_vmapped_over_parameters():
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)
    fun = microbatched(loss, 3)
    ours = jax.jit(jax.vmap(fun, (0, None)))(stacked, batch_of())
    agree(ours, jax.vmap(jax.value_and_grad(loss), (0, None))(stacked, batch_of()))


@pytest.mark.parametrize(
    ("argnums", "batch_argnums"), [(0, (1, 3)), (-4, (1, -1)), ((2, 0), (1, 3)), ((0,), (1, 3))]
)
def test_arguments_are_chosen_as_by_jax_and_batches_are_any_pytrees(argnums, batch_argnums):
    def fun(params, x, scale, rest):
        return loss(params, {"x": x * scale, "y": rest[0]["y"]})

    args = PARAMS, X, 2.0, [{"y": Y}, None]
    agree(*both(fun, 4, *args, argnums=argnums, batch_argnums=batch_argnums))


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float64"])
def test_sums_of_complex_and_64_bit_parameters_lose_nothing(dtype):
    def fun(params, x):
        return jnp.mean(jnp.abs(x @ params) ** 2)

    with compat.x64():
        params = trees.normal((4, 2), dtype)
        x = X.astype(params.real.dtype)
        ours, wanted = both(fun, 6, params, x)
        rtol = 20 * jnp.finfo(dtype).eps
        chex.assert_trees_all_close(ours, wanted, rtol=rtol, atol=rtol / 10)
        chex.assert_trees_all_equal_dtypes(ours, wanted)


def test_bfloat16_gradients_are_added_up_in_float32():
    # 1, then 255 times 2^-9: in bfloat16 each addition would be lost.
    values = jnp.full((256,), 2.0**-9, jnp.bfloat16).at[0].set(1.0)

    def fun(w, x):
        return jnp.sum(w * x)

    value, grad = microbatched(fun, 256)(jnp.bfloat16(1), values)
    assert value.dtype == grad.dtype == jnp.bfloat16
    wanted = np.mean(np.asarray(values, np.float64))
    np.testing.assert_allclose(float(grad), wanted, rtol=2.0**-8)


# --- micro-batches that are not real ---------------------------------------------------------

PARTS, EACH = 4, BATCH // 4


def arranged(count):
    """A batch whose first `count` micro-batches are real and hold rows in order, the rest NaN."""
    order = np.arange(BATCH).reshape(PARTS, EACH).T.ravel()  # micro-batch i has every 4th row
    real = order < count * EACH
    batch = jax.tree.map(lambda x: np.asarray(x)[order], batch_of())
    return {
        name: np.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, np.nan).astype(x.dtype)
        for name, x in batch.items()
    }, order


def with_everything(params, batch):
    """Value, tokens and aux of every kind."""
    value, count = token_loss(params, batch)
    top = jnp.max(batch["x"])
    return value, (count, {"rows": batch["x"], "mean": top, "last": top, "n": count})


EVERYTHING = {"rows": None, "mean": None, "last": "last", "n": "sum"}


def in_real_parts(count, batch):
    options = {"has_weight": True, "has_aux": True, "aux_reduction": EVERYTHING}
    take = microbatched(with_everything, PARTS, num_real_microbatches=count, **options)
    return take(PARAMS, batch)


in_traced_parts = jax.jit(in_real_parts)


# A traced number out of range counts as all or none.
@pytest.mark.parametrize("given", [-1, *range(PARTS + 1), 7])
def test_what_is_not_real_leaves_no_trace_in_one_program_for_all_numbers(given):
    count = min(max(given, 0), PARTS)
    batch, order = arranged(count)
    (value, (weight, aux)), grads = in_traced_parts(jnp.int32(given), batch)
    rows = aux.pop("rows")
    if count == 0:
        empty = {"mean": 0.0, "last": 0.0, "n": 0.0}
        agree((value, weight, aux, rows), jax.tree.map(jnp.float32, (0, 0, empty, 0 * X)))
        agree(grads, jax.tree.map(jnp.zeros_like, PARAMS))
        return
    real = batch_of(count * EACH)
    (whole, tokens), expected = jax.value_and_grad(token_loss, has_aux=True)(PARAMS, real)
    agree((value, weight, grads), (whole, tokens, expected))
    x, t = (np.float64(real[k]).reshape(count, -1) for k in ("x", "tokens"))
    tops, weights = x.max(1), t.sum(1)
    means = {"mean": tops @ weights / weights.sum(), "last": tops[-1]}
    agree(aux, jax.tree.map(jnp.float32, {**means, "n": weights.sum()}))
    is_real = (order < count * EACH)[:, None]
    np.testing.assert_array_equal(rows, np.where(is_real, np.asarray(X)[order], 0))
    assert in_traced_parts._cache_size() == 1


@pytest.mark.parametrize("count", [0, 1, PARTS])
def test_a_known_number_shortens_the_loop_and_gives_what_a_traced_one_does(count):
    batch = arranged(count)[0]
    known = functools.partial(in_real_parts, count)
    loops = [x for x in jax.make_jaxpr(known)(batch).jaxpr.eqns if x.primitive.name == "scan"]
    assert [loop.params["length"] for loop in loops] == [count, count]  # weights, gradients
    assert not any("while" in str(loop) for loop in loops)
    agree(jax.jit(known)(batch), in_traced_parts(jnp.int32(count), batch))


def test_what_is_not_real_is_not_run():
    calls = []

    def counted(params, batch):
        jax.debug.callback(lambda: calls.append(1))
        return loss(params, batch)

    @jax.jit
    def run(count):
        take = microbatched(counted, PARTS, num_real_microbatches=count)
        return take(PARAMS, batch_of())

    for count in (3, 0, 1):
        calls.clear()
        jax.block_until_ready(run(jnp.int32(count)))
        jax.effects_barrier()
        assert len(calls) == count


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_real_batch():
    batch = arranged(3)[0]

    def norm(params, take, batch):
        return optax.tree.norm(take(params, batch)[1])

    def ours(params, count):
        take = microbatched(loss, PARTS, num_real_microbatches=count)
        return norm(params, take, batch)

    found = jax.jit(jax.grad(ours))(PARAMS, 3)
    real = batch_of(3 * EACH)
    agree(found, jax.grad(lambda p: norm(p, jax.value_and_grad(loss), real))(PARAMS))


def test_each_device_may_have_a_number_of_its_own():
    counts = np.int32([3, 0, 1, 2, 4, 0, 3, 1])

    @sharded((SHARDS, SHARDS), (SHARDS, WHOLE))
    def run(batch, count):
        outputs, grads = in_real_parts(count[0], batch)
        return jax.tree.map(lambda x: x[None], outputs), grads

    on_devices = [arranged(count)[0] for count in counts]
    outputs, grads = run(jax.tree.map(lambda *x: np.concatenate(x), *on_devices), counts)
    alone = [in_traced_parts(count, batch) for count, batch in zip(counts, on_devices, strict=True)]
    agree(outputs, jax.tree.map(lambda *x: jnp.stack(x), *(one for one, _ in alone)))
    agree(grads, jax.tree.map(lambda *x: sum(x), *(one for _, one in alone)))


@pytest.mark.parametrize(
    "option", [{"drop_nonfinite": True}, {"microbatch_transform": optax.identity()}]
)
@pytest.mark.parametrize("varies", ["weight", "count"])
def test_devices_that_all_reduce_each_micro_batch_need_equal_weights(option, varies):
    @sharded((SHARDS, SHARDS), SHARDS)
    def run(batch, count):
        of_count = {"num_real_microbatches": count[0]}
        fun, varying = (loss, of_count) if varies == "count" else (token_loss, {"has_weight": True})
        return jnp.ravel(microbatched(fun, 4, **option, **varying)(PARAMS, batch)[1]["b"])

    batch = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0), batch_of())
    with pytest.raises(TypeError, match="^microbatched_value_and_grad: `(num_real|weight).*pmean"):
        run(batch, jnp.arange(8, dtype=jnp.int32))


# --- aux ------------------------------------------------------------------------------------


def run_aux(aux_of, aux_reduction=None):
    """What aux becomes in four parts."""

    def fun(params, batch):
        return loss(params, batch), aux_of(batch)

    take = microbatched(fun, 4, has_aux=True, aux_reduction=aux_reduction)
    return jax.jit(take)(PARAMS, batch_of())[0][1]


def test_rows_come_back_in_order_floats_as_their_mean_and_all_else_as_aux_reduction_says():
    def of_defaults(batch):
        rows = (batch["x"], jnp.arange(len(batch["x"])) * 0 + jnp.int8(3), batch["x"].reshape(-1))
        return {"rows": rows, "mean": jnp.mean(batch["x"]), "none": None}

    def aux_of(batch):
        positive = batch["x"] > 0
        others = {"count": positive.sum(), "each": jnp.mean(batch["x"], axis=0), "classes": 10}
        return of_defaults(batch), {**others, "positive": positive}

    agree(run_aux(of_defaults), of_defaults(batch_of()))
    words = {"count": "sum", "each": "mean", "classes": "last"}
    for word in (None, "concatenate"):
        ours = run_aux(aux_of, (None, {**words, "positive": word}))
        agree(ours, jax.tree.map(jnp.asarray, aux_of(batch_of())))


# --- weights --------------------------------------------------------------------------------


def test_a_micro_batch_of_zero_weight_adds_nothing_even_if_it_is_nan():
    # Every third example is bad and has no tokens: with three parts, one micro-batch.
    bad = jnp.arange(BATCH) % 3 == 1
    batch = {
        "x": jnp.where(bad[:, None], jnp.nan, X),
        "y": Y,
        "tokens": jnp.where(bad, 0, TOKENS + 1),
    }
    ours = microbatched(token_loss, 3, has_weight=True)(PARAMS, batch)
    good = jax.tree.map(lambda x: x[~np.asarray(bad)], batch)
    agree(ours, jax.value_and_grad(token_loss, has_aux=True)(PARAMS, good))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_weight_of_40_000_is_right_in_every_dtype(dtype):
    def fun(w, x):
        return jnp.mean(w * x), jnp.float32(40_000)

    x = jnp.arange(8, dtype=dtype)
    ours = microbatched(fun, 4, has_weight=True)(dtype(1), x)
    assert [float(leaf) for leaf in jax.tree.leaves(ours)] == [3.5, 160_000, 3.5]


@pytest.mark.slow
def test_weights_can_be_differentiated_by():
    # Learning to reweight examples: the gradient of a gradient by the weights in it.
    def fun(w, batch):
        weights = batch["weights"]
        return jnp.sum(weights * (batch["x"] @ w) ** 2) / jnp.sum(weights), jnp.sum(weights)

    def outer(weights, value_and_grad):
        (value, _), grad = value_and_grad(PARAMS["w"][:, 0], {"x": X, "weights": weights})
        return value + jnp.sum(jnp.sin(grad))

    weights = 1.0 + jnp.arange(float(BATCH))
    split = microbatched(fun, 4, has_weight=True)
    whole = jax.value_and_grad(fun, has_aux=True)
    ours, wanted = (jax.grad(outer)(weights, take) for take in (split, whole))
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6)


# --- gradients by the batch, reductions, a transformation for each micro-gradient ------------


@pytest.mark.slow
def test_each_micro_gradient_is_transformed_before_it_is_added():
    clip = gcx.clip_by_global_norm(0.1)
    for transform in (clip, lambda grads: clip.update(grads, clip.init(PARAMS))[0]):
        take = microbatched(loss, 4, microbatch_transform=transform)
        _, ours = jax.jit(take)(PARAMS, batch_of())
        parts = [jax.tree.map(lambda x, i=i: x[i::4], batch_of()) for i in range(4)]
        clipped = [clip.update(jax.grad(loss)(PARAMS, b), clip.init(PARAMS))[0] for b in parts]
        agree(ours, jax.tree.map(lambda *g: sum(g) / 4, *clipped))


@pytest.mark.parametrize("has_weight", [False, True])
def test_a_micro_batch_that_is_not_finite_can_be_dropped(has_weight):
    fun = token_loss if has_weight else loss
    is_bad = jnp.arange(BATCH) == 5  # in micro-batch 1 of 4
    batch = {**batch_of(), "x": jnp.where(is_bad[:, None], jnp.inf, X)}
    take = microbatched(fun, 4, has_weight=has_weight, drop_nonfinite=True)
    good = jax.tree.map(lambda x: x[np.arange(BATCH) % 4 != 1], batch)
    batch["x"] = jnp.where(is_bad[:, None], jnp.nan, batch["x"])
    agree(jax.jit(take)(PARAMS, batch), jax.value_and_grad(fun, has_aux=has_weight)(PARAMS, good))


@pytest.mark.parametrize(("parts", "reduction"), [(1, "mean"), (4, "sum")])
def test_a_batch_of_which_every_part_is_dropped_gives_nan_and_one_of_padding_zero(parts, reduction):
    @jax.jit
    def take(x, real):
        run = microbatched(
            loss, parts, num_real_microbatches=real, drop_nonfinite=True, reduction=reduction
        )
        return run(PARAMS, {**batch_of(), "x": x})

    assert all(np.isnan(x).all() for x in jax.tree.leaves(take(X * np.nan, parts)))
    assert not any(np.any(x) for x in jax.tree.leaves(take(X, 0)))

    def fun(params, batch):
        value, count = token_loss(params, batch)
        return value, (count, jnp.mean(batch["x"]))

    for x, drops in itertools.product((X, X * np.nan), (False, True)):
        # Of weight 0, so that nothing is dropped.
        options = {"reduction": reduction, "drop_nonfinite": drops}
        masked = microbatched(fun, parts, has_weight=True, has_aux=True, **options)
        found = masked(PARAMS, {**batch_of(), "x": x, "tokens": 0 * TOKENS})
        assert not any(np.any(x) for x in jax.tree.leaves(found))


def clip(x):
    return jnp.mean(gcx.clip_cotangent(x, 0.05))


def square_in_float16(x):
    return jnp.mean(x.astype("float16").astype("float32") ** 2)


@pytest.mark.parametrize("weight", [1e-4, 1.0, 1e3, 1e6])
@pytest.mark.parametrize(("of_products", "x"), [(clip, 1.0), (square_in_float16, 200.0)])
def test_a_weight_does_not_change_the_cotangents_of_a_micro_batch(of_products, x, weight):
    def fun(w, x):
        return of_products(w * x), jnp.float32(weight)

    w, batch = jnp.ones(2), jnp.full((8, 2), x)
    _, grads = microbatched(fun, 4, has_weight=True)(w, batch)
    np.testing.assert_allclose(grads, jax.grad(fun, has_aux=True)(w, batch[:2])[0], rtol=1e-3)


# --- random keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_each_micro_batch_gets_its_own_key(make_key):
    def fun(params, batch, key):
        noise = jax.random.normal(key, batch["y"].shape)
        return loss(params, batch), noise

    take = microbatched(fun, 4, has_aux=True, rng_argnums=2)
    (_, noise), _ = take(PARAMS, batch_of(), make_key(0))
    assert len(np.unique(np.asarray(noise))) == noise.size
    keys = jax.random.split(make_key(0), 4)
    own = jnp.stack([jax.random.normal(k, (BATCH // 4, 3)) for k in keys], axis=1)
    np.testing.assert_array_equal(noise, own.reshape(BATCH, 3))


# --- memory and devices ---------------------------------------------------------------------


def scratch(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_scratch_is_one_micro_batch_and_one_accumulator():
    def deep(params, batch):
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params, batch = [jnp.ones((64, 64))] * 6, jnp.ones((1024, 64))
    size = sum(p.nbytes for p in params)
    whole = scratch(jax.value_and_grad(deep), params, batch)
    micro = scratch(jax.value_and_grad(deep), params, batch[: 1024 // 16])
    ours = scratch(microbatched(deep, 16), params, batch)
    # And the micro-batch itself, which is cut out of the batch.
    slack = batch.nbytes // (16 if compat.VERSION >= (0, 10) else 8)  # XLA of JAX 0.7 needs more
    assert ours <= micro + size + slack + 4096
    assert ours < 0.3 * whole


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def sharded_batch(mesh):
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x, x, x]), batch_of(16))
    return jax.device_put(batch, NamedSharding(mesh, SHARDS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("count", [None, 4])
def test_a_sharded_batch_stays_where_it_is_under_jit(kind, count):
    def fun(params, batch):
        each = errors(params, batch)
        return jnp.mean(each), each

    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        batch = sharded_batch(mesh)
        params = jax.device_put(PARAMS, NamedSharding(mesh, WHOLE))

        @jax.jit
        def take(params, batch, count):
            taken = microbatched(fun, 4, has_aux=True, num_real_microbatches=count)
            return taken(params, batch)

        text = take.lower(params, batch, count).compile().as_text()
        (value, rows), grads = take(params, batch, count)
    assert collectives(text).keys() <= {"all-reduce"}
    assert rows.sharding.is_equivalent_to(batch["tokens"].sharding, 1)
    wanted = jax.value_and_grad(fun, has_aux=True)(PARAMS, jax.device_get(batch))
    agree(jax.device_get(((value, rows), grads)), jax.device_get(wanted))


def test_inside_shard_map_the_gradient_is_reduced_once_after_the_loop():
    batch = sharded_batch(mesh_of())

    @sharded((WHOLE, SHARDS), WHOLE)
    def run(params, batch):
        value, grads = microbatched(loss, 4, argnums=-2)(params, batch)
        return jax.lax.pmean(value, "data"), jax.tree.map(lambda g: g / 8, grads)

    text = run.lower(PARAMS, batch).compile().as_text()
    assert collectives(text).keys() <= {"all-reduce"}
    inside = hlo.count(text, "all-reduce") - hlo.count(text, "all-reduce", loops=False)
    assert inside == 0
    # Each element of the gradient once, and the mean of the value. On the CPU, JAX 0.7 leaves
    # each array its own all-reduce.
    sizes = hlo.all_reduced(text, loops=False)
    assert sum(sizes) == sum(p.size for p in jax.tree.leaves(PARAMS)) + 1
    assert len([s for s in sizes if s > 1]) == (1 if compat.VERSION >= (0, 10) else 2)
    agree(run(PARAMS, batch), jax.value_and_grad(loss)(PARAMS, jax.device_get(batch)))


def test_without_aux_the_function_only_ever_sees_a_micro_batch():
    def fixed(w, x):
        return jnp.sum(w * x.reshape(2))

    value, grad = microbatched(fixed, 3)(2.0, jnp.arange(6.0))
    assert float(value) == 10.0 and float(grad) == 5.0
