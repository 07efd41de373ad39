"""`global_norm` and `leaf_norms`: right for every dtype, magnitude, order and tree."""

import functools
import itertools
import math
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
import hlo
import oracles
import trees

ULPS = 8.0  # 1e-6 in float32: invariant 4
ORDERS = (1.0, 2.0, math.inf)

tree_norm = jax.jit(gcx.global_norm, static_argnames=("ord", "axis_name"))
leaf_norms = jax.jit(gcx.leaf_norms)


def worst(tree, ord=2.0) -> float:
    """Distance from the oracle in ulp."""
    return oracles.ulps(tree_norm(tree, ord=ord), oracles.global_norm(trees.leaves(tree), ord))


@functools.partial(jax.jit, static_argnums=(1, 2))
def own_norms(x, axes, ord=2.0):
    """The norms of the units inside a leaf as a rule sees them: -1 where it sees none."""
    rule = gcx.thresholds.Rule(
        lambda norm: norm - 1, lambda norm, state, _: (norm, norm), name="last"
    )
    clip = gcx.clip_by_norm(rule, granularity=gcx.granularities.axis(axes), ord=ord)
    return clip.update(x, clip.init(x))[1].rules[0]["last"]


# --- accuracy -------------------------------------------------------------------------------


def test_norm_is_right_in_every_dtype():
    """Of two leaves of each dtype, and of all leaves together."""
    trees_of = {
        dtype: [trees.normal((50, 60), dtype), trees.normal((7,), dtype, seed=1)]
        for dtype in ("float32", "complex64", *trees.LOW)
    }

    @jax.jit
    def norms(tree):
        orders = {ord: gcx.global_norm(tree, ord=ord) for ord in ORDERS}
        return orders, {dtype: gcx.global_norm(x) for dtype, x in tree.items()}

    together, each = norms(trees_of)
    for dtype, tree in trees_of.items():
        exact = oracles.global_norm(trees.leaves(tree))
        np.testing.assert_allclose(each[dtype], exact, rtol=1e-6, err_msg=dtype)  # invariant 4
    for ord, norm in together.items():
        assert oracles.ulps(norm, oracles.global_norm(trees.leaves(trees_of), ord)) <= ULPS


@pytest.mark.parametrize(
    "size",
    [1, 5, 33, 900, 20_000, *(pytest.param(10**n, marks=pytest.mark.slow) for n in (6, 7))],
)
def test_norm_of_a_constant_array_is_right(size):
    # Constants are the hardest case: each rounding of a running sum errs to the same side.
    for value in np.float32([0.1, 1 / 3, 0.7, 1.1, 1.9, 1.3]):
        for ord in (1.0, 2.0):
            exact = float(value) * size ** (1 / ord)
            norm = tree_norm(np.full(size, value), ord=ord)
            # Compiled cheaply a sum of thousands of equal terms is not split into partial sums.
            assert oracles.ulps(norm, exact) <= 2 * ULPS, (value, ord)


# More take minutes: XLA's time grows with the square of the number of leaves, with Optax's norm as
# with ours (JAX 0.10.2).
def test_norm_of_many_leaves_is_right_also_where_bfloat16_would_lose_their_sums():
    assert worst([np.full((3, 2), 0.1 + 1e-4 * i, jnp.bfloat16) for i in range(100)]) <= ULPS


@pytest.mark.parametrize("shape", [(7, 300), (3, 4, 5, 6)])
def test_leaf_and_unit_norms_are_right(shape):
    # JAX 0.7 adds up a matrix less carefully: where all terms are rounded alike it shows.
    limit = ULPS if compat.VERSION >= (0, 10) else 4 * ULPS
    for leaf in (trees.normal(shape), jnp.full(shape, 0.1)):
        assert oracles.ulps(leaf_norms([leaf])[0], oracles.vector_norm(leaf)) <= limit
        for axes in ((0,), (len(shape) - 1,)):
            exact = oracles.unit_norms(leaf, axes)
            assert oracles.ulps(own_norms(leaf, axes), exact.ravel()) <= ULPS


def test_float64_norms_are_right():
    rng = np.random.default_rng(0)
    cases = {
        "constant": np.full(1_000, 0.1),
        "huge": np.array([1e150, 1e150]),
        "tiny": np.array([3e-140, 4e-140]),
        "complex": rng.standard_normal(100) + 1j * rng.standard_normal(100),
    }
    with compat.x64():
        found = jax.jit(lambda t: {ord: gcx.leaf_norms(t, ord=ord) for ord in ORDERS})(cases)
        for ord, norms in found.items():
            for name, norm in norms.items():
                assert norm.dtype == jnp.float64
                assert oracles.ulps(norm, oracles.vector_norm(cases[name], ord)) <= ULPS
        # One float64 leaf is enough, and a float32 tree stays float32.
        mixed = [jnp.float32([3.0]), jnp.asarray(np.float64([4.0]))]
        assert gcx.global_norm(mixed).dtype == gcx.leaf_norms(mixed)[0].dtype == jnp.float64
        assert gcx.global_norm(mixed[0]).dtype == jnp.float32
        float0 = np.zeros(2, jax.dtypes.float0)
        for leaf, dtype in ((mixed[0], jnp.float32), (mixed[1], jnp.float64)):
            assert [norm.dtype for norm in gcx.leaf_norms([leaf, float0])] == [dtype, dtype]


# --- range ----------------------------------------------------------------------------------

# Invariant 4: float32 norms of elements from 1e-18 to 1.8e19, and all of float16 and float8.
RANGE = {
    "float16 whose squares overflow": np.float16([300, 400]),
    "float16 whose sum of squares overflows": np.float16(np.full(100, 300)),
    "float16 whose squares underflow": np.float16([1e-4] * 4),
    "float16 subnormal": np.float16([6e-8, 1.2e-7]),
    "float32 small": np.float32([1e-18, 4e-18]),
    "float32 largest": np.float32([1.8e19, 1e18]),
    "float32 from end to end": np.float32([1e-18, 1.0, 1e18, 1e19]),
    "many of 1e17": np.full(10_000, 1e17, np.float32),
    "many of 1e-18": np.full(10_000, 1e-18, np.float32),
    "many of 1e-13": np.full(10_000, 1e-13, np.float32),
    "float8 largest": np.array([448, 448, 448], np.dtype("float8_e4m3fn")),
    "float8 smallest": np.array([2.0**-9, 2.0**-9], np.dtype("float8_e4m3fn")),
    "complex64 huge": np.complex64([3e18 + 4e18j]),
    "complex64 tiny": np.complex64([3e-18 + 4e-18j]),
}


@pytest.mark.parametrize("values", RANGE.values(), ids=RANGE)
def test_norm_is_right_over_the_whole_range(values):
    if values.size < 8:  # one shape, to compile once
        values = np.concatenate([values, np.zeros(8 - values.size, values.dtype)])
    # Compiled cheaply JAX 0.7 splits a sum of thousands of terms less: 8.4 ulp, as users do 0.4.
    is_cut_short = compat.VERSION < (0, 10) and values.size > 1_000
    limit = 2 * ULPS if is_cut_short and not os.environ.get("FULL_COMPILE") else ULPS
    assert worst({"a": values, "b": np.zeros((3, 2), np.float32)}) <= limit


@pytest.mark.parametrize(
    ("norms", "ord", "whole"),
    [
        ([3.0, 4.0], 2, 5.0),
        ([3.0, np.float32([4.0, 1.0])], 1, 8.0),
        ([3.0, 4.0], math.inf, 4.0),
        ([], 2, 0.0),
        ([3.0, math.nan], 2, math.nan),
        ([math.inf, 1.0], 2, math.inf),
        ([1e19, 1e19], 2, 2**0.5 * 1e19),
    ],
)
def test_combined_norms_of_parts_are_the_norm_of_the_whole(norms, ord, whole):
    np.testing.assert_allclose(gcx.combine_norms(norms, ord=ord), whole, rtol=1e-6)


# --- behind any producer --------------------------------------------------------------------

ENDS = [8e-18, 3e-10, 1.0, 1e18, 1.5e18]  # no element behind a producer is below 1e-18
A, B = np.array([1.0, -3.0, 0.5, 2.0]), np.array([0.25, 1.0, -2.0, 1.0])

# From two vectors of the size under test to the gradient; every function is linear in its scale.
PRODUCERS = {
    "fused multiply-add": lambda a, b: a * 0.5 - b * 0.25,
    "cast": lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32),
    "scatter": lambda a, b: jnp.zeros_like(a).at[jnp.array([0, 1, 1, 2])].add(-a),
    "dot": lambda a, b: -jnp.dot(a.reshape(2, 2), jnp.eye(2), precision="highest"),
    "sum over an axis": lambda a, b: -jnp.stack([a, b]).sum(0),
    "scan": lambda a, b: jax.lax.scan(lambda c, x: (c, -x), 0.0, a)[1],
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_a_norm_behind_a_producer_is_exact_at_both_ends_of_the_range(name):
    produce = PRODUCERS[name]

    @jax.jit
    def together(a, b):
        grads = produce(a, b)
        clipped, state = gcx.clip_by_global_norm(1.0).update(grads, None)
        return grads, gcx.global_norm(grads), clipped, state.grad_norm

    for size in ENDS:
        a, b = (jnp.asarray(x * size, jnp.float32) for x in (A, B))
        grads, norm, clipped, reported = together(a, b)
        exact = oracles.vector_norm(grads)
        np.testing.assert_allclose([norm, reported], exact, rtol=2e-6)
        np.testing.assert_allclose(oracles.vector_norm(clipped), min(1.0, exact), rtol=4e-6)


# --- one pass -------------------------------------------------------------------------------


@pytest.mark.parametrize("ord", ORDERS)
def test_ordinary_norm_reads_the_gradients_once(ord):
    big = {"a": jnp.ones((500, 300)), "b": jnp.ones((200_000,))}
    text = hlo.compiled(lambda tree: gcx.global_norm(tree, ord=ord), big)
    assert hlo.reductions_of(text, 149_900) == 2  # older JAX adds up the last few of a leaf apart


# --- what is not an ordinary number ---------------------------------------------------------


@pytest.mark.parametrize("ord", ORDERS)
def test_bad_value_shows_at_every_position_and_nan_also_beside_an_infinity(ord):
    bads = math.nan, math.inf, -math.inf
    for position, bad, beside in itertools.product(range(5), bads, (1e20, math.inf)):
        flat = np.insert(np.float32([beside, -2.0, 1e-30, 0.0]), position, bad)
        norm = float(tree_norm({"a": flat[:3], "b": flat[3:]}, ord=ord))
        is_nan = math.isnan(bad) and not math.isinf(ord)  # the largest of a NaN is infinite
        assert math.isnan(norm) if is_nan else norm == math.inf


@pytest.mark.parametrize("name", ["empty", "only_none", "only_zero_size", "zeros"])
def test_norm_of_nothing_is_zero(name):
    norms = [gcx.global_norm(trees.build(name), ord=ord) for ord in ORDERS]
    assert norms == [0, 0, 0] and norms[0].dtype == jnp.float32 and norms[0].shape == ()


def test_none_and_masked_leaves_keep_their_place_and_python_numbers_are_leaves():
    norms = gcx.leaf_norms(trees.build("masked"))
    assert norms["b"] is None and norms["c"] == optax.MaskedNode()
    assert float(gcx.global_norm({"a": 3.0, "b": 4.0})) == 5.0


# --- transformations of JAX -----------------------------------------------------------------


@pytest.mark.parametrize("ord", ORDERS)
def test_gradient_of_the_norm_is_right(ord):
    slope = jax.jit(jax.grad(lambda x: gcx.global_norm(x, ord=ord)))
    forward = jax.jit(lambda x: jax.jvp(lambda x: gcx.global_norm(x, ord=ord), (x,), (x,))[1])
    plain = np.array([3.0, -4.0, 1.0])
    norm = oracles.vector_norm(plain, ord)
    if math.isinf(ord):
        exact = np.sign(plain) * (np.abs(plain) == norm)
    else:
        exact = np.sign(plain) * (np.abs(plain) / norm) ** (ord - 1)
    for scale in (1e-10, 1.0, 3e18 if ord == 2 else 3e37):
        x = np.float32(plain * scale)
        np.testing.assert_allclose(slope(x), exact, rtol=1e-5, atol=1e-6, err_msg=str(scale))
        # A norm is homogeneous: its slope along x itself is the norm.
        np.testing.assert_allclose(forward(x), norm * scale, rtol=1e-5, err_msg=str(scale))


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_gradient_at_zero_is_finite(dtype):
    def measure(x):
        norms = (gcx.global_norm(x, ord=ord) + jnp.sum(own_norms(x, (0,), ord)) for ord in ORDERS)
        return sum(norms)

    @jax.jit
    def derivatives(x):
        return jax.grad(measure)(x), jax.jvp(measure, (x,), (x + 1,))[1]

    chex.assert_tree_all_finite(derivatives(jnp.zeros((2, 3), dtype)))


def test_second_derivatives_of_norms_and_clips_where_an_element_is_zero():
    x, w = np.array([0.0, 3.0, 4.0]), np.arange(1.0, 4.0)
    norm, cross = np.linalg.norm(x), np.outer(w, x)
    exact = np.eye(3) / norm - np.outer(x, x) / norm**3
    found = jax.jit(jax.hessian(gcx.global_norm))(jnp.float32(x))
    np.testing.assert_allclose(found, exact, atol=1e-6)

    def clipped(x):  # `w . x / norm`
        return jnp.sum(gcx.clip_grad_norm(x, 1.0)[0] * w)

    exact = -(cross + cross.T + (w @ x) * (np.eye(3) - 3 * np.outer(x, x) / norm**2)) / norm**3
    found = jax.jit(jax.jacrev(jax.grad(clipped)))(jnp.float32(x))
    np.testing.assert_allclose(found, exact, atol=1e-6)
