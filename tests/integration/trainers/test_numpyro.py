"""numpyro: SVI of a logistic regression."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from pairs import BATCHES, SPREAD, STEPS, STOP, Run, TrainerTests

import gradclip_jax as gcx

X = jax.device_put(BATCHES.reshape(-1, 4), SPREAD)
Y = jnp.asarray(X @ np.arange(4.0) > 0, float)


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


class TestNumpyro(TrainerTests):
    passes_loss = True

    def train(self, tx, first=0, last=STEPS, start=None):
        svi = SVI(model, AutoNormal(model), tx, Trace_ELBO())
        # A state of another SVI needs what this one knows of the model.
        svi.init(jax.random.key(0), X, Y)
        steps, key = last - first, jax.random.key(0)
        result = svi.run(key, steps, X, Y, init_state=start, progress_bar=False)
        return Run((result.params, result.losses[-1]), result.state, result.state)

    def restored(self, tx, folder):
        return self.train(tx, 0, STOP)  # storing the state, a pytree, is left to the user

    def converted(self, tx, half, folder):
        count, (params, opt_state) = half.optim_state
        opt_state = gcx.convert_state(tx, opt_state, params, reduction="mean")
        state = half._replace(optim_state=(count, (params, opt_state)))
        return state
