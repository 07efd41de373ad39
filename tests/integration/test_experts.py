"""Experts without tokens: docs/experts.md. Norms over shards are in unit/clipping/test_sharding.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

pytestmark = pytest.mark.slow

EXPERTS, WIDTH = 4, 8
PARAMS = {
    "router": jnp.zeros((WIDTH, EXPERTS)),
    "up": jnp.asarray(np.random.default_rng(1).normal(size=(EXPERTS, WIDTH, WIDTH)), jnp.float32),
}
TOKENS = jnp.asarray(np.random.default_rng(2).normal(size=(12, WIDTH)), jnp.float32)
IDLE = 2
ROUTED = jnp.array([0, 1, 3] * 4)


def moe_loss(params, tokens):
    """A top-1 mixture: expert 2 gets no tokens."""
    gate = jax.nn.softmax(tokens @ params["router"])
    out = jnp.einsum("td,tdh->th", tokens, params["up"][ROUTED])
    weight = jnp.take_along_axis(gate, ROUTED[:, None], 1)
    return jnp.mean((weight * out) ** 2)


BY_EXPERT = {"router": 0, "up": 1}
IDLE_STEPS = {
    "global": lambda: gcx.clip_by_global_norm(0.1),
    "experts": lambda: gcx.clip_by_leaf_norm(0.1, num_layer_axes=BY_EXPERT),
    "group": lambda: gcx.clip_by_group_norm(
        {"experts": 0.1, "rest": 0.2}, {"router": "rest", "up": "experts"}
    ),
    "agc": lambda: gcx.adaptive_grad_clip(0.01),
    "autoclip": gcx.autoclip,
    "zclip": gcx.zclip,
    "adagc": gcx.adagc,
    "skip_nonfinite": lambda: gcx.skip_nonfinite(optax.adam(0.1)),
    "skip_large_norm": lambda: gcx.skip_large_norm(optax.adam(0.1), 100.0),
    "accumulate": lambda: gcx.accumulate_gradients(optax.adam(0.1), 2),
}


@functools.cache
def moe_gradient():
    return jax.jit(jax.grad(moe_loss))(PARAMS, TOKENS)


@pytest.mark.parametrize("make", IDLE_STEPS.values(), ids=IDLE_STEPS)
def test_expert_without_tokens_stays_as_it_is_and_hurts_no_other(make):
    grads, tx = moe_gradient(), make()
    assert not np.any(grads["up"][IDLE]) and np.all(np.any(grads["up"][ROUTED[:3]], axis=(1, 2)))
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(grads, state, PARAMS)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
        assert not np.any(updates["up"][IDLE])
    assert not any(np.isnan(x).any() for x in jax.tree.leaves(state))
