"""MaxText: `skip_spikes` in the place of its guard."""

import optax
from measures import after_a_nan

import gradclip_jax as gcx


def skip_step_on_spikes(inner_opt, interval, scaling_factor):
    warmup = max(2, interval // 2) - 1
    rule = gcx.thresholds.mean_std(scaling_factor, interval, warmup, ddof=1)
    tx = gcx.skip_spikes(inner_opt, norm=rule, loss=rule)

    def init(params):
        return {"guard": tx.init(params), "is_skipped": gcx.has_updated(tx.init(params))}

    def update(updates, state, params=None, *, grad_norm=None, **extra_args):
        updates, guard = tx.update(updates, state["guard"], params, **extra_args)
        return updates, {"guard": guard, "is_skipped": ~gcx.has_updated(guard)}

    return optax.GradientTransformationExtraArgs(init, update)


REPLACES = {"maxtext.optimizers.optimizers:skip_step_on_spikes": skip_step_on_spikes}
TESTS = [
    "tests/unit/optimizers_test.py::SkipStepOnSpikesTest",
    "tests/unit/train_nnx_test.py::TestSkipStepOnSpikesNNX",
]
PASSED = 3
DIFFERENCES = {
    "test_skip_step_on_grad_norm_spike": (
        "The guard measures the gradient that it receives. A norm that the caller computes, as this "
        "test's 100 for a gradient of 1, is not used: MaxText passes the norm after the clip."
    ),
    "test_no_skip_without_kwargs": "`skip_spikes` raises without the loss that it must check.",
}


def gain(part):
    return after_a_nan(part(optax.sgd(1.0), 128, 6.0), grad_norm=True)
