"""Clipped means: factors, masks, bad examples, dtypes, devices; and the errors."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import gradclip_jax as gcx

sys.path.insert(0, str(Path(__file__).parent))
from models import EXAMPLES, MODELS, WIDTH, array, gpt_in_scan, rnn, sequences, square
from oracle import assert_close, gradients, norms, weighted_mean


def loss(p, x):
    """Two layers over tokens; NaN inside for an example of which a row is below -5."""
    return jnp.sum(jnp.sin(jnp.sqrt(x + 5) @ p["a"]) @ p["b"])


PARAMS = {"a": array(WIDTH, WIDTH, seed=3), "b": array(WIDTH, WIDTH, seed=4)}
BATCH = sequences()


@functools.cache
def oracle():
    return gradients(loss, PARAMS, BATCH)


def clipped(max_norm=1.0, batch=BATCH, params=PARAMS, weights=None, step=None, **options):
    run = jax.jit(gcx.clipped_grad_and_stats(loss, max_norm, **options))
    return run(params, batch, weights=weights, step=step)


def expected(factors, divisor=EXAMPLES):
    mean = weighted_mean(oracle()[1], np.asarray(factors))
    return jax.tree.map(lambda g: g * EXAMPLES / divisor, mean)


def test_value_and_gradient_return_as_value_and_grad_does():
    def with_aux(p, x):
        return loss(p, x), {"top": jnp.max(x)}

    run = jax.jit(gcx.clipped_value_and_grad(with_aux, jnp.inf, has_aux=True))
    (value, aux), grads = run(PARAMS, BATCH)
    values, written = oracle()
    np.testing.assert_allclose(value, values.mean(), rtol=1e-5)
    np.testing.assert_allclose(aux["top"], BATCH.max((1, 2)), rtol=1e-6)
    assert_close(grads, jax.tree.map(lambda g: g.mean(0), written))


@pytest.mark.parametrize(
    ("reaction", "factor"),
    [
        ("zero", lambda n: n <= 50.0),
        (lambda n, c: c / (n + 0.01), lambda n: 50.0 / (n + 0.01)),
    ],
)
def test_other_factors_of_the_norm(reaction, factor):
    grads, stats = clipped(50.0, reaction=reaction)
    wanted = factor(norms(oracle()[1]))
    np.testing.assert_allclose(stats.factor, wanted, rtol=1e-5)
    assert_close(grads, expected(wanted))


def test_threshold_may_be_a_schedule_or_traced():
    by_schedule, _ = clipped(lambda step: 1.0 + step, step=jnp.int32(2))
    traced = jax.jit(lambda c: gcx.clipped_grad_and_stats(loss, c)(PARAMS, BATCH)[0])(3.0)
    wanted = expected(np.minimum(1, 3 / norms(oracle()[1])))
    assert_close(by_schedule, wanted)
    assert_close(traced, wanted)


def test_a_rule_fed_with_each_norm_moves_by_the_fraction_within_as_in_the_paper():
    rule = gcx.thresholds.quantile(0.9)
    found = np.array([1.0, 3.0, 5.0, np.inf], np.float32)  # half of them are within 4
    _, each = rule.update(found, jnp.full(4, 4.0), None)
    wanted = 4 * np.exp(-0.2 * (0.5 - 0.9))
    assert float(jnp.exp(jnp.log(each).mean())) == pytest.approx(wanted, rel=1e-6)
    _, unmoved = rule.update(np.array([np.nan, 0.0], np.float32), jnp.full(2, 4.0), None)
    np.testing.assert_array_equal(unmoved, 4)


def test_groups_are_clipped_by_their_own_norms():
    grads, stats = clipped({"first": 1.0}, param_labels={"a": "first", "b": "last"})
    written = oracle()[1]
    for label, leaf in (("first", "a"), ("last", "b")):
        np.testing.assert_allclose(stats.norm[label], norms(written[leaf]), rtol=1e-5)
    factors = np.minimum(1, 1 / norms(written["a"]))
    assert_close(grads["a"], weighted_mean(written["a"], factors))
    assert_close(grads["b"], written["b"].mean(0))


def test_leaf_norms_are_those_of_each_leaf():
    params = {**PARAMS, "count": jnp.int32(3), "none": None}
    found = jax.jit(gcx.per_example_leaf_norms(loss))(params, BATCH)
    written = oracle()[1]
    np.testing.assert_allclose(found["a"], norms(written["a"]), rtol=1e-5)
    np.testing.assert_allclose(found["b"], norms(written["b"]), rtol=1e-5)
    assert found["count"] is None


def test_weights_multiply_and_mask_even_a_bad_example():
    batch = BATCH.copy()
    batch[1] = np.nan
    grads, stats = clipped(1.0, batch, weights=np.array([2.0, 0.0, 1.0]))
    factors = np.minimum(1, 1 / norms(oracle()[1])) * [2, 0, 1]
    assert_close(grads, expected(factors, divisor=3))
    assert np.isfinite(stats.norm).all()


@pytest.mark.parametrize("bad", [np.nan, -9.0, np.inf])
def test_bad_example_adds_zero_or_spoils_everything_as_asked(bad):
    # -9 is a finite input; the NaN is made inside, by the square root.
    batch = BATCH.copy()
    batch[2, 0, 0] = bad
    grads, stats = clipped(1.0, batch, nonfinite="zero")
    factors = np.minimum(1, 1 / norms(oracle()[1])) * [1, 1, 0]
    assert_close(grads, expected(factors))
    assert stats.factor[2] == 0 and not np.isfinite(stats.norm[2])
    spoilt, _ = clipped(1.0, batch)
    assert np.isnan(spoilt["a"]).all()


def test_batch_of_bad_examples_gives_zeros():
    grads, _ = clipped(1.0, np.full_like(BATCH, np.nan), nonfinite="zero")
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


def test_magnitudes_whose_squares_overflow_or_underflow_are_clipped_exactly():
    sizes = np.array([1e20, 1e-20, 1.0], np.float32)
    x = np.abs(sequences()) + 0.1
    x *= sizes[:, None, None]
    w = array(WIDTH, WIDTH)
    run = jax.jit(gcx.clipped_grad_and_stats(lambda w, x: jnp.sum(x @ w), 1e-3))
    grads, stats = run(w, x)
    wanted = np.sqrt(WIDTH * np.sum(x.astype(np.float64).sum(1) ** 2, 1))
    np.testing.assert_allclose(stats.norm, wanted, rtol=1e-5)
    np.testing.assert_allclose(stats.factor, np.minimum(1, 1e-3 / wanted), rtol=1e-5)
    assert np.isfinite(grads).all()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_clipped_norm_is_within_the_threshold(dtype):
    def low(p, x):
        return jnp.sum(jnp.sin(jnp.sin(x @ p["a"]) @ p["b"]).astype(jnp.float32))

    params, batch = jax.tree.map(lambda x: jnp.asarray(x, dtype), (PARAMS, BATCH))
    run = jax.jit(gcx.clipped_grad_and_stats(low, 0.37))
    for i in range(EXAMPLES):
        grads, stats = run(params, batch[i : i + 1])
        size = norms(jax.tree.map(lambda g: np.asarray(g, np.float64)[None], grads))[0]
        assert size <= 0.37 * (1 + 1e-5)
        assert size >= 0.37 * 0.95 and stats.norm[0] > 0.37
        assert grads["a"].dtype == dtype


@pytest.mark.parametrize("size", [0, 1])
def test_batch_of_no_example_and_of_one(size):
    grads, stats = clipped(1.0, BATCH[:size])
    assert stats.norm.shape == (size,)
    total = np.minimum(1, 1 / norms(oracle()[1])) * [1, 0, 0] * size
    wanted = expected(total, divisor=1)
    if size:
        assert_close(grads, wanted)
    else:
        assert not any(np.any(g) for g in jax.tree.leaves(grads))


def test_micro_batches_give_the_same():
    whole, stats = clipped(1.0, reduction="sum")
    parts, split = clipped(1.0, reduction="sum", num_microbatches=3)
    assert_close(parts, jax.tree.map(np.asarray, whole), 1e-6)
    np.testing.assert_allclose(split.norm, stats.norm, rtol=1e-6)


def test_batched_loss_along_another_axis():
    def batched(p, xs):
        return jax.vmap(lambda x: loss(p, x), 1)(xs)

    batch = jnp.moveaxis(jnp.asarray(BATCH), 0, 1)

    def second(p, xs):
        return batched(p, jnp.moveaxis(xs, 0, 1))

    run = gcx.clipped_grad_and_stats(second, 1.0, batched=True, batch_axis=1)
    grads, _ = jax.jit(run)(PARAMS, batch)
    assert_close(grads, expected(np.minimum(1, 1 / norms(oracle()[1]))))


def test_unused_and_frozen_leaves_have_no_gradient_and_masked_ones_stay_as_they_are():
    def partly_frozen(p, x):
        return loss({"a": p["a"], "b": jax.lax.stop_gradient(p["b"])}, x)

    other = {"unused": np.ones(3, np.float32), "masked": optax.MaskedNode(), "none": None}
    run = jax.jit(gcx.clipped_grad_and_stats(partly_frozen, 1.0))
    grads, stats = run({**PARAMS, **other}, BATCH)
    assert not np.any(grads["unused"]) and not np.any(grads["b"])
    assert grads["masked"] == optax.MaskedNode() and grads["none"] is None
    written = oracle()[1]["a"]
    np.testing.assert_allclose(stats.norm, norms(written), rtol=1e-5)
    assert_close(grads["a"], weighted_mean(written, np.minimum(1, 1 / norms(written))))


@pytest.mark.slow
@pytest.mark.parametrize("make", [square, rnn, gpt_in_scan])
def test_data_parallel_inside_shard_map_equals_one_device(make):
    function, params, batch = make()
    batch = np.concatenate([batch, batch[::-1]])[:4]
    run = gcx.clipped_grad_and_stats(function, 1.0)
    alone, stats = jax.jit(run)(params, batch)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = PartitionSpec("data")
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    sharded = jax.jit(
        shard_map(
            lambda p, b: (lambda out: (out[0], out[1].norm))(run(p, b)),
            mesh=mesh,
            in_specs=(PartitionSpec(), spec),
            out_specs=(PartitionSpec(), spec),
        )
    )
    grads, found = sharded(params, batch)
    np.testing.assert_allclose(found, stats.norm, rtol=1e-5)
    assert_close(grads, jax.tree.map(np.asarray, alone), 1e-5)
    text = sharded.lower(params, batch).as_text()
    assert "all_gather" not in text


def wide(p, x, depth=0):
    """Logits that outnumber the parameters; their softmax needs them again on the way back."""
    for _ in range(depth):
        x = jnp.sin(x + p["a"][:, 0])
    return jax.nn.logsumexp(jnp.sin(x @ p["a"]) @ p["b"], -1).sum()


WIDE = {"a": array(WIDTH, 4, seed=5), "b": array(4, 90, seed=6)}


def products_of_logits(loss, **options):
    program = jax.make_jaxpr(gcx.clipped_grad_and_stats(loss, 1.0, **options))(WIDE, BATCH)
    return str(program).count("f32[3,3,90] = dot_general[")


def test_logits_are_kept_where_they_are_a_small_part_of_what_is_kept():
    assert products_of_logits(functools.partial(wide, depth=120)) == 2


@pytest.mark.parametrize(("nonfinite", "count"), [("propagate", 3), ("zero", 2)])
def test_logits_shared_by_both_passes_are_computed_again_instead_of_kept(nonfinite, count):
    run = gcx.clipped_grad_and_stats(wide, 1.0, nonfinite=nonfinite)
    assert products_of_logits(wide, nonfinite=nonfinite) == count
    _, written = gradients(wide, WIDE, BATCH)
    factors = np.minimum(1, 1 / norms(written))
    assert_close(jax.jit(run)(WIDE, BATCH)[0], weighted_mean(written, factors))


def test_dropout_masks_are_alike_in_both_passes():
    function, params, batch = MODELS["dropout"]()
    run = jax.jit(gcx.clipped_grad_and_stats(function, 1e-3, reduction="sum"))
    one = jax.tree.map(lambda x: x[:1], batch)
    grads, _ = run(params, one)
    assert norms(np.asarray(grads)[None])[0] == pytest.approx(1e-3, rel=1e-5)


def test_examples_may_be_micro_batches_of_accumulate_gradients():
    run = gcx.clipped_grad_and_stats(loss, 1.0, reduction="sum")
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 3, reduction="sum")

    @jax.jit
    def step(params, state, x):
        updates, state = tx.update(run(params, x)[0], state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS)
    for i in range(EXAMPLES):
        params, state = step(params, state, BATCH[i : i + 1])
    wanted = expected(np.minimum(1, 1 / norms(oracle()[1])), divisor=1)
    assert_close(jax.tree.map(lambda a, b: a - np.asarray(b), PARAMS, params), wanted)


ERRORS = [
    (dict(max_norm=-1.0), {}, ValueError, "`max_norm` must be a number > 0, got -1.0"),
    (dict(reaction="halve"), {}, ValueError, "`reaction` must be one of"),
    (dict(reduction="max"), {}, ValueError, "`reduction` must be one of"),
    (dict(nonfinite="skip"), {}, ValueError, "`nonfinite` must be one of"),
    (dict(num_microbatches=0), {}, ValueError, "`num_microbatches` must be an integer >= 1"),
    (dict(num_microbatches=2), {}, ValueError, "num_microbatches=2 divides, got 3"),
    (dict(param_labels="all"), {}, TypeError, "`max_norm` must be a mapping from label"),
    (dict(max_norm=lambda step: 1.0), {}, ValueError, "`step` must be given with a schedule"),
    ({}, dict(weights=np.ones(2)), ValueError, "`weights` must be one number for each of 3"),
    (dict(batch_axis=3), {}, ValueError, r"`batch` must be arrays with an axis 3, got .* at batch"),
    (dict(loss_fn=3), {}, TypeError, "`loss_fn` must be callable"),
    (dict(loss_fn=lambda p, x: x), {}, TypeError, "`loss_fn` must be a function whose value"),
]


@pytest.mark.parametrize(("options", "call", "kind", "text"), ERRORS)
def test_errors_name_the_argument(options, call, kind, text):
    options = {"loss_fn": loss, "max_norm": 1.0, **options}
    with pytest.raises(kind, match=text):
        jax.eval_shape(lambda: gcx.clipped_grad_and_stats(**options)(PARAMS, BATCH, **call))


def test_examples_must_be_as_many_in_every_leaf():
    batch = {"x": np.ones((3, 2)), "y": np.ones(2)}
    with pytest.raises(ValueError, match=r"3 at batch\['x'\], 2 at batch\['y'\]"):
        gcx.per_example_norms(lambda p, e: 0.0)(PARAMS, batch)
