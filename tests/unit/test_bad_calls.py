"""Bad calls and the error of each: its type, the function, the argument and the leaf that it names.

The wording of errors is free to change. Every public function has a row.
"""

import inspect
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
W = jnp.ones((2, 3))
GRADS = {"w": W, "b": jnp.ones(3)}
HALF = {"w": jnp.ones((2, 3), jnp.float16), "b": jnp.ones(3)}
COMPLEX = jnp.ones(3, jnp.complex64)
SIX_AXES = jnp.ones((2,) * 6)
MULTI_STEPS = optax.MultiSteps(SGD, 2).gradient_transformation()
EXAMPLES = jnp.ones((3, 2, 3))
LOSS_SCALE = gcx.dynamic_loss_scale(SGD).init(W)
GROUP = gcx.granularities.group({"w": "a"})


def ONES(*shape):
    return np.ones(shape, np.float32)


def updated(tx, grads=GRADS):
    return tx.update(grads, tx.init(GRADS), GRADS)


def step(tx, grads=W, params=W, **extra):
    return tx.update(grads, tx.init(params), params, **extra)


def loss_of_one(params, example):
    return jnp.vdot(jax.tree.leaves(params)[0], example)


def loss_of_all(params, batch):
    return jnp.sum(jax.tree.leaves(params)[0] * jax.tree.leaves(batch)[0])


def with_aux(aux_of):
    return lambda params, x: (params * jnp.sum(x), {"t": aux_of(x)})


# (public name, call, type of the error, argument, path of the leaf if there is one)
# fmt: off
ROWS = [
    ("global_norm", lambda f: f(["a"]), TypeError, "tree", "tree[0]"),
    ("global_norm", lambda f: f({"n": jnp.arange(3)}), TypeError, "tree", "tree['n']"),
    ("global_norm", lambda f: f(GRADS, axis_name="data"), ValueError, "axis_name"),
    ("global_norm", lambda f: f({"n": jnp.arange(3), "on": jnp.array(True)}), TypeError, "tree", "tree['n']", "tree['on']"),
    ("global_norm", lambda f: f([jnp.zeros((), int)] * 8), TypeError, "tree", "tree[4]"),
    ("global_norm", lambda f: jax.jit(lambda p: f(GRADS, ord=p))(2.0), TypeError, "ord"),
    ("global_norm", lambda f: f(GRADS, axis_name=3), TypeError, "axis_name"),
    ("global_norm", lambda f: f(GRADS, axis_name=[None]), TypeError, "axis_name"),
    ("leaf_norms", lambda f: f({"x": "a"}), TypeError, "tree", "tree['x']"),
    ("leaf_norms", lambda f: f(GRADS, axis_name="data"), ValueError, "axis_name"),
    ("clip_grad_norm", lambda f: f(["a"], 1.0), TypeError, "grads", "grads[0]"),
    ("clip_grad_norm", lambda f: f(1.0, GRADS), TypeError, "max_norm"),
    ("clip_grad_norm", lambda f: f(GRADS, None), TypeError, "max_norm"),
    ("clip_grad_norm", lambda f: f(GRADS, 1.0, axis_name="data"), ValueError, "axis_name"),
    ("clip_grad_norm", lambda f: f({"n": jnp.arange(3)}, 1.0), TypeError, "grads", "grads['n']"),
    ("clip_grad_norm", lambda f: f(GRADS, 1.0, norm=-1.0), ValueError, "norm"),
    ("clip_grad_norm", lambda f: f(GRADS, 1.0, norm="x"), TypeError, "norm"),
    ("clip_grad_value", lambda f: f(["a"], 1.0), TypeError, "grads", "grads[0]"),
    ("clip_grad_value", lambda f: f({"n": jnp.arange(3)}, 1.0), TypeError, "grads", "grads['n']"),
    ("clip_grad_value", lambda f: f({"z": COMPLEX}, 1.0), TypeError, "grads", "grads['z']"),
    ("clip_cotangent", lambda f: f("x", 1.0), TypeError, "x"),
    ("clip_cotangent", lambda f: f(1.0, W), TypeError, "max_norm"),
    ("clip_cotangent", lambda f: f(W, 1.0, nonfinite="skip"), ValueError, "nonfinite"),
    ("clip_cotangent", lambda f: f(W, 1.0, axis=2), ValueError, "axis"),
    ("clip_cotangent", lambda f: f(W, 1.0, axis=(0, -2)), ValueError, "axis"),
    ("clip_cotangent", lambda f: f(W, 1.0, axis=0.5), TypeError, "axis"),
    ("clip_cotangent", lambda f: f({"a": 1.0}, 1.0), TypeError, "x"),
    ("clip_cotangent", lambda f: f(jnp.arange(3), 1.0), TypeError, "x"),
    ("clip_cotangent", lambda f: f(W, 1.0, norm_probe=jnp.zeros(3)), ValueError, "norm_probe"),
    ("clip_cotangent", lambda f: f(W, 1.0, norm_probe=np.zeros(2, "float16")), TypeError, "norm_probe"),
    ("qk_clip", lambda f: f(W, W, jnp.ones(2), -1.0), ValueError, "threshold"),
    ("qk_clip", lambda f: f(W, W, [1.0, 2.0], 1.0), TypeError, "max_logits"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(2, 2), ONES(4, 1)), ValueError, "max_logits"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(2, 2), np.ones(4, int)), TypeError, "max_logits"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(3, 2), ONES(4)), ValueError, "key"),
    ("qk_clip", lambda f: f(ONES(4, 2), None, ONES(4)), ValueError, "key"),
    ("qk_clip", lambda f: f(ONES(2, 2), ONES(2, 2), ONES(4)), ValueError, "query"),
    ("qk_clip", lambda f: f(np.ones((4, 2), int), ONES(2, 2), ONES(4)), TypeError, "query"),
    ("qk_clip", lambda f: f({"a": ONES(4, 2), "b": ONES(2, 2)}, ONES(2, 2), ONES(4)), ValueError, "query", "query['b']"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(2, 2), ONES(4), head_axis=2), ValueError, "head_axis"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(2, 2), ONES(4), head_axis=0.5), ValueError, "head_axis"),
    ("qk_clip_mla", lambda f: f(W, W, W, jnp.ones(2), -1.0), ValueError, "threshold"),
    ("qk_clip_mla", lambda f: f(ONES(2, 2), ONES(4, 2), ONES(4, 2), ONES(4)), ValueError, "query"),
    ("qk_clip_mla", lambda f: f(ONES(4, 2), ONES(2, 2), ONES(4, 2), ONES(4)), ValueError, "key"),
    ("qk_clip_mla", lambda f: f(ONES(4, 2), ONES(4, 2), ONES(2, 2), ONES(4)), ValueError, "query_rotary"),
    ("clip_by_norm", lambda f: f(1.0, granularity=GRADS), ValueError, "granularity"),
    ("clip_by_norm", lambda f: f(1.0, reaction=GRADS), TypeError, "reaction"),
    ("clip_by_norm", lambda f: updated(f({"a": 1.0}, granularity=GROUP)), TypeError, "param_labels", "updates['b']"),
    ("clip_by_norm", lambda f: f(None), TypeError, "threshold"),
    ("clip_by_norm", lambda f: f(1.0, granularity="rows"), ValueError, "granularity"),
    ("clip_by_norm", lambda f: f(1.0, reaction="rows"), ValueError, "reaction"),
    ("clip_by_global_norm", lambda f: f(float), TypeError, "max_norm"),
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
    ("clip_by_global_norm", lambda f: f(lambda step: 1.0).update(GRADS, None), ValueError, "state"),
    ("clip_by_global_norm", lambda f: f(gcx.thresholds.zscore()).update(GRADS, None), ValueError, "state"),
    ("clip_by_global_norm", lambda f: f(gcx.thresholds.relative_to_params()).update(GRADS, None), ValueError, "params"),
    ("clip_by_leaf_norm", lambda f: f(1.0, ord=GRADS), TypeError, "ord"),
    ("clip_by_leaf_norm", lambda f: f(gcx.thresholds.percentile), TypeError, "max_norm"),
    ("clip_by_leaf_norm", lambda f: f(1.0, num_layer_axes=-1), ValueError, "num_layer_axes"),
    ("clip_by_leaf_norm", lambda f: f(None), TypeError, "max_norm"),
    ("clip_by_leaf_norm", lambda f: f(1.0, nonfinite="skip"), ValueError, "nonfinite"),
    ("clip_by_leaf_norm", lambda f: f(1.0, axis_name=3), TypeError, "axis_name"),
    ("clip_by_leaf_norm", lambda f: updated(f(1.0, num_layer_axes=2)), ValueError, "num_layer_axes", "updates['b']"),
    ("clip_by_leaf_norm", lambda f: updated(f(1.0, num_layer_axes={"x": 1})), TypeError, "num_layer_axes"),
    ("clip_by_leaf_norm", lambda f: f(1.0, num_layer_axes="1"), TypeError, "num_layer_axes"),
    ("clip_by_leaf_norm", lambda f: updated(f({"w": 1.0})), TypeError, "max_norm", "updates['b']"),
    ("clip_by_leaf_norm", lambda f: updated(f([1.0, 2.0])), TypeError, "max_norm", "updates['b']"),
    ("clip_by_leaf_norm", lambda f: updated(f({"w": {"v": 1.0}, "b": 1.0})), TypeError, "max_norm", "updates['w']"),
    ("clip_by_leaf_norm", lambda f: updated(f({"w": 1.0, "b": 1.0, "c": 1.0})), TypeError, "max_norm", "max_norm['c']"),
    ("clip_by_leaf_norm", lambda f: f({"enc": 1.0, "dec": [1.0, -1.0]}), ValueError, "max_norm", "['dec'][1]"),
    ("clip_by_group_norm", lambda f: f({"a": -1.0}, {"w": "a", "b": "b"}), ValueError, "max_norms", "['a']"),
    ("clip_by_group_norm", lambda f: updated(f({"a": 1.0}, {"w": "a"})), TypeError, "param_labels", "updates['b']"),
    ("clip_by_group_norm", lambda f: f({"a": 1.0}, "a", nonfinite="skip"), ValueError, "nonfinite"),
    ("clip_by_group_norm", lambda f: f({"a": 1.0}, "a", axis_name=3), TypeError, "axis_name"),
    ("clip_by_group_norm", lambda f: f({"a": 1.0}, "a", ord=0), ValueError, "ord"),
    ("clip_by_group_norm", lambda f: f(1.0, "a"), TypeError, "max_norms"),
    ("clip_by_group_norm", lambda f: f(None, "a"), TypeError, "max_norms"),
    ("clip_by_group_norm", lambda f: f({"a": 1.0, ("a", "b"): 2.0}, "a"), ValueError, "max_norms"),
    ("clip_by_group_norm", lambda f: f({("a", "a"): 1.0}, "a"), ValueError, "max_norms"),
    ("clip_by_group_norm", lambda f: f({1: 1.0, "1": 2.0}, "a"), ValueError, "max_norms"),
    ("clip_by_group_norm", lambda f: updated(f({"a": 1.0, "head": 1.0}, "a")), ValueError, "max_norms", "'head'"),
    ("clip_by_block_rms", lambda f: f(None), TypeError, "threshold"),
    ("clip_by_block_rms", lambda f: f(1.0, nonfinite="skip"), ValueError, "nonfinite"),
    ("clip_by_block_rms", lambda f: f(1.0, axis_name=3), TypeError, "axis_name"),
    ("adaptive_grad_clip", lambda f: f(None), TypeError, "clipping"),
    ("adaptive_grad_clip", lambda f: f(0.1, axis=[0, [1]]), TypeError, "axis"),
    ("adaptive_grad_clip", lambda f: f(0.1).update(GRADS, f(0.1).init(GRADS), None), ValueError, "params"),
    ("adaptive_grad_clip", lambda f: f(nonfinite="skip"), ValueError, "nonfinite"),
    ("adaptive_grad_clip", lambda f: f(axis=2).update({"w": W}, None, {"w": W}), ValueError, "axis", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f(axis=(0, -2)).update({"w": W}, None, {"w": W}), ValueError, "axis", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f().update(SIX_AXES, None, SIX_AXES), ValueError, "axis"),
    ("adaptive_grad_clip", lambda f: f(axis=1.5), TypeError, "axis"),
    ("adaptive_grad_clip", lambda f: f(axis=True), TypeError, "axis"),
    ("adaptive_grad_clip", lambda f: f().update(GRADS, None, {**GRADS, "w": ONES(2, 5)}), TypeError, "updates", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f().update(GRADS, None, {"b": GRADS["b"], "c": W}), TypeError, "updates", "updates['w']", "params['c']"),
    ("adaptive_grad_clip", lambda f: f().update(GRADS, None, {"b": GRADS["b"]}), TypeError, "updates", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f().update({"b": GRADS["b"]}, None, GRADS), TypeError, "updates", "params['w']"),
    ("zero_large_norm", lambda f: f(None), TypeError, "max_norm"),
    ("clip", lambda f: f(-1.0), ValueError, "max_delta"),
    ("clip_by_value", lambda f: f(GRADS), TypeError, "max_value"),
    ("clip_by_value", lambda f: updated(f(1.0), ["a"]), TypeError, "updates", "updates[0]"),
    ("clip_by_value", lambda f: updated(f(1.0), {"z": COMPLEX}), TypeError, "updates", "updates['z']"),
    ("clip_by_value", lambda f: f(1.0, min_value=1.0), ValueError, "min_value"),
    ("clip_by_value", lambda f: f(1.0, min_value=math.nan), ValueError, "min_value"),
    ("clip_by_value", lambda f: f(1.0, min_value="0"), TypeError, "min_value"),
    ("autoclip", lambda f: f(GRADS), TypeError, "percentile"),
    ("autoclip", lambda f: f(window=0), ValueError, "window"),
    ("autoclip", lambda f: optax.inject_hyperparams(f)(50.0, 8).init(W), TypeError, "window"),
    ("autoclip", lambda f: f().update(W, gcx.zclip().init(W)), TypeError, "state"),
    ("zclip", lambda f: f("2.5"), TypeError, "z_threshold"),
    ("zclip", lambda f: f(nonfinite="ignore"), ValueError, "nonfinite"),
    ("adagc", lambda f: f().update(W, None), ValueError, "state"),
    ("adagc", lambda f: f().update(W, {}), TypeError, "state"),
    ("adagc", lambda f: f().update(W, gcx.zclip().init(W)), TypeError, "state"),
    ("adagc", lambda f: f().update(W, (W, W)), TypeError, "state"),
    ("quantile_clip", lambda f: f(1.5), ValueError, "target"),
    ("contrib.u_clip", lambda f: f(gcx.clip_by_global_norm), TypeError, "clip"),
    ("contrib.u_clip", lambda f: f(1.0), TypeError, "clip"),
    ("contrib.u_clip", lambda f: f(gcx.clip(1.0)).update(W, None), ValueError, "state"),
    ("contrib.acclip", lambda f: updated(f(), {"w": W, "c": W}), TypeError, "updates", "updates['c']"),
    ("contrib.acclip", lambda f: f().update(W, None), ValueError, "state"),
    ("contrib.spam_clip", lambda f: f(warmup_steps=20, reset_every=20), ValueError, "reset_every"),
    ("contrib.spam_clip", lambda f: updated(f(), {"w": W, "c": W}), TypeError, "updates", "updates['c']"),
    ("contrib.spam_clip", lambda f: f().update(W, None), ValueError, "state"),
    ("contrib.stable_spam_clip", lambda f: f().update(W, None), ValueError, "state"),
    ("contrib.stable_adamw", lambda f: f(1e-3).update(W, None, W), ValueError, "state"),
    ("contrib.stable_adamw", lambda f: f(1e-3).update(W, f(1e-3).init(W)), ValueError, "params"),
    ("contrib.stable_adamw", lambda f: f(1e-3, weight_decay=-1.0), ValueError, "weight_decay"),
    ("accumulate_gradients", lambda f: f(2, SGD), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(SGD, GRADS), TypeError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, 0), ValueError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, int), TypeError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, 2, reduction="median"), ValueError, "reduction"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype=W), TypeError, "accumulator_dtype"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype={"w": jnp.int8, "b": "f4"}), TypeError, "accumulator_dtype", "['w']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2, accumulator_dtype={"w": jnp.bfloat16})), TypeError, "accumulator_dtype", "params['b']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2, accumulator_dtype=lambda path: path)), TypeError, "accumulator_dtype", "params['b']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2), ["a"]), TypeError, "updates", "updates[0]"),
    ("accumulate_gradients", lambda f: f("adam", 2), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(f(SGD, 2), 3).init(GRADS), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(optax.chain(gcx.clip(1.0), f(SGD, 2)), 3).init(GRADS), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(optax.MultiSteps(SGD, 2), 2).init(GRADS), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(MULTI_STEPS, 2).init(GRADS), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(optax.chain(MULTI_STEPS), 2).init(GRADS), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(SGD, 2**31), ValueError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, np.array([2])), TypeError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, lambda step: "8").init(GRADS), TypeError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, lambda step: jnp.ones(2)).init(GRADS), TypeError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, lambda step: 0).init(GRADS), ValueError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, lambda step: math.nan).init(GRADS), ValueError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, 2, reduction={"w": "mean", "b": "median"}), ValueError, "reduction", "['b']"),
    ("accumulate_gradients", lambda f: f(SGD, 2, rounding="up"), ValueError, "rounding"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype="float33"), TypeError, "accumulator_dtype"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype=jnp.complex64), TypeError, "accumulator_dtype"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2), {**GRADS, "w": ONES(3, 2)}), TypeError, "updates", "updates['w']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2), {"w": W}), TypeError, "updates", "params['b']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 1), {"w": W, "c": GRADS["b"]}), TypeError, "updates", "params['b']"),
    ("accumulate_gradients", lambda f: updated(f(SGD, 2), {**GRADS, "w": ONES(2, 3) > 0}), TypeError, "updates", "updates['w']"),
    ("accumulate_gradients", lambda f: f(SGD, 2).update({"a": [W]}, f(SGD, 2).init({"a": (W,)}), {"a": (W,)}), TypeError, "updates", "updates['a']"),
    ("accumulate_gradients", lambda f: f(SGD, 2).update(f(SGD, 2).init(W), W, W), TypeError, "updates"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), weight=ONES(2)), TypeError, "weight"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), weight=1j), TypeError, "weight"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), weight="3"), TypeError, "weight"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), weight=-1), ValueError, "weight"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), weight=math.nan), ValueError, "weight"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), flush="yes"), TypeError, "flush"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), flush=np.array([True])), TypeError, "flush"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), emit=jnp.array(True)), TypeError, "emit"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), emit=True, flush=False), TypeError, "flush"),
    ("round_stochastically", lambda f: f(-1), ValueError, "seed"),
    ("round_stochastically", lambda f: f().update(GRADS, f().init(GRADS)), ValueError, "params"),
    ("round_stochastically", lambda f: f().update(GRADS, f().init(GRADS), HALF), TypeError, "params", "params['w']"),
    ("apply_gradients", lambda f: f(GRADS, SGD, GRADS, GRADS), TypeError, "tx"),
    ("apply_gradients", lambda f: f("adam", W, (), W), TypeError, "tx"),
    ("skip_nonfinite", lambda f: gcx.apply_gradients(f(SGD), ["a"], (), GRADS), TypeError, "updates", "updates[0]"),
    ("skip_nonfinite", lambda f: f(optax.adam), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(GRADS), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(SGD, check="all"), ValueError, "check"),
    ("skip_nonfinite", lambda f: updated(f(SGD, axis_name="data")), ValueError, "axis_name"),
    ("skip_nonfinite", lambda f: f(SGD, max_consecutive_skips=0), ValueError, "max_consecutive_skips"),
    ("skip_nonfinite", lambda f: f(SGD, axis_name=3), TypeError, "axis_name"),
    ("skip_nonfinite", lambda f: f(SGD).update(W, W, W), TypeError, "state"),
    ("skip_nonfinite", lambda f: f(SGD).update(W, None, W), ValueError, "state"),
    ("skip_nonfinite", lambda f: step(f(SGD), value="x"), TypeError, "value"),
    ("skip_nonfinite", lambda f: step(f(SGD), value=1.0, loss=1.0), TypeError, "loss"),
    ("skip_nonfinite", lambda f: f(gcx.dynamic_loss_scale(SGD)).init(W), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(gcx.accumulate_gradients(gcx.dynamic_loss_scale(SGD), 2)).init(W), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(optax.chain(gcx.clip(1.0), gcx.dynamic_loss_scale(SGD))).init(W), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(optax.MultiSteps(SGD, 2), check="step").init(W), TypeError, "inner"),
    ("skip_nonfinite", lambda f: f(optax.chain(MULTI_STEPS), check="step").init(W), TypeError, "inner"),
    ("microbatched_value_and_grad", lambda f: f(GRADS, 2), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 0), ValueError, "num_microbatches"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 2.0), TypeError, "num_microbatches"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 4, num_real_microbatches=5), ValueError, "num_real_microbatches"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 4, num_real_microbatches=-1), ValueError, "num_real_microbatches"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 4, num_real_microbatches=True), TypeError, "num_real_microbatches"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 2, accumulator_dtype=jnp.int32), TypeError, "accumulator_dtype"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2, accumulator_dtype={"c": "f4"})({"b": 1.0}, ONES(4)), TypeError, "accumulator_dtype", "['b']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2, aux_reduction={"a": "maen"}), ValueError, "aux_reduction"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: 10), 2, has_aux=True)(1.0, ONES(4)), ValueError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: x.max() > 2), 2, has_aux=True)(1.0, ONES(4)), ValueError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: x[0]), 2, has_aux=True)(1.0, ONES(4, 3)), ValueError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(jnp.transpose), 2, has_aux=True)(1.0, ONES(4, 3)), ValueError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(jnp.squeeze), 4, has_aux=True)(1.0, ONES(4)), ValueError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: 10), 2, has_aux=True, aux_reduction="mean")(1.0, ONES(4)), TypeError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: 1j), 2, has_aux=True, aux_reduction="max")(1.0, ONES(4)), TypeError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(jnp.sum), 2, has_aux=True, aux_reduction="concatenate")(1.0, ONES(4)), TypeError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 4)(1.0, {"a": ONES(8), "b": ONES(9)}), ValueError, "batch", "args[1]['b']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 4)(1.0, {"n": jnp.int32(7)}), ValueError, "batch", "args[1]['n']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2)(1.0, x=ONES(4)), TypeError, "args"),
    ("microbatched_value_and_grad", lambda f: f(lambda p, x: p * x, 2)(1.0, ONES(4)), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(lambda p, x: (p, x), 2)(1.0, ONES(4)), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2, has_aux=True)(1.0, ONES(4)), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2, has_weight=True)(1.0, ONES(4)), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(lambda p, x: (p, x), 2, has_weight=True)(1.0, ONES(4)), TypeError, "weight"),
    ("flush", lambda f: f(GRADS, SGD, GRADS), TypeError, "tx"),
    ("flush", lambda f: f(SGD, SGD.init(GRADS), GRADS), TypeError, "state"),
    ("flush", lambda f: f(optax.sgd, gcx.accumulate_gradients(SGD, 2).init(W), W), TypeError, "tx"),
    ("reset_accumulation", lambda f: f(SGD.init(GRADS)), TypeError, "state"),
    ("has_updated", lambda f: f(gcx.accumulate_gradients(SGD, 2)), TypeError, "state"),
    ("combine_norms", lambda f: f([3]), TypeError, "norms", "norms[0]"),
    ("accumulated_gradients", lambda f: f(GRADS), TypeError, "state"),
    ("accumulated_gradients", lambda f: f(gcx.accumulate_gradients(SGD, 2).init(W)), ValueError, "state"),
    ("skip_large_norm", lambda f: f(SGD, None), TypeError, "max_norm"),
    ("skip_large_norm", lambda f: updated(f(SGD, lambda step: "1")), TypeError, "max_norm"),
    ("skip_large_norm", lambda f: f(SGD, gcx.thresholds.mean_std), TypeError, "max_norm"),
    ("skip_large_norm", lambda f: f(SGD, "big"), TypeError, "max_norm"),
    ("skip_large_norm", lambda f: f(SGD, 1.0, ord=0), ValueError, "ord"),
    ("skip_large_norm", lambda f: f(SGD, 1.0, max_consecutive_skips=2.5), TypeError, "max_consecutive_skips"),
    ("skip_large_norm", lambda f: f(SGD, 1.0, relearn_after=0), ValueError, "relearn_after"),
    ("skip_large_norm", lambda f: f(SGD, gcx.thresholds.relative_to_params()).update(W, f(SGD, gcx.thresholds.relative_to_params()).init(W)), ValueError, "params"),
    ("skip_large_norm", lambda f: f(gcx.dynamic_loss_scale(SGD), 1.0).init(W), TypeError, "inner"),
    ("skip_spikes", lambda f: f(SGD), ValueError, "norm"),
    ("skip_spikes", lambda f: f(SGD, loss=1.0).update(W, f(SGD, loss=1.0).init(W)), ValueError, "value"),
    ("skip_spikes", lambda f: f(SGD, loss=1.0).update(W, f(SGD, loss=1.0).init(W), value=ONES(3)), TypeError, "value"),
    ("skip_spikes", lambda f: f(SGD, loss="big"), TypeError, "loss"),
    ("skip_spikes", lambda f: f(SGD, loss=gcx.thresholds.relative_to_params()), ValueError, "loss"),
    ("skip_spikes", lambda f: f(gcx.dynamic_loss_scale(SGD), loss=1.0).init(W), TypeError, "inner"),
    ("dynamic_loss_scale", lambda f: f(SGD, init_scale=0), ValueError, "init_scale"),
    ("dynamic_loss_scale", lambda f: f(0.1), TypeError, "inner"),
    ("dynamic_loss_scale", lambda f: f(f(SGD)).init(W), TypeError, "inner"),
    ("dynamic_loss_scale", lambda f: f(SGD, init_scale=0.5), ValueError, "init_scale"),
    ("dynamic_loss_scale", lambda f: f(SGD, max_scale=np.inf), ValueError, "max_scale"),
    ("dynamic_loss_scale", lambda f: f(SGD, min_scale="1"), TypeError, "min_scale"),
    ("dynamic_loss_scale", lambda f: f(SGD, growth_factor=1.0), ValueError, "growth_factor"),
    ("dynamic_loss_scale", lambda f: f(SGD, backoff_factor=1.0), ValueError, "backoff_factor"),
    ("dynamic_loss_scale", lambda f: f(SGD, growth_interval=0), ValueError, "growth_interval"),
    ("dynamic_loss_scale", lambda f: f(SGD, check="loss"), ValueError, "check"),
    ("dynamic_loss_scale", lambda f: f(SGD).update(W, optax.EmptyState()), TypeError, "state"),
    ("scale_loss", lambda f: f(GRADS, GRADS), TypeError, "state"),
    ("scale_loss", lambda f: f((LOSS_SCALE, LOSS_SCALE), 1.0), TypeError, "state"),
    ("scale_loss", lambda f: f(LOSS_SCALE, jnp.int32(3)), TypeError, "loss"),
    ("metrics", lambda f: f(gcx.clip_by_global_norm(1.0)), TypeError, "state"),
    ("metrics", lambda f: f(optax.MultiSteps(SGD, 2)), TypeError, "state"),
    ("record_norms", lambda f: f(W), TypeError, "window"),
    ("record_norms", lambda f: updated(f(4), ["a"]), TypeError, "updates", "updates[0]"),
    ("record_norms", lambda f: updated(f(4, axis_name="data")), ValueError, "axis_name"),
    ("record_norms", lambda f: f(0), ValueError, "window"),
    ("record_norms", lambda f: f(2.0), TypeError, "window"),
    ("record_norms", lambda f: f(2**20 + 1), ValueError, "window"),
    ("record_norms", lambda f: f(ord=-1), ValueError, "ord"),
    ("record_norms", lambda f: f(axis_name=0), TypeError, "axis_name"),
    ("record_norms", lambda f: f().update(W, None), ValueError, "state"),
    ("convert_state", lambda f: f(GRADS, SGD, GRADS), TypeError, "tx"),
    ("convert_state", lambda f: f(SGD, gcx.skip_nonfinite(optax.adam(0.1)).init(GRADS), GRADS), TypeError, "state"),
    ("convert_state", lambda f: f(None, (), GRADS), TypeError, "tx"),
    ("convert_state", lambda f: f(SGD, (), GRADS, reduction="max"), ValueError, "reduction"),
    ("convert_state", lambda f: f(ADAM, optax.chain(ADAM, optax.trace(0.9)).init(W), W), TypeError, "state", "state[1]"),
    ("convert_state", lambda f: f(optax.chain(ADAM, optax.trace(0.9)), ADAM.init(W), W), TypeError, "state"),
    ("convert_state", lambda f: f(ADAM, optax.sgd(0.1, momentum=0.9).init(W), W), TypeError, "state", "state[0]"),
    ("convert_state", lambda f: f(ADAM, ADAM.init({**GRADS, "b": W}), GRADS), TypeError, "state", "state[0].mu['b']"),
    ("convert_state", lambda f: f(ADAM, optax.adam(0.1, mu_dtype=jnp.bfloat16).init(GRADS), GRADS), TypeError, "state", "state[0].mu['b']"),
    ("convert_state", lambda f: f(ADAM, {"0": {}, "1": {}}, W), TypeError, "state"),
    ("convert_state", lambda f: f(gcx.accumulate_gradients(SGD, 2), MULTI_STEPS.init({"w": W}), GRADS), TypeError, "state", "state.acc_grads"),
    ("convert_state", lambda f: f(SGD, MULTI_STEPS.update(W, MULTI_STEPS.init(W))[1], W), ValueError, "state", "state.mini_step"),
    ("convert_state", lambda f: f(MULTI_STEPS, step(gcx.accumulate_gradients(SGD, 2), weight=7.0)[1], W), ValueError, "state", "state.total_weight"),
    ("diagnostics.accumulation_stats", lambda f: f(None), TypeError, "state"),
    ("diagnostics.nonfinite_leaves", lambda f: jax.jit(f)(GRADS), TypeError, "tree"),
    ("diagnostics.norm_history", lambda f: f(gcx.record_norms()), TypeError, "state"),
    ("diagnostics.norm_history", lambda f: jax.jit(f)(gcx.record_norms().init(W)), TypeError, "state"),
    ("diagnostics.suggest_max_norm", lambda f: f({"a": 1.0}), TypeError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f(gcx.record_norms(2).init(GRADS)), TypeError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f("abc"), TypeError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f([1.0], 101), ValueError, "percentile"),
    ("diagnostics.suggest_max_norm", lambda f: f([]), ValueError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f([np.nan, np.inf]), ValueError, "norms"),
    ("diagnostics.suggest_max_norm", lambda f: f([1.0], "half"), TypeError, "percentile"),
    ("diagnostics.suggest_max_norm", lambda f: jax.jit(f)(ONES(2)), TypeError, "norms"),
    ("configs.TransformConfig", lambda f: f("clip_by_value", {"max_value": W}), TypeError, "arguments"),
    ("configs.AccumulationConfig", lambda f: f(0), ValueError, "accumulation_steps"),
    ("configs.AccumulationConfig", lambda f: f(normalize=1), ValueError, "normalize"),
    ("granularities.axis", lambda f: f("0"), TypeError, "axis"),
    ("thresholds.capped", lambda f: f(1.0, -1.0), ValueError, "max_threshold"),
    ("thresholds.capped", lambda f: f(-2.0, 1.0), ValueError, "rule"),
    ("thresholds.capped", lambda f: f("1", 1.0), TypeError, "rule"),
    ("thresholds.mean_std", lambda f: f(ddof=-1), ValueError, "ddof"),
    ("thresholds.percentile", lambda f: f(101), ValueError, "percentile"),
    ("thresholds.percentile", lambda f: f(window=2**27), ValueError, "window"),
    ("thresholds.quantile", lambda f: f(-0.1), ValueError, "target"),
    ("thresholds.quantile", lambda f: f(True), TypeError, "target"),
    ("thresholds.zscore", lambda f: f(GRADS), TypeError, "z_threshold"),
    ("thresholds.zscore", lambda f: f(z_threshold=10**400), ValueError, "z_threshold"),
    ("thresholds.zscore", lambda f: f(warmup_steps=10**5000), ValueError, "warmup_steps"),
    ("watch", lambda f: f(SGD, of=("gradients",)), ValueError, "of"),
    ("watch", lambda f: f(optax.sgd), TypeError, "inner"),
    ("watch", lambda f: f(SGD, spike_threshold=0), ValueError, "spike_threshold"),
    ("watch", lambda f: f(SGD, max_incidents=0), ValueError, "max_incidents"),
    ("watch", lambda f: f(SGD).update(GRADS, f(SGD).init(GRADS)), ValueError, "params"),
    ("watch", lambda f: step(f(SGD), GRADS, GRADS, value=ONES(2)), TypeError, "value"),
    ("watch", lambda f: step(f(SGD), GRADS, GRADS, value=1.0, loss=1.0), TypeError, "loss"),
    ("incidents", lambda f: f(GRADS), TypeError, "state"),
    ("incidents", lambda f: jax.jit(f)(gcx.watch(SGD).init(GRADS)), TypeError, "state"),
    ("diagnostics.unit_names", lambda f: f(GRADS), TypeError, "state"),
    ("diagnostics.plot_log", lambda f: f([]), ValueError, "log"),
    ("diagnostics.plot_log", lambda f: f([{"loss": 1.0}]), ValueError, "log"),
    ("diagnostics.summarize_log", lambda f: f(3), ValueError, "log"),
    ("diagnostics.summarize_log", lambda f: f([]), ValueError, "log"),
    ("diagnostics.worst_examples", lambda f: f(loss_of_one, GRADS, jnp.ones(3), 0), ValueError, "k"),
    ("diagnostics.leaf_norm_history", lambda f: f(gcx.record_norms(4).init(GRADS), GRADS), ValueError, "state"),
    ("per_example.value_and_grad", lambda f: f(GRADS, 1.0), TypeError, "fun"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, -1.0), ValueError, "max_norm"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, num_microbatches=4, num_real_microbatches=5), ValueError, "num_real_microbatches"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, lambda step: 1.0)(W, EXAMPLES), TypeError, "max_norm"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, reaction="halve"), ValueError, "reaction"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, reduction="max"), ValueError, "reduction"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, nonfinite="skip"), ValueError, "nonfinite"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, num_microbatches=0), ValueError, "num_microbatches"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, num_microbatches=2)(W, EXAMPLES), ValueError, "batch"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, param_labels="all"), TypeError, "max_norm"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, {"x": 1.0}, param_labels={"w": "x", "b": "y"})(GRADS, EXAMPLES), ValueError, "max_norm", "'y'"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, {"x": 1.0}, param_labels={"w": "x"})(GRADS, EXAMPLES), TypeError, "param_labels", "params['b']"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, argnums=1)(W, EXAMPLES), ValueError, "argnums"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, batch_argnums=2)(W, EXAMPLES), TypeError, "args"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, axis_name=3), TypeError, "axis_name"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, has_aux=True)(W, EXAMPLES), TypeError, "fun"),
    ("per_example.value_and_grad", lambda f: f(lambda p, x: (0.0, x), 1.0, has_weight=True)(W, EXAMPLES), TypeError, "fun"),
    ("per_example.value_and_grad", lambda f: f(lambda p, x: x, 1.0)(W, EXAMPLES), TypeError, "fun"),
    ("per_example.norms", lambda f: f(GRADS), TypeError, "fun"),
    ("per_example.norms", lambda f: f(lambda p, e: 0.0)(1.0, {"x": ONES(3, 2), "y": ONES(2)}), ValueError, "batch", "args[1]['x']", "args[1]['y']"),
    ("per_example.leaf_norms", lambda f: f(GRADS), TypeError, "fun"),
    ("per_example.explain", lambda f: f(GRADS), TypeError, "fun"),
    ("per_example.sensitivity", lambda f: f(1.0, "both"), ValueError, "adjacency"),
    ("per_example.sensitivity", lambda f: f(-1.0), ValueError, "max_norm"),
    ("per_example.noisy_mean", lambda f: f(-1.0, 1.0, 8.0, 0), ValueError, "noise_multiplier"),
    ("per_example.noisy_mean", lambda f: f(1.0, 0.0, 1, 0), ValueError, "sensitivity"),
    ("per_example.noisy_mean", lambda f: f(1.0, np.inf, 1, 0), ValueError, "sensitivity"),
    ("per_example.noisy_mean", lambda f: f(1.0, 1.0, 0, 0), ValueError, "expected_batch_size"),
    ("per_example.noise_scale", lambda f: f(jnp.ones((2, 2)), GRADS), ValueError, "norms"),
    ("per_example.noise_scale", lambda f: f(jnp.float32(1), 1.0), ValueError, "norms"),
    ("granularities.layer", lambda f: f(-1), ValueError, "num_layer_axes"),
    ("granularities.layer", lambda f: f(1.5), TypeError, "num_layer_axes"),
]
# fmt: on

# Numbers out of range, and values that are no numbers, for each kind of argument.
RANGES = {
    "positive": ([0, 0.0, -1.0, math.nan, -math.inf, np.float32(-1)], ["1", True, np.ones(3), 1j]),
    "decay": ([1.0, -0.1, math.nan], ["0.9", np.ones(2)]),
    "count": ([0, -1], [1.5, "1"]),
}
NUMBERS = {
    "positive": {
        "global_norm": ["ord"],
        "leaf_norms": ["ord"],
        "clip_grad_norm": ["max_norm"],
        "clip_grad_value": ["max_value"],
        "clip_cotangent": ["max_norm"],
        "qk_clip": ["threshold"],
        "clip_by_norm": ["threshold", "ord"],
        "clip_by_global_norm": ["max_norm", "ord"],
        "clip_by_leaf_norm": ["max_norm", "ord"],
        "clip_by_block_rms": ["threshold"],
        "clip_by_value": ["max_value"],
        "zero_large_norm": ["max_norm"],
        "adaptive_grad_clip": ["clipping", "eps"],
        "zclip": ["max_norm"],
        "adagc": ["relative", "absolute"],
        "contrib.acclip": ["alpha", "eps"],
        "contrib.spam_clip": ["spike_threshold"],
        "contrib.stable_spam_clip": ["eps"],
        "contrib.stable_adamw": ["learning_rate", "eps", "clipping"],
        "thresholds.mean_std": ["z_threshold"],
        "thresholds.zscore": ["z_threshold"],
        "thresholds.ema": ["factor", "warmup_max"],
        "thresholds.quantile": ["rate", "initial"],
        "thresholds.capped": ["max_threshold"],
        "thresholds.relative_to_params": ["ratio", "eps"],
    },
    "decay": {
        "contrib.acclip": ["b1", "b2"],
        "contrib.spam_clip": ["decay"],
        "contrib.stable_spam_clip": ["max_decay", "norm_decay", "square_decay"],
        "contrib.stable_adamw": ["b2"],
        "thresholds.zscore": ["decay"],
        "thresholds.ema": ["decay"],
        "accumulate_gradients": ["noise_scale_decay"],
    },
    "count": {
        "adagc": ["warmup_steps"],
        "accumulate_gradients": ["every"],
        "record_norms": ["window"],
        "contrib.spam_clip": ["warmup_steps", "reset_every"],
        "thresholds.percentile": ["window"],
        "thresholds.mean_std": ["window", "warmup_steps"],
        "thresholds.zscore": ["warmup_steps", "relearn_after"],
        "thresholds.ema": ["warmup_steps"],
    },
}
REQUIRED = {
    "accumulate_gradients": {"inner": SGD, "every": 2},
    "global_norm": {"tree": GRADS},
    "leaf_norms": {"tree": GRADS},
    "clip_grad_norm": {"grads": GRADS},
    "clip_grad_value": {"grads": GRADS},
    "clip_cotangent": {"x": W},
    "qk_clip": {"query": W, "key": W, "max_logits": jnp.ones(3)},
    "clip_by_norm": {"threshold": 1.0},
    "clip_by_global_norm": {"max_norm": 1.0},
    "clip_by_leaf_norm": {"max_norm": 1.0},
    "contrib.stable_adamw": {"learning_rate": 1.0},
    "thresholds.capped": {"rule": 1.0},
}
each_number = [
    (name, argument, kind)
    for kind, arguments in NUMBERS.items()
    for name, listed in arguments.items()
    for argument in listed
]

# Nothing can be wrong about their arguments, or a type checker says it.
WITHOUT = {
    "taps.FirstNonfinite",
    *(f"taps.{name}" for name in ("first_nonfinite", "first_nonfinite_index", "metrics", "names")),
    *(f"taps.{name}" for name in ("make_probes", "tap")),  # in test_taps.py
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
    listed = {name for name, *_ in (*ROWS, *each_number)}
    assert public_names() - WITHOUT == listed


@pytest.mark.parametrize(("name", "argument", "kind"), each_number)
def test_a_number_out_of_range_and_a_value_that_is_no_number_raise(name, argument, kind):
    function = operator.attrgetter(name)(gcx)
    for values, error in zip(RANGES[kind], (ValueError, TypeError), strict=True):
        for value in values:
            with pytest.raises(error, match=f"^{name.split('.')[-1]}: `{argument}` must be "):
                function(**REQUIRED.get(name, {}) | {argument: value})


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
