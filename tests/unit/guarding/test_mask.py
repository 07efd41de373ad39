"""Guards of models with frozen parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

PARAMS = {"t": jnp.ones(2), "f": {"a": jnp.ones(2), "b": jnp.ones(1)}}
TRAINED = {"t": True, "f": False}


@pytest.mark.parametrize(
    "guard",
    [
        functools.partial(gcx.skip_spikes, norm=10.0),
        lambda inner, **options: gcx.skip_if(
            inner, lambda g, p, **_: g["f"]["b"][0] != 0, **options
        ),
        lambda inner, **options: gcx.skip_nonfinite(gcx.accumulate_gradients(inner, 1), **options),
        functools.partial(gcx.dynamic_loss_scale, init_scale=1.0),
    ],
    ids=["spikes", "if", "accumulation", "scale"],
)
@pytest.mark.sampled
def test_frozen_leaves_are_not_checked_and_reach_the_inner_transformation_as_zeros(guard):
    clip = gcx.clip_by_global_norm(2.0)  # a NaN or a large norm would come in through it
    tx = guard(optax.chain(clip, optax.sgd(1.0, momentum=0.5)), trainable=TRAINED)
    state = tx.init(PARAMS)
    for bad in (np.nan, 1e3):
        grads = {"t": jnp.array([0.6, 0.8]), "f": optax.tree.scale(bad, PARAMS["f"])}
        updates, after = jax.jit(tx.update)(grads, state, PARAMS)
        np.testing.assert_allclose(updates["t"], [-0.6, -0.8], rtol=1e-6)
        assert not any(x.any() for x in jax.tree.leaves(updates["f"]))
        assert after.consecutive_skips == 0 and abs(after.grad_norm - 1.0) < 1e-6


def test_the_step_of_frozen_leaves_is_not_checked():
    def update(updates, state, params=None):
        bad = {"t": updates["t"], "f": jax.tree.map(lambda x: x * jnp.nan, updates["f"])}
        return bad, bad

    inner = optax.GradientTransformation(lambda params: params, update)
    guard = functools.partial(gcx.skip_nonfinite, check="step")
    for tx, skips in ((guard(inner, trainable=TRAINED), 0), (guard(inner), 1)):
        _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
        assert gcx.metrics(state)["skipped_nonfinite"] == skips


ONLY_ADAM = {
    "spike": (lambda grads, params, **_: gcx.global_norm(grads["adam"]) > 2.0, 100.0),
    "nonfinite": (lambda grads, params, **_: ~jnp.isfinite(gcx.global_norm(grads["adam"])), np.inf),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ONLY_ADAM)
@pytest.mark.sampled
def test_skip_if_checks_some_of_the_trained_leaves_in_one_line_and_the_others_train(name, every):
    predicate, bad = ONLY_ADAM[name]
    params = {"adam": jnp.ones(2), "muon": jnp.ones((2, 2))}
    tx = gcx.skip_if(gcx.accumulate_gradients(optax.sgd(1.0), every), predicate)
    state, update = tx.init(params), jax.jit(tx.update)
    for adam, muon, skips in ((1.0, bad, 0), (bad, 1.0, 1)):
        grads = {"adam": jnp.full(2, adam), "muon": jnp.full((2, 2), muon)}
        for _ in range(every):
            updates, state = update(grads, state, params)
        applied = {"adam": -1.0, "muon": -muon} if not skips else {"adam": 0.0, "muon": 0.0}
        for leaf, expected in applied.items():
            np.testing.assert_array_equal(updates[leaf], np.full_like(params[leaf], expected))
        assert gcx.metrics(state)["skipped_other"] == skips * every
