"""Every clip is a drop-in under plain `optax.inject_hyperparams`: no default has to be static."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones((2, 2))}
CLIPS = {
    "clip": {"max_delta": 1.0},
    "clip_by_value": {"max_value": 1.0},
    "clip_by_norm": {"threshold": 1.0},
    "clip_by_global_norm": {"max_norm": 1.0},
    "clip_by_leaf_norm": {"max_norm": 1.0},
    "clip_by_block_rms": {"threshold": 1.0},
    "zero_large_norm": {"max_norm": 1.0},
    "adaptive_grad_clip": {"clipping": 0.01},
    "autoclip": {"percentile": 10.0},
    "zclip": {"z_threshold": 2.5},
    "adagc": {"relative": 1.05},
    "quantile_clip": {"target": 0.5},
    "contrib.acclip": {},
    "contrib.spam_clip": {},
    "contrib.stable_spam_clip": {},
    "contrib.stable_adamw": {"learning_rate": 0.1},
}


def test_every_clip_with_numbers_as_arguments_is_listed():
    def is_clip(fun):
        parameters = inspect.signature(fun).parameters
        wraps = {"inner", "clip", "max_norms"} & set(parameters)
        made = inspect.get_annotations(fun).get("return")
        return (
            made is optax.GradientTransformation
            and not wraps
            and fun not in (gcx.record_norms, gcx.round_stochastically)
        )

    found = {
        name
        for name in gcx.__all__
        if inspect.isfunction(getattr(gcx, name)) and is_clip(getattr(gcx, name))
    }
    assert found == {name for name in CLIPS if "." not in name}


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_under_plain_inject_hyperparams_does_what_it_does_alone(name):
    fun = gcx
    for part in name.split("."):
        fun = getattr(fun, part)
    plain, injected = fun(**CLIPS[name]), optax.inject_hyperparams(fun)(**CLIPS[name])
    state, injected_state = plain.init(GRADS), injected.init(GRADS)
    for scale in (1.0, 2.0):
        grads = jax.tree.map(lambda x, scale=scale: scale * x, GRADS)
        want, state = plain.update(grads, state, GRADS)
        got, injected_state = jax.jit(injected.update)(grads, injected_state, GRADS)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)


def test_a_schedule_is_injected():
    tx = optax.inject_hyperparams(gcx.clip_by_global_norm)(max_norm=lambda step: 1.0 + step)
    state = tx.init(GRADS)
    norms = []
    for _ in range(3):
        updates, state = tx.update(GRADS, state)
        norms.append(float(gcx.global_norm(updates)))
    np.testing.assert_allclose(norms, [1.0, 2.0, 3.0], rtol=1e-5)
