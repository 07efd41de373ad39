"""Transformers against `jax.vmap(jax.grad(loss))` in 64 bit, and the cost of their norms."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, array
from oracle import assert_close, gradients, norms, weighted_mean

pytestmark = pytest.mark.slow  # compiles many programs; .ci/run and the workflow run it


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_clipped_mean_equal_those_of_written_gradients(name):
    loss, params, batch = MODELS[name]()
    values, grads = gradients(loss, params, batch)
    wanted = norms(grads)
    max_norm = float(np.median(wanted))
    (_, stats), ours = jax.jit(gcx.per_example.value_and_grad(loss, max_norm))(params, batch)
    np.testing.assert_allclose(stats.norm, wanted, rtol=1e-5)
    # A sum of sines may cancel: its error is that of its terms.
    np.testing.assert_allclose(stats.value, values, rtol=1e-5, atol=1e-5)
    factors = np.minimum(1, max_norm / wanted)
    np.testing.assert_allclose(stats.factor, factors, rtol=1e-5)
    assert_close(ours, weighted_mean(grads, factors))


@pytest.mark.parametrize("name", MODELS)
def test_large_weights_are_followed(name):
    loss, params, batch = MODELS[name]()
    costs = gcx.per_example.explain(loss)(params, batch)
    materialized = [path for path, cost in costs.items() if cost.method == "materialized"]
    assert all(path.endswith(("['place']", "['bias']")) for path in materialized)


def layer(w, x):
    return jnp.sum(jnp.sin(x @ w))


def recurrent(w, x):
    return jnp.sum(jax.lax.scan(lambda h, y: (jnp.sin(h @ w + y), None), x[0], x)[0])


@pytest.mark.parametrize(
    ("loss", "tokens", "method"),
    [
        (layer, 7, "gram"),  # 7 (16 + 16) numbers in the factors, 256 in the product
        (layer, 8, "materialized"),
        (recurrent, 7, "gram"),
        (recurrent, 8, "product"),
    ],
)
def test_product_is_taken_only_where_it_is_no_larger_than_its_factors(loss, tokens, method):
    w, batch = array(16, 16, seed=0), array(2, tokens, 16, seed=1)
    assert gcx.per_example.explain(loss)(w, batch)["params"].method == method
    found = jax.jit(gcx.per_example.norms(loss))(w, batch)
    np.testing.assert_allclose(found, norms(gradients(loss, w, batch)[1]), rtol=1e-5)


def shifted_loss_and_program():
    """The logits are used twice, without their last row: their gradient is a sum in zeros."""

    def loss(p, ids):
        x = jnp.sin(p["embed"][ids]) * p["scale"]
        logits = x @ p["embed"].T
        picked = jnp.take_along_axis(logits[:-1], ids[1:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits[:-1], -1) - picked)

    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(60, 24)), "scale": rng.normal(size=24)}
    params = jax.tree.map(np.float32, params)
    batch = rng.integers(0, 60, (2, 8)).astype(np.int32)
    program = str(jax.make_jaxpr(gcx.per_example.norms(loss))(params, batch))
    return loss, params, batch, program


def test_gradient_of_an_activation_is_computed_once():
    *_, program = shifted_loss_and_program()
    assert [program.count(f"f32[2,{n},24] = dot_general[") for n in (7, 8)] == [0, 1]


def test_gradient_of_logits_is_the_one_array_that_an_ordinary_gradient_has():
    loss, params, batch, program = shifted_loss_and_program()
    ordinary = str(jax.make_jaxpr(jax.vmap(jax.grad(loss), (None, 0)))(params, batch))
    for padded in ("f32[2,8,60] = pad[", "f32[2,8,60] = add"):
        assert program.count(padded) == ordinary.count(padded)
    found = jax.jit(gcx.per_example.norms(loss))(params, batch)
    np.testing.assert_allclose(found, norms(gradients(loss, params, batch)[1]), rtol=1e-5)
