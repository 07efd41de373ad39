"""Every clip is a drop-in under plain `optax.inject_hyperparams`: no default has to be static."""

import inspect

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import gradclip_jax as gcx

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones((2, 2))}
WITHOUT_NUMBERS = {"clip_by_group_norm", "record_norms", "round_stochastically", "u_clip"}


def is_clip(fun):
    returned = inspect.get_annotations(fun).get("return") if inspect.isfunction(fun) else None
    return returned is optax.GradientTransformation and fun.__name__ not in WITHOUT_NUMBERS


CLIPS = [
    getattr(module, name)
    for module in (gcx, gcx.contrib)
    for name in module.__all__
    if is_clip(getattr(module, name))
]


@pytest.mark.slow
@pytest.mark.parametrize("fun", CLIPS, ids=lambda fun: fun.__name__)
def test_a_clip_under_plain_inject_hyperparams_does_what_it_does_alone(fun):
    first = next(iter(inspect.signature(fun).parameters))
    plain, injected = fun(**{first: 0.5}), optax.inject_hyperparams(fun)(**{first: 0.5})
    state, injected_state = plain.init(GRADS), injected.init(GRADS)
    for scale in (1.0, 2.0):
        grads = jax.tree.map(lambda x, scale=scale: scale * x, GRADS)
        expected, state = plain.update(grads, state, GRADS)
        found, injected_state = jax.jit(injected.update)(grads, injected_state, GRADS)
        chex.assert_trees_all_close(found, expected, rtol=1e-5)
