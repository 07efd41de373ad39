"""Bad calls and the error of each: its type, the function, the argument and the leaf that it names.

The wording of errors is free to change. Every public function has a row.
"""

import inspect
import math
import operator

import jax
import jax.numpy as jnp
import optax
import pytest

import gradclip_jax as gcx

SGD = optax.sgd(0.1)
W = jnp.ones((2, 3))
GRADS = {"w": W, "b": jnp.ones(3)}
HALF = {"w": jnp.ones((2, 3), jnp.float16), "b": jnp.ones(3)}
GROUP = gcx.granularities.group({"w": "a"})


def updated(tx, grads=GRADS):
    return tx.update(grads, tx.init(GRADS), GRADS)


def loss_of_one(params, example):
    return jnp.vdot(params, example)


# (public name, call, type of the error, argument, path of the leaf if there is one)
# fmt: off
ROWS = [
    ("global_norm", lambda f: f(["a"]), TypeError, "tree", "tree[0]"),
    ("global_norm", lambda f: f({"n": jnp.arange(3)}), TypeError, "tree", "tree['n']"),
    ("global_norm", lambda f: f(GRADS, ord=0), ValueError, "ord"),
    ("global_norm", lambda f: f(GRADS, axis_name="data"), ValueError, "axis_name"),
    ("leaf_norms", lambda f: f({"x": "a"}), TypeError, "tree", "tree['x']"),
    ("leaf_norms", lambda f: f(GRADS, ord="2"), TypeError, "ord"),
    ("leaf_norms", lambda f: f(GRADS, axis_name="data"), ValueError, "axis_name"),
    ("clip_grad_norm", lambda f: f(["a"], 1.0), TypeError, "grads", "grads[0]"),
    ("clip_grad_norm", lambda f: f(1.0, GRADS), TypeError, "max_norm"),
    ("clip_grad_norm", lambda f: f(GRADS, None), TypeError, "max_norm"),
    ("clip_grad_norm", lambda f: f(GRADS, 1.0, axis_name="data"), ValueError, "axis_name"),
    ("clip_grad_value", lambda f: f(["a"], 1.0), TypeError, "grads", "grads[0]"),
    ("clip_grad_value", lambda f: f(GRADS, -1.0), ValueError, "max_value"),
    ("clip_cotangent", lambda f: f("x", 1.0), TypeError, "x"),
    ("clip_cotangent", lambda f: f(1.0, W), TypeError, "max_norm"),
    ("qk_clip", lambda f: f(W, W, jnp.ones(2), -1.0), ValueError, "threshold"),
    ("qk_clip", lambda f: f(W, W, [1.0, 2.0], 1.0), TypeError, "max_logits"),
    ("qk_clip_mla", lambda f: f(W, W, W, jnp.ones(2), -1.0), ValueError, "threshold"),
    ("clip_by_norm", lambda f: f(-1.0), ValueError, "threshold"),
    ("clip_by_norm", lambda f: f(1.0, granularity=GRADS), ValueError, "granularity"),
    ("clip_by_norm", lambda f: f(1.0, reaction=GRADS), TypeError, "reaction"),
    ("clip_by_norm", lambda f: updated(f({"a": 1.0}, granularity=GROUP)), TypeError, "param_labels", "updates['b']"),
    ("clip_by_norm", lambda f: f(None), TypeError, "threshold"),
    ("clip_by_global_norm", lambda f: f(-1.0), ValueError, "max_norm"),
    ("clip_by_global_norm", lambda f: f(W), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: updated(f(1.0), ["a"]), TypeError, "updates", "updates[0]"),
    ("clip_by_global_norm", lambda f: f(1.0, nonfinite="skip"), ValueError, "nonfinite"),
    ("clip_by_global_norm", lambda f: f(1.0, axis_name=GRADS), TypeError, "axis_name"),
    ("clip_by_global_norm", lambda f: updated(f(lambda step: "1")), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: updated(f(lambda step: jnp.ones(3))), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: updated(f(lambda step: None)), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: updated(f(lambda step: 1j)), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: updated(f(1.0, axis_name="data")), ValueError, "axis_name"),
    ("clip_by_global_norm", lambda f: f(gcx.thresholds.zscore), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: f(None), TypeError, "max_norm"),
    ("clip_by_leaf_norm", lambda f: f(math.nan), ValueError, "max_norm"),
    ("clip_by_leaf_norm", lambda f: f(1.0, ord=GRADS), TypeError, "ord"),
    ("clip_by_leaf_norm", lambda f: f(gcx.thresholds.percentile), TypeError, "max_norm"),
    ("clip_by_leaf_norm", lambda f: f(1.0, num_layer_axes=-1), ValueError, "num_layer_axes"),
    ("clip_by_leaf_norm", lambda f: f(None), TypeError, "max_norm"),
    ("clip_by_group_norm", lambda f: f({"a": -1.0}, {"w": "a", "b": "b"}), ValueError, "max_norms", "['a']"),
    ("clip_by_group_norm", lambda f: updated(f({"a": 1.0}, {"w": "a"})), TypeError, "param_labels", "updates['b']"),
    ("clip_by_block_rms", lambda f: f(0.0), ValueError, "threshold"),
    ("clip_by_block_rms", lambda f: f(None), TypeError, "threshold"),
    ("adaptive_grad_clip", lambda f: f(None), TypeError, "clipping"),
    ("adaptive_grad_clip", lambda f: f(0.1, axis=[0, [1]]), TypeError, "axis"),
    ("adaptive_grad_clip", lambda f: f(0.1).update(GRADS, f(0.1).init(GRADS), None), ValueError, "params"),
    ("zero_large_norm", lambda f: f(-2.0), ValueError, "max_norm"),
    ("zero_large_norm", lambda f: f(None), TypeError, "max_norm"),
    ("clip", lambda f: f(-1.0), ValueError, "max_delta"),
    ("clip_by_value", lambda f: f(GRADS), TypeError, "max_value"),
    ("clip_by_value", lambda f: updated(f(1.0), ["a"]), TypeError, "updates", "updates[0]"),
    ("autoclip", lambda f: f(GRADS), TypeError, "percentile"),
    ("autoclip", lambda f: f(window=0), ValueError, "window"),
    ("zclip", lambda f: f("2.5"), TypeError, "z_threshold"),
    ("adagc", lambda f: f(warmup_steps=-1), ValueError, "warmup_steps"),
    ("quantile_clip", lambda f: f(1.5), ValueError, "target"),
    ("contrib.u_clip", lambda f: f(gcx.clip_by_global_norm), TypeError, "clip"),
    ("contrib.acclip", lambda f: f(1.0), ValueError, "b1"),
    ("contrib.spam_clip", lambda f: f(reset_every=0), ValueError, "reset_every"),
    ("contrib.stable_spam_clip", lambda f: f(1.0), ValueError, "max_decay"),
    ("contrib.stable_adamw", lambda f: f("0.1"), TypeError, "learning_rate"),
    ("accumulate_gradients", lambda f: f(2, SGD), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(SGD, GRADS), TypeError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, 0), ValueError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, 2, reduction="median"), ValueError, "reduction"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype=W), TypeError, "accumulator_dtype"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype={"w": jnp.int8, "b": "f4"}), TypeError, "accumulator_dtype", "['w']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2, accumulator_dtype={"w": jnp.bfloat16})), TypeError, "accumulator_dtype", "params['b']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2, accumulator_dtype=lambda path: path)), TypeError, "accumulator_dtype", "params['b']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2), ["a"]), TypeError, "updates", "updates[0]"),
    ("round_stochastically", lambda f: f(-1), ValueError, "seed"),
    ("round_stochastically", lambda f: f().update(GRADS, f().init(GRADS)), ValueError, "params"),
    ("round_stochastically", lambda f: f().update(GRADS, f().init(GRADS), HALF), TypeError, "params", "params['w']"),
    ("apply_gradients", lambda f: f(GRADS, SGD, GRADS, GRADS), TypeError, "tx"),
    ("skip_nonfinite", lambda f: gcx.apply_gradients(f(SGD), ["a"], (), GRADS), TypeError, "updates", "updates[0]"),
    ("skip_nonfinite", lambda f: f(optax.adam), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(GRADS), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(SGD, check="all"), ValueError, "check"),
    ("skip_nonfinite", lambda f: updated(f(SGD, axis_name="data")), ValueError, "axis_name"),
    ("microbatched_value_and_grad", lambda f: f(GRADS, 2), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 0), ValueError, "num_microbatches"),
    ("flush", lambda f: f(GRADS, SGD, GRADS), TypeError, "tx"),
    ("flush", lambda f: f(SGD, SGD.init(GRADS), GRADS), TypeError, "state"),
    ("reset_accumulation", lambda f: f(SGD.init(GRADS)), TypeError, "state"),
    ("has_updated", lambda f: f(gcx.accumulate_gradients(SGD, 2)), TypeError, "state"),
    ("combine_norms", lambda f: f([3]), TypeError, "norms", "norms[0]"),
    ("accumulated_gradients", lambda f: f(GRADS), TypeError, "state"),
    ("skip_large_norm", lambda f: f(SGD, None), TypeError, "max_norm"),
    ("skip_large_norm", lambda f: updated(f(SGD, lambda step: "1")), TypeError, "max_norm"),
    ("skip_large_norm", lambda f: f(SGD, gcx.thresholds.mean_std), TypeError, "max_norm"),
    ("skip_spikes", lambda f: f(SGD), ValueError, "norm"),
    ("dynamic_loss_scale", lambda f: f(SGD, init_scale=0), ValueError, "init_scale"),
    ("scale_loss", lambda f: f(GRADS, GRADS), TypeError, "state"),
    ("metrics", lambda f: f(gcx.clip_by_global_norm(1.0)), TypeError, "state"),
    ("metrics", lambda f: f(optax.MultiSteps(SGD, 2)), TypeError, "state"),
    ("record_norms", lambda f: f(W), TypeError, "window"),
    ("record_norms", lambda f: updated(f(4), ["a"]), TypeError, "updates", "updates[0]"),
    ("record_norms", lambda f: updated(f(4, axis_name="data")), ValueError, "axis_name"),
    ("convert_state", lambda f: f(GRADS, SGD, GRADS), TypeError, "tx"),
    ("convert_state", lambda f: f(SGD, gcx.skip_nonfinite(optax.adam(0.1)).init(GRADS), GRADS), TypeError, "state"),
    ("diagnostics.accumulation_stats", lambda f: f(None), TypeError, "state"),
    ("diagnostics.nonfinite_leaves", lambda f: jax.jit(f)(GRADS), TypeError, "tree"),
    ("diagnostics.norm_history", lambda f: f(gcx.record_norms()), TypeError, "state"),
    ("diagnostics.suggest_max_norm", lambda f: f({"a": 1.0}), TypeError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f(gcx.record_norms(2).init(GRADS)), TypeError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f("abc"), TypeError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f([1.0], 101), ValueError, "percentile"),
    ("configs.TransformConfig", lambda f: f("clip_by_value", {"max_value": W}), TypeError, "arguments"),
    ("configs.AccumulationConfig", lambda f: f(0), ValueError, "accumulation_steps"),
    ("configs.AccumulationConfig", lambda f: f(normalize=1), ValueError, "normalize"),
    ("granularities.axis", lambda f: f("0"), TypeError, "axis"),
    ("thresholds.capped", lambda f: f(1.0, -1.0), ValueError, "max_threshold"),
    ("thresholds.ema", lambda f: f(decay=1.0), ValueError, "decay"),
    ("thresholds.mean_std", lambda f: f(window=0), ValueError, "window"),
    ("thresholds.percentile", lambda f: f(101), ValueError, "percentile"),
    ("thresholds.quantile", lambda f: f(-0.1), ValueError, "target"),
    ("thresholds.relative_to_params", lambda f: f("a"), TypeError, "ratio"),
    ("thresholds.zscore", lambda f: f(GRADS), TypeError, "z_threshold"),
    ("watch", lambda f: f(SGD, of=("gradients",)), ValueError, "of"),
    ("incidents", lambda f: f(GRADS), TypeError, "state"),
    ("diagnostics.unit_names", lambda f: f(GRADS), TypeError, "state"),
    ("diagnostics.plot_log", lambda f: f([]), ValueError, "log"),
    ("diagnostics.summarize_log", lambda f: f(3), ValueError, "log"),
    ("diagnostics.worst_examples", lambda f: f(loss_of_one, GRADS, jnp.ones(3), 0), ValueError, "k"),
    ("diagnostics.leaf_norm_history", lambda f: f(gcx.record_norms(4).init(GRADS), GRADS), ValueError, "state"),
    ("per_example.value_and_grad", lambda f: f(GRADS, 1.0), TypeError, "fun"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, -1.0), ValueError, "max_norm"),
    ("per_example.norms", lambda f: f(GRADS), TypeError, "fun"),
    ("per_example.leaf_norms", lambda f: f(GRADS), TypeError, "fun"),
    ("per_example.explain", lambda f: f(GRADS), TypeError, "fun"),
    ("per_example.sensitivity", lambda f: f(1.0, "both"), ValueError, "adjacency"),
    ("per_example.noisy_mean", lambda f: f(-1.0, 1.0, 8.0, 0), ValueError, "noise_multiplier"),
    ("per_example.noise_scale", lambda f: f(jnp.ones((2, 2)), GRADS), ValueError, "norms"),
    ("granularities.layer", lambda f: f(-1), ValueError, "num_layer_axes"),
    ("granularities.layer", lambda f: f(1.5), TypeError, "num_layer_axes"),
]
# fmt: on

# Nothing can be wrong about their arguments, or a type checker says it.
WITHOUT = {
    "diagnostics.AccumulationStats",
    "diagnostics.Incident",
    "granularities.Granularity",
    "granularities.group",  # its labels are checked against a tree: see `clip_by_norm`
    "per_example.LeafCost",
    "per_example.Stats",
    "thresholds.Rule",
}


def public_names():
    names = set()
    for name in gcx.__all__:
        value = getattr(gcx, name)
        inside = getattr(value, "__all__", None)
        names |= {f"{name}.{x}" for x in inside} if inspect.ismodule(value) else {name}
    return names


def test_every_public_function_has_a_row():
    assert public_names() - WITHOUT == {name for name, *_ in ROWS}


@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)])
def test_a_bad_call_names_the_function_and_the_argument(row):
    name, call, error, argument, *path = row
    with pytest.raises(error) as caught:
        call(operator.attrgetter(name)(gcx))
    function, _, rest = str(caught.value).partition(": ")
    assert function == name.split(".")[-1]
    assert rest.startswith(f"`{argument}") or f"of `{argument}`" in rest
    assert all(one in rest for one in path)
    assert " must be " in rest and ", got " in rest and len(rest) < 400
