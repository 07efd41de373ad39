"""The numbers of `vmap(grad)` in 64 bit, and no contribution beyond the threshold, whatever comes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import array, assert_close, assert_sound, methods, size_of, widened

import gradclip_jax as gcx
from compat import x64

clipped_sum = functools.partial(gcx.per_example.value_and_grad, reduction="sum")


def linear(w, x):
    return (x @ w).sum()


def test_tokens_that_cancel_are_clipped_by_their_true_norm():
    rng, size = np.random.default_rng(0), 1e7
    w = np.zeros((64, 64), np.float32)
    a, r = rng.normal(size=(3, 1, 64)) * size, rng.normal(size=(3, 1, 64))
    batch = np.concatenate([a, -a + r], 1).astype(np.float32)
    assert methods(linear, w, batch) == {"": "gram"}
    # Added in 64 bit the rows leave what rounding made of `-a + r`: both agree on that.
    assert_sound(linear, w, batch, max_norm=0.5, rtol=1e-4, of_mean=1e-4)


def test_factors_whose_rows_are_of_opposite_magnitude():
    def loss(w, example):
        x, g = example
        return jnp.sum((x @ w) * g)

    x, g = array(1, 2, 32, seed=1), array(1, 2, 32, seed=2)
    scale = np.array([[[1e18], [1]]], np.float32)
    batch = (x * scale, g * scale[:, ::-1])
    w = np.zeros((32, 32), np.float32)
    assert methods(loss, w, batch) == {"": "gram"}
    assert_sound(loss, w, batch, max_norm=1.0)


def test_squares_that_underflow_are_part_of_the_error_bound():
    def loss(w, example):
        x, g = example
        return jnp.sum((x @ w) * g)

    x = np.full((1, 1, 4097), 2.0**-63.6, np.float32)  # squares below 2^-126
    x[..., 0] = 2.0**-52
    w, g = np.zeros((4097, 64), np.float32), array(1, 1, 64, seed=1) * np.float32(2.0**50)
    true = size_of(x) * size_of(g)
    (norm,) = jax.jit(gcx.per_example.norms(loss))(w, (x, g))
    assert norm == pytest.approx(true, rel=1e-5)


@pytest.mark.slow
def test_sum_of_many_examples_of_narrow_parameters_is_that_of_each_in_float32():
    dtype = jnp.bfloat16

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w).astype(jnp.float32))

    w, batch = jnp.asarray(array(16, 16, seed=1), dtype), jnp.asarray(array(512, 3, 16), dtype)
    run = jax.jit(clipped_sum(loss, 1.0))
    whole, without = run(w, batch)[1], run(w, batch[1:])[1]
    assert whole.dtype == np.float32
    assert size_of(run(w, batch[:1])[1]) == pytest.approx(1, rel=1e-5)  # it was clipped
    assert size_of(np.asarray(whole, np.float64) - without) <= 1 + 1e-4  # 512 sums in float32


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", ["zero", "propagate"])
def test_bad_number_anywhere_in_one_example_of_many_adds_zero_or_spoils_all(nonfinite):
    def loss(p, x):
        # -9 is a finite input; the NaN is made inside, by the square root.
        return jnp.sum(jnp.sin(jax.nn.relu(jnp.sqrt(x + 5) @ p["a"]) @ p["b"])[1:] @ p["c"])

    params = {"a": array(16, 16, seed=1), "b": array(16, 16, seed=2), "c": array(16, seed=3)}
    batch = array(64, 3, 16, seed=4)
    run = jax.jit(clipped_sum(loss, 0.5, nonfinite=nonfinite))
    without = run(params, np.delete(batch, 5, 0))[1]
    for place, bad in itertools.product(range(3), (np.nan, np.inf, -9.0)):
        spoilt = batch.copy()
        spoilt[5, place, 7] = bad
        (_, stats), grads = run(params, spoilt)
        assert not np.isfinite(stats.norm[5])
        if nonfinite == "zero":
            assert stats.factor[5] == 0
            assert_close(grads, jax.tree.map(lambda x: np.asarray(x, np.float64), without), 1e-4)
        else:
            assert all(np.isnan(x).all() for x in jax.tree.leaves(grads))


def test_norm_of_one_group_that_is_not_finite_spoils_all():
    def loss(p, x):
        return jnp.sum(x @ p["a"]) + jnp.sum(jnp.sqrt(x - 5) @ p["b"])

    params = {"a": array(8, 8, seed=1), "b": array(8, 8, seed=2)}
    labels = {"a": "a", "b": "b"}
    run = clipped_sum(loss, {"a": 1.0, "b": 1.0}, param_labels=labels)
    _, grads = jax.jit(run)(params, array(2, 3, 8, seed=3))
    assert np.isnan(grads["a"]).all() and np.isnan(grads["b"]).all()


@pytest.mark.slow
def test_embedding_that_is_used_many_times_takes_equations_in_proportion():
    def loss(times, table, ids):
        return sum(jnp.sum(jnp.sin((i + 1.0) * table[ids + i])) for i in range(times))

    def equations(times):
        run = gcx.per_example.norms(functools.partial(loss, times))
        program = jax.make_jaxpr(run)(np.zeros((64, 16), np.float32), np.zeros((2, 3), np.int32))
        return str(program).count("=")

    assert equations(16) < 2.5 * equations(8)


def test_tokens_and_examples_without_a_gradient_are_no_reason_to_write_gradients_down():
    sizes = []

    def note(norm, threshold):
        jax.debug.callback(lambda size: sizes.append(int(size)), norm.size)
        return jnp.minimum(1.0, threshold / jnp.where(norm > 0, norm, 1))

    def loss(w, example):
        x, sizes = example
        return jnp.sum((x @ w) * sizes[:, None])

    batch = array(4, 3, 64, seed=1), np.tile(np.float32([1, 1e-20, 0]), (4, 1))
    batch[1][2] = 0
    (_, stats), _ = jax.jit(clipped_sum(loss, 0.5, reaction=note))(array(64, 64), batch)
    jax.effects_barrier()
    assert set(sizes) == {4}  # all at once
    assert ((np.asarray(stats.norm) > 0) == [True, True, False, True]).all()


def test_equal_numbers_that_a_product_adds_up_in_order_stay_within_the_threshold():
    # The Gram total of 4,096 equal numbers is 1.6e-5 too small on a CPU.
    batch = np.full((2, 1, 4096), 1.1, np.float32) * np.array([[[1]], [[3]]], np.float32)
    w = np.zeros((4096, 64), np.float32)
    assert methods(linear, w, batch) == {"": "gram"}
    for i in range(2):
        _, grads = jax.jit(clipped_sum(linear, 1.0))(w, batch[i : i + 1])
        assert 1 - 5e-5 <= size_of(grads) <= 1 + 1e-5


def both_layers(p, example):
    """An embedding and a dense layer; the tokens of the second example cancel in the dense layer."""
    ids, x = example
    return jnp.sum(jnp.sin(p["embed"][ids])) + jnp.sum((x @ p["w"]) ** 3) + jnp.sum(x @ p["w"])


@pytest.mark.slow
def test_derivatives_of_the_clipped_mean_are_those_of_clipped_written_gradients():
    params = {"embed": array(50, 16, seed=1), "w": array(16, 16, seed=2)}
    x = array(3, 2, 16, seed=3)
    x[1, 1] = -x[1, 0]
    batch = np.array([[1, 2], [3, 3], [49, 0]]), x

    def written(p, max_norm):
        grads = jax.vmap(jax.grad(both_layers), (None, 0))(p, batch)
        norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in jax.tree.leaves(grads)))
        factors = jnp.minimum(1, max_norm / norms)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(factors), grads), norms

    def ours(p, max_norm):
        (_, stats), grads = gcx.per_example.value_and_grad(both_layers, max_norm)(p, batch)
        return grads, stats.norm

    def derivative(run, params):
        def number(p, max_norm):
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(run(p, max_norm)))

        return jax.jit(jax.grad(number, (0, 1)))(params, jnp.float32(4.0))

    with x64():
        wanted = jax.tree.map(np.asarray, derivative(written, widened(params)))
    assert_close(derivative(ours, params), wanted, 1e-4)


def test_finite_losses_run_with_debug_nans():
    run = gcx.per_example.value_and_grad(both_layers, 1.0, nonfinite="zero", num_microbatches=3)
    params = {"embed": array(50, 16, seed=1), "w": array(16, 16, seed=2)}
    batch = np.array([[1, 2], [3, 3], [49, 0]]), array(3, 2, 16, seed=3) * [[[1]], [[0]], [[1]]]
    with jax.debug_nans(True):
        _, grads = jax.jit(run)(params, batch)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def layer(w, x):
    return jnp.sum(jnp.sin(x @ w))


def recurrent(w, x):
    return jnp.sum(jax.lax.scan(lambda h, y: (jnp.sin(h @ w + y), None), x[0], x)[0])


@pytest.mark.parametrize(
    ("loss", "tokens", "method"),
    [
        (layer, 3, "gram"),  # 3 (16 + 16) numbers in the factors, 256 in the product
        (layer, 4, "materialized"),
        (recurrent, 3, "gram"),
        (recurrent, 4, "product"),
    ],
)
def test_product_is_taken_where_it_is_at_most_twice_as_large_as_its_factors(loss, tokens, method):
    assert methods(loss, array(16, 16), array(2, tokens, 16, seed=1)) == {"": method}


@pytest.mark.slow
def test_the_program_has_no_more_gradients_of_activations_than_an_ordinary_one():
    def loss(p, ids):
        # The logits are used twice, without their last row: their gradient is a sum in zeros.
        x = jnp.sin(p["embed"][ids]) * p["scale"]
        logits = x @ p["embed"].T
        picked = jnp.take_along_axis(logits[:-1], ids[1:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits[:-1], -1) - picked)

    params = {"embed": array(60, 24, seed=1), "scale": array(24, seed=2)}
    batch = np.random.default_rng(0).integers(0, 60, (2, 8)).astype(np.int32)
    ours, ordinary = (
        str(jax.make_jaxpr(run)(params, batch))
        for run in (gcx.per_example.norms(loss), jax.vmap(jax.grad(loss), (None, 0)))
    )
    for gradient_of_logits in ("f32[2,8,60] = pad[", "f32[2,8,60] = add"):
        assert ours.count(gradient_of_logits) == ordinary.count(gradient_of_logits)
    assert [ours.count(f"f32[2,{n},24] = dot_general[") for n in (7, 8)] == [0, 1]


def convolution(kernel, image, **options):
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, kernel, dimension_numbers=numbers, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"window_strides": (2, 1), "padding": ((1, 2), (-1, 1))}, id="strided"),
        pytest.param(
            {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2), "padding": ((0, 1), (2, 1))},
            id="transposed",
            marks=pytest.mark.slow,
        ),
        pytest.param({"feature_group_count": 2}, id="groups", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_kernel_gradient_is_measured_by_the_gram_matrix_of_pixels(options):
    def loss(kernel, example):
        image, grads = example
        out = convolution(kernel, image, **options)
        return jnp.sum(out * grads[:, : out.shape[1], : out.shape[2]])

    channels, groups = 96, options.get("feature_group_count", 1)
    image, grads = array(5, 2, 3, 3, channels), array(5, 2, 4, 4, channels, seed=1)
    image[1], grads[1] = 1.1, 0.7  # equal numbers, which a product adds in order
    image[2], grads[2] = image[2] * 1e12, grads[2] * 1e-12
    image[3, 1], grads[3, 1] = -image[3, 0], grads[3, 0] * 1.0001  # the two images cancel
    image[4] *= 1e20  # the squares of pixels overflow
    grads[4] *= 1e-3
    kernel, batch = np.zeros((3, 3, channels // groups, channels), np.float32), (image, grads)
    assert methods(loss, kernel, batch) == {"": "pixels"}
    assert_sound(loss, kernel, batch, max_norm=0.5, rtol=2e-4, of_mean=2e-4)

    run = jax.jit(clipped_sum(loss, 0.5, nonfinite="zero"))
    whole = np.asarray(run(kernel, batch)[1], np.float64)
    image[0, 0, 1, 1, 0] = np.nan
    (_, stats), found = run(kernel, batch)
    assert np.isnan(stats.norm[0]) and size_of(found - whole) <= 0.5 * (1 + 1e-5)


@pytest.mark.slow
def test_convolutions_of_small_images_keep_no_patches():
    kernels, images = [jnp.ones((3, 3, 256, 256))] * 3, jnp.ones((512, 1, 4, 4, 256))

    def loss(kernels, x):
        return functools.reduce(lambda x, w: jnp.tanh(convolution(w, x)), kernels, x).sum()

    def mean(kernels, images):
        return jax.vmap(loss, (None, 0))(kernels, images).mean()

    def scratch(run):
        return jax.jit(run).lower(kernels, images).compile().memory_analysis().temp_size_in_bytes

    ours = scratch(gcx.per_example.value_and_grad(loss, 1.0))
    assert ours <= 3 * scratch(jax.grad(mean))
