"""`AccumulationConfig`: how to accumulate, as plain values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx


def emitted(config, grads):
    """The update and the state after a window."""
    tx = config.build(optax.identity())
    state, update = tx.init(grads[0]), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state)
    return updates, state


def test_config_defaults_to_the_mean_of_four_unclipped():
    config = gcx.AccumulationConfig()
    assert config.to_dict() == {
        "accumulation_steps": 4,
        "normalize": True,
        "max_grad_norm": None,
    }


@pytest.mark.parametrize(
    "config",
    [
        gcx.AccumulationConfig(),
        gcx.AccumulationConfig(accumulation_steps=8, normalize=False, max_grad_norm=0.5),
    ],
)
def test_config_round_trips_through_a_plain_dict(config):
    values = config.to_dict()
    assert all(type(v) in (int, bool, float, type(None)) for v in values.values())
    assert gcx.AccumulationConfig.from_dict(values) == config
    assert gcx.AccumulationConfig.from_dict({"accumulation_steps": 2}).accumulation_steps == 2


def test_config_is_frozen_and_hashable():
    config = gcx.AccumulationConfig()
    with pytest.raises(AttributeError, match="cannot assign to field"):
        config.accumulation_steps = 2
    assert len({config, gcx.AccumulationConfig()}) == 1


def test_effective_batch_size_is_micro_batch_size_times_steps():
    assert gcx.AccumulationConfig(accumulation_steps=8).effective_batch_size(16) == 128


@pytest.mark.parametrize(("normalize", "factor"), [(True, 0.5), (False, 1.0)])
def test_config_takes_the_mean_or_the_sum(normalize, factor):
    config = gcx.AccumulationConfig(accumulation_steps=2, normalize=normalize)
    updates, _ = emitted(config, [jnp.full(2, 1.0), jnp.full(2, 3.0)])
    np.testing.assert_array_equal(updates, jnp.full(2, 4.0 * factor))


def test_config_clips_the_accumulated_normalised_gradient():
    # Each micro-batch is far above the norm; their mean [0.3, 0.4] is not, and is left alone.
    config = gcx.AccumulationConfig(accumulation_steps=2, max_grad_norm=1.0)
    updates, state = emitted(config, [jnp.array([100.3, 0.4]), jnp.array([-99.7, 0.4])])
    # An eps of 100, where the two cancel.
    np.testing.assert_allclose(updates, [0.3, 0.4], atol=100 * 2.0**-23)
    np.testing.assert_allclose(gcx.metrics(state)["grad_norm"], 0.5, rtol=1e-4)
    updates, _ = emitted(config, [jnp.array([30.0, 40.0])] * 2)
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"accumulation_steps": 0},
            ValueError,
            "AccumulationConfig: `accumulation_steps` must be an integer >= 1, got 0. "
            "Pass 1 for every step.",
        ),
        (
            {"accumulation_steps": 2.0},
            TypeError,
            "AccumulationConfig: `accumulation_steps` must be an integer >= 1, got 2.0.",
        ),
        (
            {"normalize": 1},
            TypeError,
            "AccumulationConfig: `normalize` must be a bool, got 1. True takes the mean, "
            "False the sum.",
        ),
        (
            {"max_grad_norm": -1.0},
            ValueError,
            "AccumulationConfig: `max_grad_norm` must be a number > 0, got -1.0. "
            "Pass None not to clip.",
        ),
        (
            {"max_grad_norm": "1"},
            TypeError,
            "AccumulationConfig: `max_grad_norm` must be a number > 0, got '1'.",
        ),
    ],
)
def test_config_refuses_bad_values(values, error, message):
    with pytest.raises(error, match=re.escape(message)):
        gcx.AccumulationConfig(**values)


def test_config_refuses_keys_it_does_not_know():
    message = (
        "AccumulationConfig.from_dict: `values` must be a mapping with keys among "
        "accumulation_steps, normalize, max_grad_norm, got 'steps'. Take the key out."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        gcx.AccumulationConfig.from_dict({"steps": 4})


def test_config_refuses_a_micro_batch_of_nothing_and_what_is_no_optimizer():
    config = gcx.AccumulationConfig()
    message = "AccumulationConfig.effective_batch_size: `micro_batch_size` must be an integer >= 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        config.effective_batch_size(0)
    message = (
        "AccumulationConfig.build: `inner` must be an `optax.GradientTransformation`, got None"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        config.build(None)
