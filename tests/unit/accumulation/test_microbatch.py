"""`microbatched_value_and_grad`: the whole batch's value, gradient and aux, in parts."""

import functools
import re

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
BATCH, PARTS = 24, 4
EACH = BATCH // PARTS
X, Y = trees.normal((BATCH, 4), seed=1), trees.normal((BATCH, 3), seed=2)
PARAMS = {"w": trees.normal((4, 3), seed=3), "b": trees.normal((3,), seed=4)}
TOKENS = jnp.asarray(np.random.default_rng(5).integers(0, 9, BATCH), jnp.float32)
DATA = {"x": X, "y": Y, "tokens": TOKENS}


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


def with_everything(params, batch):
    """Value, tokens and aux of every kind."""
    value, count = token_loss(params, batch)
    top = jnp.max(batch["x"])
    return value, (count, {"rows": batch["x"], "mean": top, "last": top, "n": count})


# The references, compiled once.
whole = jax.jit(jax.value_and_grad(loss))
whole_of_tokens = jax.jit(jax.value_and_grad(token_loss, has_aux=True))
in_parts = functools.partial(microbatched, token_loss, PARTS, has_weight=True)


def agree(ours, wanted):
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, wanted)
    chex.assert_trees_all_close(ours, wanted, rtol=1e-5, atol=1e-6)


# --- equal to the whole batch ---------------------------------------------------------------


@pytest.mark.parametrize("parts", [3, 24])
def test_value_and_gradient_are_those_of_the_whole_batch(parts):
    def both(params, batch):
        weighted = microbatched(token_loss, parts, has_weight=True)
        return microbatched(loss, parts)(params, batch), weighted(params, batch)

    agree(jax.jit(both)(PARAMS, DATA), (whole(PARAMS, DATA), whole_of_tokens(PARAMS, DATA)))


def test_sums_of_complex_and_64_bit_parameters_lose_nothing():
    def fun(params, x):
        return sum(jnp.mean(jnp.abs(x @ w) ** 2) for w in params.values())

    with compat.x64():
        params = {x: trees.normal((4, 2), x) for x in ("complex64", "float64", "complex128")}
        both = microbatched(fun, 6), jax.value_and_grad(fun)
        (_, ours), (_, wanted) = (jax.jit(take)(params, X.astype("float64")) for take in both)
        chex.assert_trees_all_equal_dtypes(ours, wanted, params)
        for dtype, grad in ours.items():
            rtol = 20 * jnp.finfo(dtype).eps
            np.testing.assert_allclose(grad, wanted[dtype], rtol=rtol, atol=rtol / 10)


def test_bfloat16_gradients_are_added_up_in_float32():
    # 1, then 255 times 2^-9: in bfloat16 each addition would be lost.
    values = jnp.full((256,), 2.0**-9, jnp.bfloat16).at[0].set(1.0)
    take = jax.jit(microbatched(lambda w, x: jnp.sum(w * x), 256))
    value, grad = take(jnp.bfloat16(1), values)
    assert value.dtype == grad.dtype == jnp.bfloat16
    wanted = np.mean(np.asarray(values, np.float64))
    np.testing.assert_allclose(float(grad), wanted, rtol=2.0**-8)


def test_without_aux_the_function_only_ever_sees_a_micro_batch():
    take = jax.jit(microbatched(lambda w, x: jnp.sum(w * x.reshape(2)), 3))
    value, grad = take(2.0, jnp.arange(6.0))
    assert float(value) == 10.0 and float(grad) == 5.0


# --- micro-batches that are not real ---------------------------------------------------------

# Micro-batch i has every 4th row: the place of each row in the order of micro-batches.
ORDER = np.arange(BATCH).reshape(PARTS, EACH).T.ravel()


def arranged(count):
    """A batch whose first `count` micro-batches are real, with the first rows; the rest is NaN."""

    def arrange(x):
        places = ORDER.reshape(-1, *[1] * (x.ndim - 1))
        return np.where(places < count * EACH, np.asarray(x)[ORDER], np.float32(np.nan))

    return jax.tree.map(arrange, DATA)


@jax.jit
def in_traced_parts(count, batch):
    return in_real_parts(count, batch)


def in_real_parts(count, batch):
    words = {"rows": None, "mean": None, "last": "last", "n": "sum"}
    options = {"has_weight": True, "has_aux": True, "aux_reduction": words}
    take = microbatched(with_everything, PARTS, num_real_microbatches=count, **options)
    return take(PARAMS, batch)


@pytest.mark.parametrize("given", [-1, 0, 1, 3, 7])  # out of range, it counts as all or none
def test_what_is_not_real_leaves_no_trace_in_one_program_for_all_numbers(given):
    count = min(max(given, 0), PARTS)
    (value, (weight, aux)), grads = in_traced_parts(jnp.int32(given), arranged(count))
    is_real = np.arange(BATCH) < count * EACH
    agree(((value, weight), grads), whole_of_tokens(PARAMS, {**DATA, "tokens": TOKENS * is_real}))
    np.testing.assert_array_equal(aux["rows"], np.where(is_real[:, None], X, 0)[ORDER])
    tops = np.asarray(X).reshape(PARTS, -1).max(1)[:count]
    weights = np.asarray(TOKENS).reshape(PARTS, -1).sum(1)[:count]
    mean = tops @ weights / max(weights.sum(), 1)
    wanted = {"mean": mean, "last": tops[-1] if count else 0.0, "n": weights.sum()}
    agree({name: aux[name] for name in wanted}, jax.tree.map(jnp.float32, wanted))
    assert in_traced_parts._cache_size() == 1


@pytest.mark.parametrize("count", [0, 1])
def test_a_known_number_shortens_the_loop_and_gives_what_a_traced_one_does(count):
    batch = arranged(count)
    known = functools.partial(in_real_parts, count)
    loops = [x for x in jax.make_jaxpr(known)(batch).jaxpr.eqns if x.primitive.name == "scan"]
    assert [loop.params["length"] for loop in loops] == [count, count]  # weights, gradients
    assert not any("while" in str(loop) for loop in loops)
    agree(jax.jit(known)(batch), in_traced_parts(jnp.int32(count), batch))


def test_what_is_not_real_is_not_run():
    calls = []

    def counted(w, x):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.mean(w * x)

    @jax.jit
    def run(count):
        return microbatched(counted, PARTS, num_real_microbatches=count)(1.0, X)

    for count in (3, 0, 1):
        calls.clear()
        jax.block_until_ready(run(jnp.int32(count)))
        jax.effects_barrier()
        assert len(calls) == count


def test_each_device_may_have_a_number_of_its_own():
    counts = np.int32([3, 0, 1, 2, 4, 0, 3, 1])

    @sharded((SHARDS, SHARDS), (SHARDS, WHOLE))
    def run(batch, count):
        outputs, grads = in_real_parts(count[0], batch)
        return jax.tree.map(lambda x: x[None], outputs), grads

    on_devices = [arranged(count) for count in counts]
    outputs, grads = run(jax.tree.map(lambda *x: np.concatenate(x), *on_devices), counts)
    alone = [in_traced_parts(count, batch) for count, batch in zip(counts, on_devices, strict=True)]
    agree(outputs, jax.tree.map(lambda *x: jnp.stack(x), *(one for one, _ in alone)))
    agree(grads, jax.tree.map(lambda *x: sum(x), *(one for _, one in alone)))


@pytest.mark.parametrize("varies", ["weight", "count"])
def test_devices_that_transform_each_micro_gradient_need_equal_weights(varies):
    @sharded((SHARDS, SHARDS), SHARDS)
    def run(batch, count):
        of_count = {"num_real_microbatches": count[0]}
        fun, varying = (loss, of_count) if varies == "count" else (token_loss, {"has_weight": True})
        take = microbatched(fun, 4, microbatch_transform=optax.identity(), **varying)
        return jnp.ravel(take(PARAMS, batch)[1]["b"])

    batch = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0), DATA)
    with pytest.raises(TypeError, match="^microbatched_value_and_grad: `(num_real|weight).*pmean"):
        run(batch, jnp.arange(8, dtype=jnp.int32))


# --- aux and random keys --------------------------------------------------------------------


def test_rows_come_back_in_order_floats_as_their_mean_and_all_else_as_aux_reduction_says():
    def aux_of(batch):
        rows = (batch["x"], jnp.arange(len(batch["x"])) * 0 + jnp.int8(3), batch["x"].reshape(-1))
        defaults = {"rows": rows, "mean": jnp.mean(batch["x"]), "none": None}
        positive = batch["x"] > 0
        others = {"count": positive.sum(), "each": jnp.mean(batch["x"], axis=0), "classes": 10}
        return defaults, {**others, "positive": positive, "key": jax.random.key(0)}

    def fun(params, batch):
        return loss(params, batch), aux_of(batch)

    words = {"count": "sum", "each": "mean", "classes": "last", "positive": "concatenate"}
    words["key"] = "last"
    take = microbatched(fun, 4, has_aux=True, aux_reduction=(None, words))
    (_, ours), _ = jax.jit(take)(PARAMS, DATA)
    wanted = jax.tree.map(jnp.asarray, aux_of(DATA))
    key, kept = (x[1].pop("key") for x in (ours, wanted))
    assert key == kept
    agree(ours, wanted)


def test_each_micro_batch_gets_its_own_key():
    def fun(w, batch, key, more):
        keys = [key, *more.values()]
        return jnp.mean(w * batch), [jax.random.uniform(key, batch.shape) for key in keys]

    keys = jax.random.key(0), jax.random.PRNGKey(1)
    take = jax.jit(microbatched(fun, 4, has_aux=True, rng_argnums=(2, 3)))
    (_, noises), _ = take(1.0, Y, keys[0], {"a": keys[1], "b": keys[0]})
    for noise, key in zip(noises, (*keys, keys[0]), strict=True):
        each = [jax.random.uniform(k, (EACH, 3)) for k in jax.random.split(key, 4)]
        np.testing.assert_array_equal(noise, jnp.stack(each, axis=1).reshape(BATCH, 3))


# --- weights, and a transformation for each micro-gradient ----------------------------------

# Every 4th example is bad: one micro-batch of four.
BAD = jnp.arange(BATCH) % PARTS == 1
SPOILED = {**DATA, "x": jnp.where(BAD[:, None], jnp.nan, X)}
GOOD = {**DATA, "tokens": jnp.where(BAD, 0, TOKENS)}


def test_a_micro_batch_of_zero_weight_adds_nothing_even_if_it_is_nan():
    ours = jax.jit(in_parts())(PARAMS, {**SPOILED, "tokens": GOOD["tokens"]})
    agree(ours, whole_of_tokens(PARAMS, GOOD))


def test_a_batch_without_weight_gives_zero_even_if_it_is_nan():
    bad = jax.tree.map(lambda x: x * np.nan, DATA)
    found = jax.jit(in_parts(reduction="sum"))(PARAMS, {**bad, "tokens": 0 * TOKENS})
    assert not any(np.any(x) for x in jax.tree.leaves(found))


def test_a_sum_weighs_values_and_gradients_by_their_weights():
    (value, total), mean = whole_of_tokens(PARAMS, DATA)
    (found, _), grads = jax.jit(in_parts(reduction="sum"))(PARAMS, DATA)
    wanted = jax.tree.map(lambda x: x * total, (value, mean))
    chex.assert_trees_all_close((found, grads), wanted, rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_a_weight_of_40_000_is_right_in_every_dtype(dtype):
    def fun(w, x):
        return jnp.mean(w * x), jnp.float32(40_000)

    take = jax.jit(microbatched(fun, 4, has_weight=True))
    ours = take(dtype(1), jnp.arange(8, dtype=dtype))
    assert [float(leaf) for leaf in jax.tree.leaves(ours)] == [3.5, 160_000, 3.5]


@pytest.mark.parametrize("is_function", [False, True])
def test_each_micro_gradient_is_transformed_before_it_is_added(is_function):
    clip = gcx.clip_by_global_norm(0.1)
    clipped = lambda grads: clip.update(grads, clip.init(PARAMS))[0]  # noqa: E731
    take = microbatched(loss, 4, microbatch_transform=clipped if is_function else clip)
    parts = [jax.tree.map(lambda x, i=i: np.asarray(x)[i::4], DATA) for i in range(4)]
    wanted = jax.tree.map(lambda *g: sum(g) / 4, *(clipped(whole(PARAMS, b)[1]) for b in parts))
    agree(jax.jit(take)(PARAMS, DATA)[1], wanted)


def clip(x):
    return jnp.mean(gcx.clip_cotangent(x, 0.05))


def square_in_float16(x):
    return jnp.mean(x.astype("float16").astype("float32") ** 2)


@pytest.mark.parametrize(("of_products", "x"), [(clip, 1.0), (square_in_float16, 200.0)])
def test_a_weight_does_not_change_the_cotangents_of_a_micro_batch(of_products, x):
    def fun(w, batch):
        return of_products(w * batch[:, :2]), batch[0, 2]  # the last column is the weight

    take = jax.jit(microbatched(fun, 4, has_weight=True))
    w, batch = np.ones(2, "f"), np.full((8, 3), x, "f")
    wanted = jax.jit(jax.grad(lambda w: of_products(w * batch[:2, :2])))(w)
    for weight in (1e-4, 1.0, 1e6):
        batch[:, 2] = weight
        _, grads = take(w, batch.copy())
        np.testing.assert_allclose(grads, wanted, rtol=1e-3)


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
    whole_batch = scratch(jax.value_and_grad(deep), params, batch)
    micro = scratch(jax.value_and_grad(deep), params, batch[: 1024 // 16])
    ours = scratch(microbatched(deep, 16), params, batch)
    # And the micro-batch itself, which is cut out of the batch.
    slack = batch.nbytes // (16 if compat.VERSION >= (0, 10) else 8)  # XLA of JAX 0.7 needs more
    assert ours <= micro + size + slack + 4096
    assert ours < 0.3 * whole_batch


def sharded_batch(mesh):
    batch = jax.tree.map(lambda x: jnp.concatenate([x[:16]] * 4), DATA)
    return jax.device_put(batch, NamedSharding(mesh, SHARDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [(AxisType.Auto, None), (AxisType.Auto, 4), (AxisType.Explicit, 4)]
)
def test_a_sharded_batch_stays_where_it_is_under_jit(kind, count):
    def fun(params, batch):
        each = errors(params, batch)
        return jnp.mean(each), each

    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
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
    batch = sharded_batch(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)))

    @sharded((WHOLE, SHARDS), WHOLE)
    def run(params, batch):
        value, grads = microbatched(loss, 4, argnums=-2)(params, batch)
        return jax.lax.pmean(value, "data"), jax.tree.map(lambda g: g / 8, grads)

    program = run.lower(PARAMS, batch).compile()
    text = program.as_text()
    assert collectives(text).keys() <= {"all-reduce"}
    inside = hlo.count(text, "all-reduce") - hlo.count(text, "all-reduce", loops=False)
    assert inside == 0
    # Each element of the gradient once, and the mean of the value. On the CPU, JAX 0.7 leaves
    # each array its own all-reduce.
    sizes = hlo.all_reduced(text, loops=False)
    assert sum(sizes) == sum(p.size for p in jax.tree.leaves(PARAMS)) + 1
    assert len([s for s in sizes if s > 1]) == (1 if compat.VERSION >= (0, 10) else 2)
    agree(program(PARAMS, batch), whole(PARAMS, jax.device_get(batch)))


# --- arguments that are not split, and dtypes ---------------------------------------------------


@pytest.mark.parametrize("as_keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize(
    "make",
    [lambda f: microbatched(f, 4), lambda f: gcx.per_example.value_and_grad(f, jnp.inf)],
    ids=["microbatched", "per_example"],
)
@pytest.mark.sampled
def test_a_second_argument_of_the_batch_size_that_is_not_split_warns(make, as_keyword):
    fun = make(lambda w, x, y: jnp.mean((w * x - y) ** 2))
    x, y = jnp.arange(4.0), jnp.ones(4)
    with pytest.warns(UserWarning, match="batch_argnums") as found:
        fun(1.0, x, y=y) if as_keyword else fun(1.0, x, y)
    assert found[0].filename == __file__


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize(
    "make",
    [lambda f: microbatched(f, 2), lambda f: gcx.per_example.value_and_grad(f, jnp.inf)],
    ids=["microbatched", "per_example"],
)
@pytest.mark.sampled
def test_a_raw_key_is_not_taken_for_a_batch_of_its_length(make, impl):
    key = jax.random.PRNGKey(0, impl=impl)
    fun = make(lambda w, x, state: jnp.mean(w * x))
    fun(1.0, jnp.ones(len(key)), {"key": key})
    fun(1.0, jnp.ones(len(key)), state=key)


def window_over_devices(w, x):
    """The program of docs/sharding.md: a window on each device, and one mean over devices."""
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "data"))
    tx, varying = (
        gcx.accumulate_gradients(optax.chain(mean, optax.sgd(1.0)), 2),
        compat.vary(w, "data"),
    )
    state = tx.init(w)
    sums = state.accumulation.gradient
    sums = sums._replace(total=compat.vary(sums.total, "data"))
    state = state._replace(accumulation=state.accumulation._replace(gradient=sums))
    for part in jnp.split(x, 2):
        grads = jax.grad(lambda w, x: jnp.mean(x @ w))(varying, part)
        updates, state = tx.update(grads, state, w)
    return updates


REDUCED = {
    "microbatched": microbatched(lambda w, x: jnp.mean(x @ w), 2),
    "per_example": gcx.per_example.value_and_grad(lambda w, x: x @ w, jnp.inf),
    "accumulate": lambda w, x: (0.0, window_over_devices(w, x)),
}


@compat.needs_eight_devices
@pytest.mark.parametrize("name", REDUCED)
def test_gradients_of_bfloat16_parameters_are_reduced_over_devices_in_float32(name):
    """XLA on CPU would add them in float32 anyway, so that the result does not show the type."""
    fun = sharded((WHOLE, SHARDS), WHOLE)(lambda w, x: REDUCED[name](w, x)[1])
    text = fun.lower(jnp.ones(128, jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)).as_text()
    types = re.findall(r"all_reduce.*?\}\).*? : \(tensor<(.*?)>\) ->", text, re.S)
    assert "128xf32" in types and not any("bf16" in x for x in types)


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.sampled
def test_micro_batches_support_strict_promotion(has_weight):
    def loss(w, x):
        value = jnp.mean(x * w)
        return (value, jnp.float32(2.0)) if has_weight else value

    with compat.strict():
        microbatched(loss, 2, has_weight=has_weight)(jnp.float32(1.0), jnp.ones(4))


@pytest.mark.parametrize("count", [1, 2])
def test_an_empty_batch_has_auxiliary_outputs_without_rows(count):
    fun = microbatched(lambda w, x: (jnp.sum(w * x), x), count, has_aux=True)
    (value, aux), grad = fun(1.0, jnp.zeros((0, 4)))
    assert (float(value), aux.shape, float(grad)) == (0.0, (0, 4), 0.0)


def test_a_sum_of_small_integers_does_not_wrap():
    fun = microbatched(
        lambda w, x: (jnp.sum(w * x), jnp.uint8(200)), 4, has_aux=True, aux_reduction="sum"
    )
    assert int(fun(1.0, jnp.ones(4))[0][1]) == 800
