"""A transformer against `jax.vmap(jax.grad(loss))` in 64 bit, and the cost of their norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import array, gpt
from oracle import assert_sound, gradients, methods, norms

import gradclip_jax as gcx

pytestmark = pytest.mark.slow  # compiles many programs; .ci/run and the workflow run it


def test_gradients_are_clipped_as_written_ones_and_large_weights_are_followed():
    loss, params, batch = gpt()
    assert_sound(loss, params, batch)
    found = methods(loss, params, batch)
    materialized = [path for path, method in found.items() if method == "materialized"]
    assert all(path.endswith(("['place']", "['bias']")) for path in materialized)


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
    w, batch = array(16, 16, seed=0), array(2, tokens, 16, seed=1)
    assert methods(loss, w, batch) == {"": method}
    found = jax.jit(gcx.per_example.norms(loss))(w, batch)
    np.testing.assert_allclose(found, norms(gradients(loss, w, batch)[1]), rtol=1e-5)


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
    found = jax.jit(gcx.per_example.norms(loss))(params, batch)
    np.testing.assert_allclose(found, norms(gradients(loss, params, batch)[1]), rtol=1e-5)
