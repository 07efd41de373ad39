"""Every clip is a drop-in under plain `optax.inject_hyperparams`: no default has to be static."""

import inspect

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from public import FUNCTIONS

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones((2, 2))}
# They take no number alone.
OTHERS = {"clip_by_group_norm", "round_stochastically"}
CLIPS = [
    function
    for name, function in FUNCTIONS.items()
    if inspect.signature(function, eval_str=True).return_annotation is optax.GradientTransformation
    and name not in OTHERS
]


@pytest.mark.slow
@pytest.mark.parametrize("fun", CLIPS, ids=lambda fun: fun.__name__)
def test_a_clip_under_plain_inject_hyperparams_does_what_it_does_alone(fun):
    first = next(iter(inspect.signature(fun).parameters))
    value = {first: 50.0 if first == "percentile" else 0.5}
    plain, injected = fun(**value), optax.inject_hyperparams(fun)(**value)
    state, injected_state = plain.init(GRADS), injected.init(GRADS)
    for scale in (1.0, 2.0):
        grads = jax.tree.map(lambda x, scale=scale: scale * x, GRADS)
        expected, state = plain.update(grads, state, GRADS)
        found, injected_state = jax.jit(injected.update)(grads, injected_state, GRADS)
        chex.assert_trees_all_close(found, expected, rtol=1e-5)
