"""levanter: `skip_spikes` in the place of its skip of bad steps."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import levanter.optim
import optax
from levanter.optim.config import AdamConfig

import gradclip_jax as gcx

levanter.optim.AdamConfig = AdamConfig  # where the tests of September 2025 import it from

class SkipStepState(NamedTuple):
    guard: Any
    inner_opt_state = property(lambda self: self.guard.inner_state)
    losses = property(lambda self: self.recorded("loss"))
    grad_norms = property(lambda self: self.recorded("norm"))
    count = property(lambda self: jnp.minimum(self.rule("loss").value_count, len(self.losses)))
    current_idx = property(lambda self: self.rule("loss").value_count % len(self.losses))

    def rule(self, name):
        return self.guard.guards[0].rule_state.rules[name]

    def recorded(self, name):
        values, count = self.rule(name)
        return jnp.roll(jnp.where(values < 1e37, values, 0), count)


def wrap(self, inner):
    length = self.rolling_interval_length
    rule = gcx.thresholds.mean_std(self.sigma_factor, length, max(2, length // 2))
    tx = gcx.skip_spikes(inner, norm=rule, loss=rule)

    def update(updates, state, params=None, **extra_args):
        updates, guard = tx.update(updates, state.guard, params, **extra_args)
        return updates, SkipStepState(guard)

    return optax.GradientTransformationExtraArgs(lambda p: SkipStepState(tx.init(p)), update)


REPLACES = {
    "levanter.optim.skipstep:SkipStepConfig.wrap": wrap,
    "levanter.optim.skipstep:SkipStepState": SkipStepState,
}
TESTS = ["tests/test_skip_step.py"]
PASSED = 8
DIFFERENCES = {
    "test_skip_step_update_fn_loss_kwarg_requirement": "The missing loss is a TypeError.",
    "test_skip_step_state_serialization_can_load_non_skip": (
        "`convert_state` takes over a checkpoint of an unguarded run."
    ),
}
