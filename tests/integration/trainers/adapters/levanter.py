"""levanter: `skip_spikes` in the place of its guard, `SkipStepConfig.wrap`.

A checkpoint of a run without the guard is restored with `convert_state`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from measures import after_a_nan

import gradclip_jax as gcx


class SkipStepState(NamedTuple):
    guard: Any
    window = property(lambda self: self.guard.inner_guards[0].rule_state.rules["loss"]["mean_std"])
    inner_opt_state = property(lambda self: self.guard.inner_state)
    losses = property(lambda self: self.recorded("loss"))
    grad_norms = property(lambda self: self.recorded("norm"))
    count = property(lambda self: jnp.minimum(self.window.value_count, len(self.window.values)))
    current_idx = property(lambda self: self.window.value_count % len(self.window.values))

    def recorded(self, name):
        values, count = self.guard.inner_guards[0].rule_state.rules[name]["mean_std"]
        return jnp.roll(jnp.where(values < jnp.finfo(values.dtype).max, values, 0), count)


def wrap(self, inner_optimizer):
    warmup = max(2, self.rolling_interval_length // 2)
    rule = gcx.thresholds.mean_std(self.sigma_factor, self.rolling_interval_length, warmup)
    tx = gcx.skip_spikes(inner_optimizer, norm=rule, loss=rule)

    def update(updates, state, params=None, **extra_args):
        updates, guard = tx.update(updates, state.guard, params, **extra_args)
        return updates, SkipStepState(guard)

    return optax.GradientTransformationExtraArgs(lambda p: SkipStepState(tx.init(p)), update)


REPLACES = {
    "levanter.optim.skipstep:SkipStepState": SkipStepState,
    "levanter.optim.skipstep:SkipStepConfig.wrap": wrap,
}
TESTS = ["tests/test_skip_step.py"]
PASSED = 9
DIFFERENCES = {
    "test_update_fn_circular_buffer_and_count_cap": "`mean_std` does not record a loss of 0.",
    "test_skip_step_update_fn_loss_kwarg_requirement": (
        "`skip_spikes` raises a TypeError with another text without the loss that it must check."
    ),
}


def gain(part):
    from levanter.optim.skipstep import SkipStepConfig

    return after_a_nan(part(SkipStepConfig(), optax.sgd(1.0))) if part.__name__ == "wrap" else ""
