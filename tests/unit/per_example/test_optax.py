"""Clipped sums compared with `optax.contrib.differentially_private_aggregate`, as in docs/coming_from/optax.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

NAN = float("nan")


def loss_fn(params, x):
    return x @ params["w"]  # the gradient is the example itself


@pytest.mark.parametrize(
    ("batch", "theirs", "ours", "weights"),
    [
        ([[3.0, 4.0], [0.3, 0.4]], [0.45, 0.6], [0.45, 0.6], [1.0, 1.0]),
        ([[3.0, 4.0], [1e20, 1e20]], [0.3, 0.4], [0.653553, 0.753553], [1.0, 1.0]),
        ([[3.0, 4.0], [NAN, 0.0]], [NAN, 0.4], [0.3, 0.4], [1.0, 1.0]),
        (
            [[3.0, 4.0], [0.3, 0.4], [0.0, 9.0]],
            [0.3, 0.733333],
            [0.45, 0.6],
            [1.0, 1.0, 0.0],
        ),
    ],
    ids=["ordinary", "overflow", "nan", "padding"],
)
def test_clipped_mean_beside_that_of_optax(batch, theirs, ours, weights):
    params, batch = {"w": jnp.zeros(2)}, jnp.array(batch)
    aggregate = optax.contrib.differentially_private_aggregate(1.0, noise_multiplier=0.0, key=0)
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
    updates, _ = aggregate.update(grads, aggregate.init(params))
    np.testing.assert_allclose(updates["w"], theirs, rtol=1e-6)

    clipped = gcx.per_example.value_and_grad(
        lambda params, example: (loss_fn(params, example["x"]), example["weight"]),
        1.0,
        has_weight=True,
        reduction="sum",
        nonfinite="zero",
    )
    sensitivity = gcx.per_example.sensitivity(1.0, "add_or_remove_one")
    noise = gcx.per_example.noisy_mean(0.0, sensitivity, expected_batch_size=2, key=0)
    _, grads = jax.jit(clipped)(params, {"x": batch, "weight": jnp.array(weights)})
    updates, _ = noise.update(grads, noise.init(params))
    np.testing.assert_allclose(updates["w"], ours, rtol=1e-6)
