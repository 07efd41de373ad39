"""float16 with a loss scale learns what float32 learns, where plain float16 does not.

The parameters are float32, the arithmetic is float16. The batch is one share of a mean over many
such shares, so that its gradients are small, and the learning rate is that of the whole mean.
docs/recipes/loss_scaling.md has the numbers that this file prints with `pytest -s`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import trees

SHARES = 2**18
SEEDS, STEPS = range(3), 200


def loss_of(dtype, params, x, y):
    w1, w2 = (p.astype(dtype) for p in params)
    out = jnp.tanh(x.astype(dtype) @ w1) @ w2
    return jnp.mean((out.astype(jnp.float32) - y) ** 2)


def curve(dtype, scaled, seed):
    """The loss of each step, the share of the gradient that is zero, and the last scale."""
    x, y = trees.normal((64, 16), seed=seed), trees.normal((64, 4), seed=10 + seed)
    start = [0.2 * trees.normal(shape, seed=20 + seed) for shape in ((16, 64), (64, 4))]
    tx = optax.chain(gcx.clip_by_global_norm(1.0 / SHARES), optax.sgd(0.05 * SHARES))
    if scaled:
        tx = gcx.dynamic_loss_scale(tx, growth_interval=20)

    def step(carry, _):
        params, state = carry

        def share(params):
            value = loss_of(dtype, params, x, y) / SHARES
            return gcx.scale_loss(state, value) if scaled else value

        value, grads = jax.value_and_grad(share)(params)
        zeros = jnp.mean(jnp.concatenate([jnp.ravel(g == 0) for g in grads]))
        carry = gcx.apply_gradients(tx, grads, state, params, value=value)
        return carry, (SHARES * value, zeros)

    run = jax.jit(functools.partial(jax.lax.scan, step, length=STEPS))
    (_, state), (losses, zeros) = run((start, tx.init(start)))
    return losses, zeros.mean(), gcx.metrics(state).get("loss_scale", 1.0)


@pytest.mark.slow
def test_it_learns_what_float32_learns_where_plain_float16_does_not():
    kinds = {"float32": (jnp.float32, False), "float16": (jnp.float16, False)}
    kinds["scaled"] = jnp.float16, True
    found = {
        kind: [np.array(x) for x in zip(*(curve(*how, seed) for seed in SEEDS), strict=True)]
        for kind, how in kinds.items()
    }
    ends = {kind: losses[:, -1] for kind, (losses, _, _) in found.items()}
    for kind, (losses, zeros, scales) in found.items():
        print(kind, losses[:, 0].round(3), ends[kind].round(4), zeros.round(3), scales)
    assert np.abs(ends["scaled"] / ends["float32"] - 1).max() < 0.01
    assert (ends["float16"] / ends["float32"]).min() > 1.2
    assert found["float16"][1].mean() > 10 * found["scaled"][1].mean()
    assert found["scaled"][2].min() > 2.0**10
