"""`stable_adamw`: against the paper in float64 NumPy, and against the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx
import recorded
from clip_cases import recordings, train

EPS = float(np.finfo(np.float32).eps)


def gradients():
    """Two leaves of normal noise with spikes, an element that is always 0, and a first step of 0."""
    rng = np.random.default_rng(0)
    leaves = [rng.standard_normal((60, 4, 3)), 1e-4 * rng.standard_normal((60, 5))]
    leaves[0][30] *= 1000
    leaves[1][45] *= 1000
    leaves[1][:, 4] = leaves[1][0] = 0
    return leaves


def oracle(grads, param, rates, b1, b2, eps, weight_decay, clipping):
    """Algorithm 2 of arXiv 2304.13013, with its threshold of 1 replaced by `clipping`."""
    first = second = np.zeros_like(param)
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), 1):
        d1, d2 = (b * (1 - b ** (step - 1)) / (1 - b**step) for b in (b1, b2))
        first = d1 * first + (1 - d1) * grad
        second = d2 * second + (1 - d2) * grad**2
        rms = np.sqrt(np.mean(grad**2 / np.maximum(second, eps**2)))
        rate = rate / max(1.0, rms / clipping)
        param = param - rate * weight_decay * param - rate * first / (np.sqrt(second) + eps)
        yield param


@pytest.mark.parametrize(
    ("learning_rate", "arguments"),
    [
        (1e-2, (0.95, 0.999, 1e-3, 0.1, 0.5)),
        (lambda count: 1e-2 / (1.0 + count), (0.0, 0.0, 1e-5, 0.1, 2.0)),
    ],
    ids=["numbers", "a schedule"],
)
def test_parameters_are_those_of_the_paper(learning_rate, arguments):
    grads, start = gradients(), [np.ones((4, 3)), np.full(5, -2.0)]
    rates = [learning_rate(i) if callable(learning_rate) else learning_rate for i in range(60)]
    tx = gcx.stable_adamw(learning_rate, *arguments)
    _, _, params = train(tx, jax.tree.map(np.float32, grads), jax.tree.map(jnp.float32, start))
    for found, grad, first in zip(params, grads, start, strict=True):
        exact = np.stack(list(oracle(np.float32(grad).astype(float), first, rates, *arguments)))
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-6)


@recordings("stableadamw")
def test_parameters_are_those_of_the_authors_code(run):
    given = run.given
    tx = gcx.stable_adamw(
        given["lr"], *given["betas"], given["eps"], given["weight_decay"], given["clip_thresh"]
    )
    start = [jnp.asarray(x, jnp.float32) for x in run.raw["inputs"]["params0"]]
    _, _, params = train(tx, run.leaves, start)
    for found, theirs in zip(params, recorded.by_leaf(run.gave["params"]), strict=True):
        scale = np.abs(theirs).reshape(len(theirs), -1).max(axis=1)
        error = np.abs(found - theirs).reshape(len(theirs), -1).max(axis=1)
        # One rounding of the parameter a step.
        assert (error <= (0.6 * len(theirs) + 1) * EPS * scale).all()


def test_moments_and_arithmetic_of_bfloat16_are_float32():
    low = [jnp.asarray(x, jnp.bfloat16) for x in gradients()]
    start = [jnp.ones(x.shape[1:]) for x in low]
    tx = gcx.stable_adamw(1e-3, weight_decay=0.1)
    state = tx.init(jax.tree.map(lambda x: x.astype(jnp.bfloat16), start))
    assert {x.dtype.name for x in jax.tree.leaves(state[1:])} == {"float32"}
    found, _, _ = train(tx, low, start)
    exact, _, _ = train(tx, [x.astype(jnp.float32) for x in low], start)
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        atol = 1e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(np.float32(ours), wanted, rtol=2.0**-8, atol=atol)
