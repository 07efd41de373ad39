"""One norm over experts, tensors and stages: docs/experts.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx
import hlo

needs_eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
SPECS = {"experts": P("expert"), "both": P("expert", "tensor"), "tensor": P("tensor"), "all": P()}
SHAPES = {"experts": (4, 6, 4), "both": (4, 8, 3), "tensor": (8, 4), "all": (7,)}
GRADS = {
    name: np.random.default_rng(i).normal(size=shape).astype(np.float32)
    for i, (name, shape) in enumerate(SHAPES.items())
}
EXACT = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in GRADS.values()))


def clip(grads):
    return gcx.clip_grad_norm(grads, 1.0)


def placed(kind):
    mesh = jax.make_mesh((4, 2), ("expert", "tensor"), axis_types=(kind,) * 2)
    return mesh, {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in GRADS.items()}


@needs_eight
@pytest.mark.slow
@pytest.mark.parametrize("how", ["jit", "explicit", "shard_map"])
def test_each_expert_counts_once_and_nothing_is_gathered(how):
    mesh, grads = placed(AxisType.Explicit if how == "explicit" else AxisType.Auto)
    function = clip
    if how == "shard_map":
        function = jax.shard_map(clip, mesh=mesh, in_specs=(SPECS,), out_specs=(SPECS, P()))
    with jax.set_mesh(mesh):
        step = jax.jit(function).lower(grads).compile()
    clipped, norm = step(grads)
    np.testing.assert_allclose(norm, EXACT, rtol=1e-6)
    for name, x in clipped.items():
        np.testing.assert_allclose(x, GRADS[name] / EXACT, rtol=1e-6, atol=1e-8)
    text = step.as_text()
    assert not any(hlo.count(text, op, branches=True) for op in MOVES)
    sizes = hlo.all_reduced(text)
    assert max(sizes) <= len(SPECS)  # scalars
    if how == "shard_map":
        assert sizes == [1]
    elif compat.VERSION >= (0, 10):
        assert len(sizes) <= 3  # experts; tensors; both


# --- an expert without tokens -----------------------------------------------------------------

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


@pytest.mark.slow
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
