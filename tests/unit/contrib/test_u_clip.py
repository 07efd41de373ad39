"""U-Clip: updates and carry sum to the gradients, and bad steps leave the carry as it was."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clip_cases
import gradclip_jax as gcx
import oracles

pytestmark = pytest.mark.slow

EPS = float(np.finfo(np.float32).eps)

CLIPS = {
    "value": gcx.clip(0.5),
    "global_norm": gcx.clip_by_global_norm(1.0),
    "agc": gcx.adaptive_grad_clip(0.2),
    "zclip": gcx.zclip(2.0, 0.9, warmup_steps=4),
    "spam": gcx.contrib.spam_clip(10.0, warmup_steps=3),
    "optax": optax.clip_by_global_norm(1.0),
}
each_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)


def gradients(steps=20, *, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal((steps, 1)))
    return {
        "a": jnp.asarray(scale[:, :, None] * rng.standard_normal((steps, 3, 2)), dtype),
        "b": jnp.asarray(scale * rng.standard_normal((steps, 4)), dtype),
    }


PARAMS = {"a": jnp.ones((3, 2)), "b": jnp.full((4,), 2.0)}


u_clip = functools.cache(gcx.contrib.u_clip)


def train(clip, grads):
    """The updates and states of all steps."""
    return clip_cases.train(u_clip(clip), grads, PARAMS)[:2]


def running_sum(tree):
    return jax.tree.map(lambda x: np.cumsum(np.asarray(x, np.float64), axis=0), tree)


def assert_nothing_lost(updates, carry, grads, *, steps):
    """Each step rounds `g + carry` and `g + carry - u`, by half an ulp each."""
    given = running_sum(grads)
    emitted = running_sum(updates)
    for name in given:
        owed = given[name] - emitted[name]
        largest = np.abs(given[name]).max() + np.abs(owed).max()
        error = np.abs(owed - np.asarray(carry[name], np.float64))
        assert error.max() <= steps * EPS * largest


@each_clip
def test_updates_and_carry_add_up_to_the_gradients_at_every_step(clip):
    grads = gradients()
    updates, state = train(clip, grads)
    assert_nothing_lost(updates, state.carry, grads, steps=20)
    assert any(np.abs(x[-1]).max() > 0 for x in jax.tree.leaves(state.carry))  # it clipped


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_rounding_cuts_off_is_carried_over_as_well(dtype):
    grads = gradients(dtype=dtype)
    updates, state = train(gcx.clip_by_global_norm(1.0), grads)
    assert updates["a"].dtype == dtype and state.carry["a"].dtype == jnp.float32
    assert_nothing_lost(updates, state.carry, grads, steps=20)


@pytest.mark.parametrize(
    ("clip", "exact"),
    [
        (gcx.clip(0.5), lambda x: np.clip(x, -0.5, 0.5)),
        (gcx.clip_by_leaf_norm(0.5), lambda x: oracles.clip_by_leaf_norm([x], 0.5)[0]),
    ],
    ids=["value", "norm"],
)
def test_gradient_and_carry_are_clipped_together_as_in_the_paper(clip, exact):
    grads = gradients(40, seed=1)
    updates, state = train(clip, grads)
    for name, grad in grads.items():
        before = np.roll(state.carry[name].astype(np.float64), 1, 0)
        before[0] = 0
        wanted = np.stack(list(map(exact, before + grad)))
        np.testing.assert_allclose(updates[name], wanted, atol=80 * EPS * np.abs(before).max())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["value", "global_norm", "zclip", "spam"])
def test_a_bad_step_leaves_the_carry_as_it_was(name, bad):
    grads = gradients()
    poisoned = grads | {"b": grads["b"].at[10, 2].set(bad)}
    updates, state = train(CLIPS[name], poisoned)
    for leaf in jax.tree.leaves(state.carry):
        assert np.isfinite(leaf).all()
        np.testing.assert_array_equal(leaf[10], leaf[9])
    for leaf in jax.tree.leaves(updates):
        assert np.isfinite(np.delete(leaf, 10, axis=0)).all()
    # But for that step nothing is lost.
    without = jax.tree.map(lambda x: np.delete(np.asarray(x), 10, axis=0), (updates, poisoned))
    rest = jax.tree.map(lambda x: np.delete(np.asarray(x), 10, axis=0), state.carry)
    assert_nothing_lost(without[0], rest, without[1], steps=20)


def test_a_bad_value_on_one_device_poisons_no_carry():
    clip = gcx.contrib.u_clip(gcx.clip_by_global_norm(1.0, axis_name="i"))

    def run(grads):
        state = clip.init(grads[0])
        for grad in grads:
            update, state = clip.update(grad, state)
        return update, state.carry

    grads = jnp.ones((8, 3, 4)).at[5, 1, 2].set(jnp.nan)
    update, carry = jax.pmap(run, axis_name="i")(grads)
    assert np.isfinite(update).all() and np.isfinite(carry).all()


def test_an_update_that_overflows_its_dtype_leaves_the_carry():
    clip = gcx.contrib.u_clip(gcx.clip_by_global_norm(7e4))
    state = clip.init(jnp.zeros(3, jnp.float16))
    for grad in ([6e4, 6e4, 6e4], [6e4, 0, 0], [0, 0, 0]):
        update, state = clip.update(jnp.asarray(grad, jnp.float16), state)
        assert np.isfinite(state.carry).all()
