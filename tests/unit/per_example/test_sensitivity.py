"""One example moves the clipped sum by at most the threshold, whichever path others take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import methods, size_of

import gradclip_jax as gcx
from compat import x64

pytestmark = pytest.mark.slow
MAX_NORM = 1.0


def clipped_sum(loss, max_norm=MAX_NORM, **kwargs):
    return jax.jit(gcx.per_example.value_and_grad(loss, max_norm, reduction="sum", **kwargs))


def assert_norms_of_written_gradients(loss, params, batch, rtol=1e-5):
    """The norms are those of `vmap(grad)`, which are finite."""
    written = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    assert np.isfinite(written).all()
    found = jax.jit(gcx.per_example.norms(loss))(params, batch)
    np.testing.assert_allclose(found, [size_of(g) for g in written], rtol=rtol)


@pytest.mark.parametrize("size", [1e19, 1e20, 3e38])
@pytest.mark.parametrize("nonfinite", ["zero", "propagate"])
def test_gradient_up_to_1e19_is_clipped_and_above_the_range_of_norms_is_not_finite(size, nonfinite):
    x = np.ones((4, 3), np.float32)
    x[0, 0] = size
    (_, stats), grads = clipped_sum(jnp.dot, nonfinite=nonfinite)(np.zeros(3, np.float32), x)
    others = 3 * np.ones(3) / np.sqrt(3)
    if size < 1.8e19:
        assert stats.norm[0] == pytest.approx(size, rel=1e-5)
        np.testing.assert_allclose(grads, others + [1, 0, 0], rtol=1e-5)
    else:
        assert np.isinf(stats.norm[0])
        np.testing.assert_allclose(grads, others if nonfinite == "zero" else np.nan, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "rows", "last"), [(np.int8, 128, 127), (np.uint8, 300, 255)])
def test_ids_of_a_narrow_dtype(dtype, rows, last):
    def loss(table, ids):
        return jnp.sum(jnp.take(table, ids, axis=0) * jnp.array([3.0, 4.0]))

    ids = np.array([[0, 1], [last, last]], dtype)
    (_, stats), grads = clipped_sum(loss)(np.zeros((rows, 2), np.float32), ids)
    np.testing.assert_allclose(stats.norm, [5 * np.sqrt(2), 10], rtol=1e-5)
    np.testing.assert_allclose(grads[last], [0.6, 0.8], rtol=1e-5)


def test_weight_taken_at_a_number_of_a_narrow_dtype():
    def loss(stack, example):
        x, number = example
        return jnp.sum(x @ jax.lax.dynamic_index_in_dim(stack, number, keepdims=False))

    x = np.ones((2, 2, 8), np.float32)
    number = np.array([3, 120], np.int8)
    norms = jax.jit(gcx.per_example.norms(loss))
    np.testing.assert_allclose(norms(np.zeros((300, 8, 8), np.float32), (x, number)), 16, rtol=1e-5)


def test_groups_far_apart_are_measured_each_by_itself():
    def loss(params, example):
        x, size = example
        return jnp.sum((size * x) @ params["u"]) + jnp.sum(x @ params["v"])

    params = {"u": np.zeros((8, 8), np.float32), "v": np.zeros((8, 8), np.float32)}
    sizes = np.float32([1e-10, 1e18, 1e19])
    norms = gcx.per_example.norms(loss, param_labels={"u": "first", "v": "second"})
    found = jax.jit(norms)(params, (np.full((3, 1, 8), 0.125, np.float32), sizes))
    np.testing.assert_allclose(found["first"], sizes, rtol=1e-5)
    np.testing.assert_allclose(found["second"], 1, rtol=1e-5)


def layer(params, x):
    return jnp.sum(x @ params["w"] + params["b"])


def test_one_example_of_65_536_aligned_examples_moves_the_sum_by_the_threshold():
    num_examples, place = 65_536, 40_000
    batch = np.full((num_examples, 2, 16), 0.7, np.float32)
    weight = np.ones(num_examples, np.float32)
    run = clipped_sum(
        lambda params, example: (layer(params, example[0]), example[1]),
        has_weight=True,
        nonfinite="zero",
    )
    params = {"w": np.zeros((16, 12), np.float32), "b": np.zeros(12, np.float32)}
    assert methods(layer, params, batch) == {"['b']": "materialized", "['w']": "gram"}

    def summed(batch):
        grads = run(params, (batch, weight))[1]
        return np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)])

    weight[place] = 0
    without = summed(batch)
    weight[place] = 1
    # The float32 result itself is rounded, before and after.
    rounding = size_of(np.spacing(np.abs(without).astype(np.float32)))
    removed, nan, cancel, large = np.zeros((4, 2, 16), np.float32)
    nan[0, 0], large[0], cancel[0], cancel[1] = np.nan, 1e38, 1e6, -1e6 + 1
    for changed in (batch[place].copy(), removed, nan, cancel, large):
        batch[place] = changed
        assert size_of(summed(batch) - without) <= MAX_NORM * (1 + 1e-5) + rounding


def test_factor_that_would_overflow_in_float16():
    def loss(w, x):
        return jnp.sum((x @ (w * np.float16(2000))) * np.float16(2000))

    w, x = np.zeros((64, 32), np.float16), np.full((2, 1, 64), 1e-4, np.float16)
    assert_norms_of_written_gradients(loss, w, x, rtol=1e-3)


def test_dropped_row_whose_cotangent_is_nan():
    def loss(table, example):
        ids, scale = example
        return jnp.sum(table.at[ids].get(mode="fill", fill_value=0) * scale[:, None])

    ids = np.array([[1, 99], [2, 3]], np.int32)
    scale = np.array([[1, np.nan], [1, 1]], np.float32)
    assert_norms_of_written_gradients(loss, np.zeros((50, 8), np.float32), (ids, scale))


def test_weight_used_in_two_dtypes():
    def loss(w, x):
        narrow = [y.astype(jnp.float8_e4m3fn) for y in (x, w)]
        narrowed = jnp.dot(*narrow, preferred_element_type=jnp.float32)
        return jnp.sum(narrowed) + jnp.sum(x @ w)

    w, x = np.zeros((64, 64), np.float32), np.ones((2, 1, 64), np.float32)
    with jax.numpy_dtype_promotion("strict"):
        norms = jax.jit(gcx.per_example.norms(loss))(w, x)
    np.testing.assert_allclose(norms, 128, rtol=1e-5)


def test_gradients_of_float64_under_strict_promotion():
    w, x = np.ones((2, 2)), np.ones((3, 2))
    with x64(), jax.numpy_dtype_promotion("strict"):
        grads = gcx.per_example.value_and_grad(lambda w, x: jnp.sum(x @ w), 1.0)(w, x)[1]
    assert grads.dtype == np.float64


@pytest.mark.filterwarnings("ignore:.*has as many rows as the batch")
@pytest.mark.parametrize(
    ("loss", "labels", "error", "notes"),
    [
        (lambda w, x: jnp.sum(x @ w) / x.shape[1], (), IndexError, ["float32[3]"]),
        (lambda w, x, y: (x @ w - y) ** 2, (4,), TypeError, ["Argument 2", "batch_argnums"]),
    ],
    ids=["loss of a batch", "argument that is not split"],
)
def test_error_inside_the_loss_says_that_it_gets_one_example(loss, labels, error, notes):
    args = [np.ones(shape, np.float32) for shape in (3, (4, 3), *labels)]
    with pytest.raises(error) as raised:
        gcx.per_example.value_and_grad(loss, 1.0)(*args)
    assert all(note in raised.value.__notes__[0] for note in notes)
