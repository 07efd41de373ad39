"""Norms and clips as a GPU and a TPU compute them, run by a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx
import oracles
import trees
from other_devices import on_a_tpu, on_one_gpu

each_device = pytest.mark.parametrize("device", [on_a_tpu, on_one_gpu])

LARGE = (96, 100)  # above the size up to which leaves are joined
RANGE = {
    "as usual": [1.0, -2.0, 0.5],
    "squares overflow": [1e20, -3e20],
    "squares underflow": [3e-23, -4e-23],
    "from end to end": [1.2e-38, 1e-20, 1.0, 1e20, 3e35],
    "zero": [0.0],
    "infinite": [1.0, -np.inf],
    "NaN": [1.0, np.nan, np.inf],
}


def large_and_small(values):
    """The values in large leaves, sharing one of their own, and in small ones."""
    filled = np.resize(np.float32(values), LARGE)
    return {"large": filled, "turned": filled.T.copy(), "small": np.float32(values)}


def assert_alike(ours, theirs, rtol=1e-4):
    """As exact as a CPU is, which adds up a sum that is not its own one term after the other."""
    for ours_of_leaf, exact in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(ours_of_leaf, np.float64), exact, rtol=rtol)


@each_device
def test_norms_are_right_over_the_whole_range(device):
    with device():
        norm, norms = jax.jit(gcx.global_norm), jax.jit(gcx.leaf_norms)
        for values in RANGE.values():
            tree = large_and_small(values)
            leaves = [tree[name] for name in sorted(tree)]
            assert_alike(norm(tree), oracles.global_norm(leaves))
            assert_alike(norms(tree), [oracles.global_norm([x]) for x in leaves])


@each_device
@pytest.mark.parametrize("axis", [0, 1])
def test_norms_of_rows_and_columns_are_right(device, axis):
    scales = np.float32(10.0) ** np.linspace(-30, 30, LARGE[1])
    x = np.random.default_rng(0).normal(size=LARGE).astype(np.float32) * scales
    exact = np.sqrt(np.sum(np.square(x.astype(np.float64)), axis, keepdims=True))
    limit = 0.5 * exact.max()
    clip = gcx.clip_by_norm(float(limit), granularity=gcx.granularities.axis(axis))
    with device():
        clipped = jax.jit(lambda x: clip.update(x, clip.init(x))[0])(x)
    assert_alike(clipped, x * np.minimum(1, limit / exact))


@each_device
@pytest.mark.parametrize(("leaves", "shape"), [(120, (5,)), (34, LARGE)])  # more than one part
def test_many_leaves_are_measured_and_scaled_each_by_its_own(device, leaves, shape):
    sizes = np.arange(1.0, leaves + 1, dtype=np.float32)
    tree = [np.full(shape, size) for size in sizes]
    clip = gcx.clip_by_leaf_norm(1.0)
    with device():
        norms = jax.jit(gcx.leaf_norms)(tree)
        clipped = jax.jit(lambda tree: clip.update(tree, clip.init(tree))[0])(tree)
        norm = jax.jit(gcx.global_norm)(tree)
    count = np.prod(shape)
    exact = sizes.astype(np.float64) * np.sqrt(count)
    assert_alike(norms, list(exact))
    assert_alike(clipped, [np.full(shape, 1 / np.sqrt(count))] * len(tree))
    assert_alike(norm, np.sqrt(np.sum(exact**2)))


BY_LABEL = gcx.granularities.group(lambda tree: ["ab"[i % 2] for i, _ in enumerate(tree)])
# Of one kind too many for one stack, of one enough for one, of the others too few to be summed so.
ALIKE = [((5,), "float32")] * 34 + [((3, 4), "float32")] * 5 + [((5,), "bfloat16")] * 3
ALIKE += [((1,), "float32"), ((0, 3), "float32"), (LARGE, "float32")] * 2


@each_device
@pytest.mark.parametrize(
    "granularity",
    [
        "global",
        "leaf",
        gcx.granularities.axis(0),
        gcx.granularities.axis(-1),
        BY_LABEL,
    ],
    ids=["global", "leaf", "columns", "rows", "group"],
)
def test_leaves_that_are_alike_are_scaled_each_by_its_own(device, granularity):
    tree = [trees.normal(*kind, seed=i, scale=1 + i) for i, kind in enumerate(ALIKE)]
    limit = {"b": 0.5} if granularity == BY_LABEL else 0.5  # "a" is left alone
    clip = gcx.clip_by_norm(limit, granularity=granularity)

    def clipped(tree):
        return clip.update(tree, clip.init(tree))[0]

    on_cpu = jax.jit(clipped)(tree)
    with device():
        found = jax.jit(clipped)(tree)
    for x, exact in zip(found, on_cpu, strict=True):
        assert x.dtype == exact.dtype
        rtol = 1e-2 if x.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.float32(x), np.float32(exact), rtol=rtol)


@each_device
def test_norms_may_be_mapped_scanned_and_differentiated(device):
    stack = trees.normal((3, *LARGE))
    exact = np.sqrt(np.sum(np.square(np.asarray(stack, np.float64)), (1, 2)))
    with device():
        mapped = jax.jit(jax.vmap(gcx.global_norm))(stack)
        scanned = jax.jit(lambda s: jax.lax.map(gcx.global_norm, s))(stack)
        slope = jax.jit(jax.grad(gcx.global_norm))(jnp.asarray(stack[0]))
    assert_alike([mapped, scanned], [exact, exact])
    assert_alike(slope, stack[0] / exact[0])
