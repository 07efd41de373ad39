"""What the norms and clipped means must equal: every gradient written down, in 64 bit."""

import math

import jax
import numpy as np

import gradclip_jax as gcx
from compat import x64
from gradclip_jax.per_example._factored import Convolution, as_factored
from gradclip_jax.per_example._gram import gram_terms
from gradclip_jax.per_example._loss import Loss


def array(*shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * 0.4).astype(np.float32)


def widened(tree):
    def widen(x):
        kind = getattr(x, "dtype", None)
        if kind == np.float32:
            return np.asarray(x, np.float64)
        return np.asarray(x, np.complex128) if kind == np.complex64 else x

    return jax.tree.map(widen, tree)


def gradients(loss, params, batch):
    """Values, and every example's gradient, as float64 NumPy arrays."""
    with x64():
        one = jax.vmap(jax.value_and_grad(loss), (None, 0))
        out = jax.jit(one)(widened(params), widened(batch))
        return jax.tree.map(np.asarray, out)


def norms(grads):
    """The norm of each example."""
    leaves = [g.reshape(len(g), -1) for g in jax.tree.leaves(grads)]
    return np.sqrt(sum(np.sum(np.abs(g) ** 2, 1) for g in leaves))


def size_of(tree):
    """The norm of a whole tree."""
    return norms(jax.tree.map(lambda x: np.asarray(x)[None].astype(np.complex128), tree))[0]


def weighted_mean(grads, factors):
    """The mean of the gradients times their factors."""
    return jax.tree.map(lambda g: np.tensordot(factors, g, 1) / len(factors), grads)


def assert_close(ours, wanted, tolerance=1e-5):
    """Equal to a relative error of the whole tree."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
    difference = jax.tree.map(lambda a, b: np.asarray(a) - b, ours, wanted)
    error, size = size_of(difference), size_of(wanted)
    assert error <= tolerance * size, f"relative error {error / max(size, 1e-300)}"


def assert_sound(loss, params, batch, max_norm=None, *, rtol=1e-5, atol=0.0, of_mean=1e-5):
    """Equal to written gradients, clipped in 64 bit; each example alone within the threshold."""
    _, grads = gradients(loss, params, batch)
    wanted = norms(grads)
    max_norm = max_norm or float(np.median(wanted)) or 1.0
    run = jax.jit(gcx.per_example.value_and_grad(loss, max_norm))
    (_, stats), ours = run(params, batch)
    np.testing.assert_allclose(stats.norm, wanted, rtol=rtol, atol=atol)
    factors = np.minimum(1, max_norm / np.where(wanted > 0, wanted, 1))
    assert_close(ours, weighted_mean(grads, factors), of_mean)
    for i in range(len(wanted)):
        # The mean of several copies is the clipped gradient; their program is compiled already.
        copies = jax.tree.map(lambda x, i=i: np.repeat(x[i : i + 1], len(x), 0), batch)
        assert size_of(run(params, copies)[1]) <= max_norm * (1 + 1e-5)


def methods(loss, params, batch):
    """How the norm of each weight is computed, by path.

    "gram" (from factors), "pixels" (from images), "product" (from a product that is smaller than
    its factors) or "materialized" (an ordinary array).
    """
    found = {}

    def visit(params, batch):
        examples = Loss(loss, 0, 1, False, False).bind((params, batch), {})
        one = jax.tree.map(lambda x: x[0], examples.batch)
        outputs = examples.outputs_of_one(examples.leaves, one)
        for (path, _), grad in zip(jax.tree.leaves_with_path(params), outputs.grads, strict=True):
            if isinstance(grad, Convolution):
                method = "pixels" if grad.gram_size() < math.prod(grad.shape) else "product"
            else:
                terms = as_factored(grad).terms
                is_plain = len(terms) > 0 and all(len(term.factors) == 1 for term in terms)
                method = "materialized" if is_plain else "product"
            found[jax.tree_util.keystr(path)] = "gram" if gram_terms(grad) else method
        return outputs.value

    jax.eval_shape(visit, params, batch)
    return found
