"""numpyro: SVI of a logistic regression."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from pairs import EVERY, NAMES, STEPS, STOP, check_same, of_optax, of_ours, on_all_devices

import gradclip_jax as gcx

rng = np.random.default_rng(0)
X = on_all_devices(rng.normal(size=(64, 5)).astype("float32"))
Y = jnp.asarray(X @ np.arange(5.0) > 0, float)


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def train(tx, steps=STEPS, state=None):
    svi = SVI(model, AutoNormal(model), tx, Trace_ELBO())
    # A state of another SVI needs what this one knows of the model.
    svi.init(jax.random.key(0), X, Y)
    return svi.run(jax.random.key(0), steps, X, Y, init_state=state, progress_bar=False)


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    theirs, ours = train(of_optax(name)), train(of_ours(name))
    check_same((ours.params, ours.losses), (theirs.params, theirs.losses))
    assert len(X.sharding.device_set) == jax.device_count()
    assert gcx.metrics(ours.state)["clip_factor"] < 1


def test_goes_on_in_mid_window():
    tx = of_ours("both")
    whole, half = train(tx), train(tx, STOP)
    assert gcx.metrics(half.state)["mini_step"] == STOP % EVERY
    rest = train(tx, STEPS - STOP, half.state)
    check_same(rest.params, whole.params, rtol=0, atol=0)


def test_a_run_of_optax_goes_on_with_ours():
    half = train(of_optax("accumulated"), STOP)
    tx = of_ours("both")
    count, (params, opt_state) = half.state.optim_state
    opt_state = gcx.convert_state(tx, opt_state, params, reduction="mean")
    state = half.state._replace(optim_state=(count, (params, opt_state)))
    rest = train(tx, STEPS - STOP, state)
    check_same(rest.params, train(of_optax("accumulated")).params)


def test_the_loss_reaches_the_guard():
    tx = gcx.skip_spikes(of_ours("alone"), loss=lambda step: 0.0)  # no loss is as small
    assert gcx.metrics(train(tx).state)["skipped_large_loss"] == STEPS
