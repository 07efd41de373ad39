"""Bad calls and the exact error that each gives: every public function has a row."""

import inspect
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import gradclip_jax as gcx

SGD = optax.sgd(0.1)
GRADS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def updated(tx, grads=GRADS):
    return tx.update(grads, tx.init(GRADS), GRADS)


def loss_of_one(params, example):
    return jnp.vdot(params, example)


# (public name, call, error, its whole text)
ROWS = [
    (
        "global_norm",
        lambda: gcx.global_norm(["a"]),
        TypeError,
        "global_norm: every leaf of `tree` must be floating or complex, got str[] at tree[0]. "
        "Exclude such leaves with `optax.masked`.",
    ),
    (
        "global_norm",
        lambda: gcx.global_norm({"n": jnp.arange(3)}),
        TypeError,
        "global_norm: every leaf of `tree` must be floating or complex, got int32[3] at "
        "tree['n']. Exclude such leaves with `optax.masked`.",
    ),
    (
        "global_norm",
        lambda: gcx.global_norm(GRADS, ord=0),
        ValueError,
        "global_norm: `ord` must be a number > 0, got 0. Pass 1, 2, any other order > 0, or "
        "`jnp.inf`.",
    ),
    (
        "leaf_norms",
        lambda: gcx.leaf_norms({"x": "a"}),
        TypeError,
        "leaf_norms: every leaf of `tree` must be floating or complex, got str[] at tree['x']. "
        "Exclude such leaves with `optax.masked`.",
    ),
    (
        "leaf_norms",
        lambda: gcx.leaf_norms(GRADS, ord="2"),
        TypeError,
        "leaf_norms: `ord` must be a number > 0, got '2'. Pass 1, 2, any other order > 0, or "
        "`jnp.inf`.",
    ),
    (
        "clip_grad_norm",
        lambda: gcx.clip_grad_norm(["a"], 1.0),
        TypeError,
        "clip_grad_norm: every leaf of `grads` must be floating or complex, got str[] at "
        "grads[0]. Exclude such leaves with `optax.masked`.",
    ),
    (
        "clip_grad_norm",
        lambda: gcx.clip_grad_norm(1.0, GRADS),
        TypeError,
        "clip_grad_norm: `max_norm` must be a number > 0, got {'b': float32[3], 'w': float32[2,"
        " 3]}. Pass inf to only measure.",
    ),
    (
        "clip_grad_norm",
        lambda: gcx.clip_grad_norm(GRADS, None),
        TypeError,
        "clip_grad_norm: `max_norm` must be a number > 0, got None. Pass inf to only measure.",
    ),
    (
        "clip_grad_value",
        lambda: gcx.clip_grad_value(["a"], 1.0),
        TypeError,
        "clip_grad_value: every leaf of `grads` must be floating, got str[] at grads[0]. Leave "
        "such leaves out with `optax.masked`.",
    ),
    (
        "clip_grad_value",
        lambda: gcx.clip_grad_value(GRADS, -1.0),
        ValueError,
        "clip_grad_value: `max_value` must be a number > 0, got -1.0. Pass inf to turn clipping"
        " off.",
    ),
    (
        "clip_cotangent",
        lambda: gcx.clip_cotangent("x", 1.0),
        TypeError,
        "clip_cotangent: `x` must be a floating or complex array, got str. Map over the arrays "
        "of a tree with `jax.tree.map`.",
    ),
    (
        "clip_cotangent",
        lambda: gcx.clip_cotangent(1.0, GRADS["w"]),
        TypeError,
        "clip_cotangent: `max_norm` must be a number > 0, got float32[2, 3]. Pass inf to only "
        "measure.",
    ),
    (
        "qk_clip",
        lambda: gcx.qk_clip(GRADS["w"], GRADS["w"], jnp.ones(2), -1.0),
        ValueError,
        "qk_clip: `threshold` must be a number > 0, got -1.0. Kimi K2 was trained with 100.",
    ),
    (
        "qk_clip_mla",
        lambda: gcx.qk_clip_mla(GRADS["w"], GRADS["w"], GRADS["w"], jnp.ones(2), -1.0),
        ValueError,
        "qk_clip_mla: `threshold` must be a number > 0, got -1.0. Kimi K2 was trained with 100.",
    ),
    (
        "clip_by_norm",
        lambda: gcx.clip_by_norm(-1.0),
        ValueError,
        "clip_by_norm: `threshold` must be a number > 0, got -1.0. Pass a positive number, a "
        "schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_norm",
        lambda: gcx.clip_by_norm(1.0, granularity=GRADS),
        ValueError,
        "clip_by_norm: `granularity` must be one of 'global', 'leaf', got {'b': float32[3], "
        "'w': float32[2, 3]}. Pick one of them.",
    ),
    (
        "clip_by_norm",
        lambda: gcx.clip_by_norm(1.0, reaction=GRADS),
        TypeError,
        "clip_by_norm: `reaction` must be callable, got {'b': float32[3], 'w': float32[2, 3]}. "
        'Pass "scale", "zero" or a function (norm, threshold) -> factor.',
    ),
    (
        "clip_by_global_norm",
        lambda: gcx.clip_by_global_norm(-1.0),
        ValueError,
        "clip_by_global_norm: `max_norm` must be a number > 0, got -1.0. Pass a positive "
        "number, a schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_global_norm",
        lambda: gcx.clip_by_global_norm(GRADS["w"]),
        TypeError,
        "clip_by_global_norm: `max_norm` must be a number > 0, got float32[2, 3]. Pass a "
        "positive number, a schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_global_norm",
        lambda: updated(gcx.clip_by_global_norm(1.0), ["a"]),
        TypeError,
        "clip_by_global_norm: every leaf of `updates` must be floating or complex, got str[] at"
        " updates[0]. Exclude such leaves with `optax.masked`.",
    ),
    (
        "clip_by_global_norm",
        lambda: gcx.clip_by_global_norm(1.0, nonfinite="skip"),
        ValueError,
        "clip_by_global_norm: `nonfinite` must be one of 'propagate', 'zero', got 'skip'. Pick "
        "one of them.",
    ),
    (
        "clip_by_global_norm",
        lambda: gcx.clip_by_global_norm(1.0, axis_name=GRADS),
        TypeError,
        "clip_by_global_norm: `axis_name` must be a string, a tuple of strings or None, got "
        "{'b': float32[3], 'w': float32[2, 3]}. Name the mapped axes over which the leaves are "
        "sharded.",
    ),
    (
        "clip_by_leaf_norm",
        lambda: gcx.clip_by_leaf_norm(math.nan),
        ValueError,
        "clip_by_leaf_norm: `max_norm` must be a number > 0, got nan. Pass a positive number, a"
        " schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_leaf_norm",
        lambda: gcx.clip_by_leaf_norm(1.0, ord=GRADS),
        TypeError,
        "clip_by_leaf_norm: `ord` must be a number > 0, got {'b': float32[3], 'w': float32[2, "
        "3]}. Pass 1, 2, any other order > 0, or `jnp.inf`.",
    ),
    (
        "clip_by_group_norm",
        lambda: gcx.clip_by_group_norm({"a": -1.0}, {"w": "a", "b": "b"}),
        ValueError,
        "clip_by_group_norm: `max_norms['a']` must be a number > 0, got -1.0. Pass a positive "
        "number, a schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_group_norm",
        lambda: updated(gcx.clip_by_group_norm({"a": 1.0}, {"w": "a"})),
        TypeError,
        "clip_by_group_norm: `param_labels` must be a prefix tree of `updates`, got no entry "
        "for updates['b']. Give one entry per leaf or per subtree of `updates`.",
    ),
    (
        "clip_by_block_rms",
        lambda: gcx.clip_by_block_rms(0.0),
        ValueError,
        "clip_by_block_rms: `threshold` must be a number > 0, got 0.0. Pass a positive number, "
        "a schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "adaptive_grad_clip",
        lambda: gcx.adaptive_grad_clip(None),
        TypeError,
        "adaptive_grad_clip: `clipping` must be a number > 0, got None. The paper uses 0.01 for"
        " large batches.",
    ),
    (
        "adaptive_grad_clip",
        lambda: gcx.adaptive_grad_clip(0.1, axis=[0, [1]]),
        TypeError,
        "adaptive_grad_clip: `axis` must be an integer, a sequence of integers or None, got [0,"
        " [1]]. Pass for example 0, or (0, 1), or None for the choice by rank.",
    ),
    (
        "adaptive_grad_clip",
        lambda: gcx.adaptive_grad_clip(0.1).update(
            GRADS, gcx.adaptive_grad_clip(0.1).init(GRADS), None
        ),
        ValueError,
        "adaptive_grad_clip: `params` must be given for this threshold, got None. Pass it: "
        "`update(grads, state, params)`.",
    ),
    (
        "zero_large_norm",
        lambda: gcx.zero_large_norm(-2.0),
        ValueError,
        "zero_large_norm: `max_norm` must be a number > 0, got -2.0. Pass a positive number, a "
        "schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_value",
        lambda: gcx.clip(GRADS),
        TypeError,
        "clip_by_value: `max_value` must be a number > 0, got {'b': float32[3], 'w': float32[2, 3]}. "
        "Pass inf to turn clipping off.",
    ),
    (
        "clip_by_value",
        lambda: updated(gcx.clip(1.0), ["a"]),
        TypeError,
        "clip_by_value: every leaf of `updates` must be floating, got str[] at updates[0]. Leave such "
        "leaves out with `optax.masked`.",
    ),
    (
        "autoclip",
        lambda: gcx.autoclip(GRADS),
        TypeError,
        "percentile: `percentile` must be a number >= 0 and <= 100, got {'b': float32[3], 'w': "
        "float32[2, 3]}. The paper uses 10.",
    ),
    (
        "autoclip",
        lambda: gcx.autoclip(window=0),
        ValueError,
        "percentile: `window` must be an integer >= 1, got 0. Pass the number of steps to keep.",
    ),
    (
        "zclip",
        lambda: gcx.zclip("2.5"),
        TypeError,
        "zscore: `z_threshold` must be a number > 0, got '2.5'. The paper uses 2.5.",
    ),
    (
        "adagc",
        lambda: gcx.adagc(warmup_steps=-1),
        ValueError,
        "adagc: `warmup_steps` must be an integer >= 1, got -1. The paper uses 100.",
    ),
    (
        "quantile_clip",
        lambda: gcx.quantile_clip(1.5),
        ValueError,
        "quantile: `target` must be a number >= 0 and <= 1, got 1.5. 0.5 aims at the median.",
    ),
    (
        "u_clip",
        lambda: gcx.contrib.u_clip(gcx.clip_by_global_norm),
        TypeError,
        "u_clip: `clip` must be an `optax.GradientTransformation`, got the function "
        "`clip_by_global_norm`. Call it: `clip_by_global_norm(...)`.",
    ),
    (
        "acclip",
        lambda: gcx.contrib.acclip(1.0),
        ValueError,
        "acclip: `b1` must be a number >= 0 and < 1, got 1.0. A decay is a number below 1, such"
        " as 0.99.",
    ),
    (
        "spam_clip",
        lambda: gcx.contrib.spam_clip(reset_every=0),
        ValueError,
        "spam_clip: `reset_every` must be an integer >= 1, got 0. Pass None for no reset.",
    ),
    (
        "stable_spam_clip",
        lambda: gcx.contrib.stable_spam_clip(1.0),
        ValueError,
        "stable_spam_clip: `max_decay` must be a number >= 0 and < 1, got 1.0. A decay is a "
        "number below 1, such as 0.99.",
    ),
    (
        "stable_adamw",
        lambda: gcx.contrib.stable_adamw("0.1"),
        TypeError,
        "stable_adamw: `learning_rate` must be a number > 0, got '0.1'. The paper uses 0.002.",
    ),
    (
        "accumulate_gradients",
        lambda: gcx.accumulate_gradients(2, SGD),
        TypeError,
        "accumulate_gradients: `inner` must be an `optax.GradientTransformation`, got 2. Pass "
        "an Optax optimizer such as `optax.adamw(1e-3)`.",
    ),
    (
        "accumulate_gradients",
        lambda: gcx.accumulate_gradients(SGD, GRADS),
        TypeError,
        "accumulate_gradients: `every` must be an integer >= 1, got {'b': float32[3], 'w': "
        "float32[2, 3]}. Pass 1 to run the inner optimizer at every step.",
    ),
    (
        "round_stochastically",
        lambda: gcx.round_stochastically(-1),
        ValueError,
        "round_stochastically: `seed` must be an integer >= 0, got -1. Pass one seed for each run.",
    ),
    (
        "round_stochastically",
        lambda: gcx.round_stochastically().update(GRADS, gcx.round_stochastically().init(GRADS)),
        ValueError,
        "round_stochastically: `params` must be given, got None. Call `update(grads, state, "
        "params)`.",
    ),
    (
        "round_stochastically",
        lambda: gcx.round_stochastically().update(
            GRADS,
            gcx.round_stochastically().init(GRADS),
            {**GRADS, "w": jnp.ones((2, 3), jnp.float16)},
        ),
        TypeError,
        "round_stochastically: `params` must be bfloat16 or of 32 bit or more, got float16[2, 3] "
        "at params['w']. Convert it, or leave it out: `optax.masked`.",
    ),
    (
        "accumulate_gradients",
        lambda: gcx.accumulate_gradients(SGD, 0),
        ValueError,
        "accumulate_gradients: `every` must be an integer >= 1, got 0. Pass 1 to run the inner "
        "optimizer at every step.",
    ),
    (
        "accumulate_gradients",
        lambda: gcx.accumulate_gradients(SGD, 2, reduction="median"),
        ValueError,
        "accumulate_gradients: `reduction` must be one of 'mean', 'sum', 'max', 'last', got "
        "'median'. Pick one of them.",
    ),
    (
        "accumulate_gradients",
        lambda: gcx.accumulate_gradients(SGD, 2, accumulator_dtype=GRADS["w"]),
        TypeError,
        "accumulate_gradients: `accumulator_dtype` must be a real floating dtype, got "
        "float32[2, 3]. Pass jnp.float32, or jnp.bfloat16 to save memory.",
    ),
    (
        "accumulate_gradients",
        lambda: gcx.accumulate_gradients(SGD, 2, accumulator_dtype={"w": jnp.int8, "b": "f4"}),
        TypeError,
        "accumulate_gradients: `accumulator_dtype['w']` must be a real floating dtype, got <class "
        "'jax.numpy.int8'>. Pass jnp.float32, or jnp.bfloat16 to save memory.",
    ),
    (
        "accumulate_gradients",
        lambda: updated(gcx.accumulate_gradients(SGD, 2, accumulator_dtype={"w": jnp.bfloat16})),
        TypeError,
        "accumulate_gradients: `accumulator_dtype` must be a prefix tree of `params`, got no entry "
        "for params['b']. Give one entry per leaf or per subtree of `params`.",
    ),
    (
        "accumulate_gradients",
        lambda: updated(gcx.accumulate_gradients(SGD, 2, accumulator_dtype=lambda path: path)),
        TypeError,
        "accumulate_gradients: `accumulator_dtype of params['b']` must be a real floating dtype, "
        "got 'b'. Pass jnp.float32, or jnp.bfloat16 to save memory.",
    ),
    (
        "accumulate_gradients",
        lambda: updated(gcx.accumulate_gradients(SGD, 2), ["a"]),
        TypeError,
        "accumulate_gradients: every leaf of `updates` must be floating or complex, got str[] "
        "at updates[0]. Exclude such leaves with `optax.masked`.",
    ),
    (
        "apply_gradients",
        lambda: gcx.apply_gradients(GRADS, SGD, GRADS, GRADS),
        TypeError,
        "apply_gradients: `tx` must be an `optax.GradientTransformation`, got {'b': float32[3],"
        " 'w': float32[2, 3]}. Pass an Optax optimizer such as `optax.adamw(1e-3)`.",
    ),
    (
        "apply_gradients",
        lambda: gcx.apply_gradients(gcx.skip_nonfinite(SGD), ["a"], (), GRADS),
        TypeError,
        "skip_nonfinite: every leaf of `updates` must be floating or complex, got str[] at "
        "updates[0]. Exclude such leaves with `optax.masked`.",
    ),
    (
        "microbatched_value_and_grad",
        lambda: gcx.microbatched_value_and_grad(GRADS, 2),
        TypeError,
        "microbatched_value_and_grad: `fun` must be callable, got {'b': float32[3], 'w': "
        "float32[2, 3]}. Pass the loss function.",
    ),
    (
        "microbatched_value_and_grad",
        lambda: gcx.microbatched_value_and_grad(jnp.sum, 0),
        ValueError,
        "microbatched_value_and_grad: `num_microbatches` must be an integer >= 1, got 0. Pass 1"
        " not to split.",
    ),
    (
        "flush",
        lambda: gcx.flush(GRADS, SGD, GRADS),
        TypeError,
        "flush: `tx` must be an `optax.GradientTransformation`, got {'b': float32[3], 'w': "
        "float32[2, 3]}. Pass an Optax optimizer such as `optax.adamw(1e-3)`.",
    ),
    (
        "flush",
        lambda: gcx.flush(SGD, SGD.init(GRADS), GRADS),
        TypeError,
        "flush: `state` must be a state of `accumulate_gradients`, or one around it, got tuple."
        " Pass the state that `accumulate_gradients(...).init(params)` made.",
    ),
    (
        "reset_accumulation",
        lambda: gcx.reset_accumulation(SGD.init(GRADS)),
        TypeError,
        "reset_accumulation: `state` must be a state of `accumulate_gradients`, or one around "
        "it, got tuple. Pass the state that `accumulate_gradients(...).init(params)` made.",
    ),
    (
        "has_updated",
        lambda: gcx.has_updated(gcx.accumulate_gradients(SGD, 2)),
        TypeError,
        "has_updated: `state` must be an optimizer state, got the GradientTransformationExtraArgs "
        "itself. Pass what `init(params)` or `update` of it returned.",
    ),
    (
        "has_updated",
        lambda: gcx.has_updated(gcx.accumulate_gradients(SGD, 2)),
        TypeError,
        "has_updated: `state` must be an optimizer state, got the GradientTransformationExtraArgs "
        "itself. Pass what `init(params)` or `update` of it returned.",
    ),
    (
        "combine_norms",
        lambda: gcx.combine_norms([3]),
        TypeError,
        "combine_norms: every leaf of `norms` must be floating, got int[] at norms[0]. Leave such "
        "leaves out with `optax.masked`.",
    ),
    (
        "accumulated_gradients",
        lambda: gcx.accumulated_gradients(GRADS),
        TypeError,
        "accumulated_gradients: `state` must be a state of `accumulate_gradients`, or one "
        "around it, got dict. Pass the state that `accumulate_gradients(...).init(params)` "
        "made.",
    ),
    (
        "skip_nonfinite",
        lambda: gcx.skip_nonfinite(optax.adam),
        TypeError,
        "skip_nonfinite: `inner` must be an `optax.GradientTransformation`, got the function "
        "`adam`. Call it: `adam(...)`.",
    ),
    (
        "skip_nonfinite",
        lambda: gcx.skip_nonfinite(GRADS),
        TypeError,
        "skip_nonfinite: `inner` must be an `optax.GradientTransformation`, got {'b': "
        "float32[3], 'w': float32[2, 3]}. Pass an Optax optimizer such as `optax.adamw(1e-3)`.",
    ),
    (
        "skip_nonfinite",
        lambda: gcx.skip_nonfinite(SGD, check="all"),
        ValueError,
        "skip_nonfinite: `check` must be one of 'gradient', 'step', got 'all'. Pick one of them.",
    ),
    (
        "skip_large_norm",
        lambda: gcx.skip_large_norm(SGD, None),
        TypeError,
        "skip_large_norm: `max_norm` must be a number > 0, got None. Pass a positive number, a "
        "schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "skip_spikes",
        lambda: gcx.skip_spikes(SGD),
        ValueError,
        "skip_spikes: `norm` must be given, or `loss` or `update`, got None for all. Pass for example "
        "`loss=gcx.thresholds.mean_std()`.",
    ),
    (
        "dynamic_loss_scale",
        lambda: gcx.dynamic_loss_scale(SGD, init_scale=0),
        ValueError,
        "dynamic_loss_scale: `init_scale` must be a number >= 1.17549e-38 and <= 8.50706e+37, "
        "got 0. Pass a power of two.",
    ),
    (
        "scale_loss",
        lambda: gcx.scale_loss(GRADS, GRADS),
        TypeError,
        "scale_loss: `state` must be a state with one loss scale in it, got 0 in it. Make the "
        "state with `dynamic_loss_scale(optimizer).init(params)`.",
    ),
    (
        "metrics",
        lambda: gcx.metrics(gcx.clip_by_global_norm(1.0)),
        TypeError,
        "metrics: `state` must be an optimizer state, got the GradientTransformation itself. "
        "Pass what `init(params)` or `update` of it returned.",
    ),
    (
        "metrics",
        lambda: gcx.metrics(optax.MultiSteps(SGD, 2)),
        TypeError,
        "metrics: `state` must be an optimizer state, got the MultiSteps itself. Pass what "
        "`init(params)` or `update` of it returned.",
    ),
    (
        "record_norms",
        lambda: gcx.record_norms(GRADS["w"]),
        TypeError,
        "record_norms: `window` must be a static Python value, got float32[2, 3]. Under "
        "`optax.inject_hyperparams` pass `static_args=('window',)`.",
    ),
    (
        "record_norms",
        lambda: updated(gcx.record_norms(4), ["a"]),
        TypeError,
        "record_norms: every leaf of `updates` must be floating or complex, got str[] at "
        "updates[0]. Exclude such leaves with `optax.masked`.",
    ),
    (
        "convert_state",
        lambda: gcx.convert_state(GRADS, SGD, GRADS),
        TypeError,
        "convert_state: `tx` must be an optimizer, got {'b': float32[3], 'w': float32[2, 3]}. "
        "Pass an Optax transformation, or an `optax.MultiSteps`.",
    ),
    (
        "convert_state",
        lambda: gcx.convert_state(SGD, gcx.skip_nonfinite(optax.adam(0.1)).init(GRADS), GRADS),
        TypeError,
        "convert_state: `state` must be a state that maps on that of `tx`, got ScaleByAdamState"
        " where `tx` has nothing at state.inner_state[0]. Leave the rest of the chain as it "
        "was; restore a checkpoint into the `init(params)` of the transformation that wrote it "
        "before it is converted.",
    ),
    (
        "diagnostics.accumulation_stats",
        lambda: gcx.diagnostics.accumulation_stats(None),
        TypeError,
        "accumulation_stats: `state` must be a state of `accumulate_gradients`, or one around "
        "it, got NoneType. Pass the state that `accumulate_gradients(...).init(params)` made.",
    ),
    (
        "diagnostics.nonfinite_leaves",
        lambda: jax.jit(gcx.diagnostics.nonfinite_leaves)(GRADS),
        TypeError,
        "nonfinite_leaves: `tree` must be known on the host, got a tracer. Call it outside jit,"
        " on what the step returned.",
    ),
    (
        "diagnostics.norm_history",
        lambda: gcx.diagnostics.norm_history(gcx.record_norms()),
        TypeError,
        "norm_history: `state` must be a state with a record of norms, got "
        "GradientTransformation. Put `record_norms()` into the chain.",
    ),
    (
        "diagnostics.suggest_max_norm",
        lambda: gcx.diagnostics.suggest_max_norm({"a": 1.0}),
        TypeError,
        "suggest_max_norm: `norms` must be an array of real numbers, got {'a': 1.0}. Pass for "
        "example `norm_history(state)`.",
    ),
    (
        "diagnostics.suggest_max_norm",
        lambda: gcx.diagnostics.suggest_max_norm(gcx.record_norms(2).init(GRADS)),
        TypeError,
        "suggest_max_norm: `norms` must be an array of real numbers, got "
        "NormRecordState(norms=float32[2], step_count=Array(0, dtype=int32), position=Array(0, "
        "dtype=int32), nonfinite_norms=Array(0, dtype=int32)). Pass for example "
        "`norm_history(state)`.",
    ),
    (
        "diagnostics.suggest_max_norm",
        lambda: gcx.diagnostics.suggest_max_norm("abc"),
        TypeError,
        "suggest_max_norm: `norms` must be an array of real numbers, got 'abc'. Pass for "
        "example `norm_history(state)`.",
    ),
    (
        "diagnostics.suggest_max_norm",
        lambda: gcx.diagnostics.suggest_max_norm([1.0], 101),
        ValueError,
        "suggest_max_norm: `percentile` must be a number >= 0 and <= 100, got 101. 50 is the "
        "median.",
    ),
    (
        "configs.TransformConfig",
        lambda: gcx.configs.TransformConfig("clip", {"max_value": GRADS["w"]}),
        TypeError,
        "TransformConfig: `arguments` must be a plain value, or lists and mappings by name of "
        "such, got float32[2, 3]. Call the function itself with a function, an array or an "
        "object.",
    ),
    (
        "configs.TransformConfig",
        lambda: gcx.configs.TransformConfig("clip", {"delta": 1.0}),
        ValueError,
        "clip: `arguments` must be a mapping for clip, got {'delta': 1.0}: got an unexpected "
        "keyword argument 'delta'. Name the arguments as in its signature; pass what it wraps "
        "to `build`.",
    ),
    (
        "configs.AccumulationConfig",
        lambda: gcx.configs.AccumulationConfig(0),
        ValueError,
        "AccumulationConfig: `accumulation_steps` must be an integer >= 1, got 0. 1 is every step.",
    ),
    (
        "configs.AccumulationConfig",
        lambda: gcx.configs.AccumulationConfig(normalize=1),
        ValueError,
        "AccumulationConfig: `normalize` must be one of True, False, got 1. Pick one of them.",
    ),
    (
        "granularities.axis",
        lambda: gcx.granularities.axis("0"),
        TypeError,
        "axis: `axis` must be an integer, a sequence of integers or None, got '0'. Pass for "
        "example 0, or (0, 1), or None for the choice by rank.",
    ),
    (
        "thresholds.capped",
        lambda: gcx.thresholds.capped(1.0, -1.0),
        ValueError,
        "capped: `max_threshold` must be a number > 0, got -1.0. Leave the cap out for none.",
    ),
    (
        "thresholds.ema",
        lambda: gcx.thresholds.ema(decay=1.0),
        ValueError,
        "ema: `decay` must be a number >= 0 and < 1, got 1.0. A decay is a number below 1, such"
        " as 0.99.",
    ),
    (
        "thresholds.mean_std",
        lambda: gcx.thresholds.mean_std(window=0),
        ValueError,
        "mean_std: `window` must be an integer >= 1, got 0. Pass the number of steps to keep.",
    ),
    (
        "thresholds.percentile",
        lambda: gcx.thresholds.percentile(101),
        ValueError,
        "percentile: `percentile` must be a number >= 0 and <= 100, got 101. The paper uses 10.",
    ),
    (
        "thresholds.quantile",
        lambda: gcx.thresholds.quantile(-0.1),
        ValueError,
        "quantile: `target` must be a number >= 0 and <= 1, got -0.1. 0.5 aims at the median.",
    ),
    (
        "thresholds.relative_to_params",
        lambda: gcx.thresholds.relative_to_params("a"),
        TypeError,
        "relative_to_params: `ratio` must be a number > 0, got 'a'. The paper uses 0.01 for "
        "large batches.",
    ),
    (
        "thresholds.zscore",
        lambda: gcx.thresholds.zscore(GRADS),
        TypeError,
        "zscore: `z_threshold` must be a number > 0, got {'b': float32[3], 'w': float32[2, 3]}."
        " The paper uses 2.5.",
    ),
    (
        "granularities.group",
        lambda: updated(
            gcx.clip_by_norm({"a": 1.0}, granularity=gcx.granularities.group({"w": "a"}))
        ),
        TypeError,
        "clip_by_norm: `param_labels` must be a prefix tree of `updates`, got no entry for "
        "updates['b']. Give one entry per leaf or per subtree of `updates`.",
    ),
    (
        "watch",
        lambda: gcx.watch(SGD, of=("gradients",)),
        ValueError,
        "watch: `of` must be one of 'gradient', 'update', 'parameter', got 'gradients'. Pick one of "
        "them.",
    ),
    (
        "incidents",
        lambda: gcx.incidents(GRADS),
        TypeError,
        "incidents: `state` must be a state that keeps incidents, got dict. Put `gcx.watch` around "
        "the optimizer.",
    ),
    (
        "diagnostics.unit_names",
        lambda: gcx.diagnostics.unit_names(GRADS),
        TypeError,
        "unit_names: `state` must be a state that keeps incidents, got dict. Put `gcx.watch` "
        "around the optimizer.",
    ),
    (
        "diagnostics.plot_log",
        lambda: gcx.diagnostics.plot_log([]),
        ValueError,
        "plot_log: `log` must be a list of at least one dict, got []. Append `metrics(state)` at each "
        "step, or name a file of JSON lines.",
    ),
    (
        "diagnostics.summarize_log",
        lambda: gcx.diagnostics.summarize_log(3),
        ValueError,
        "summarize_log: `log` must be a list of at least one dict, got 3. Append `metrics(state)` at "
        "each step, or name a file of JSON lines.",
    ),
    (
        "diagnostics.worst_examples",
        lambda: gcx.diagnostics.worst_examples(loss_of_one, GRADS, jnp.ones(3), 0),
        ValueError,
        "worst_examples: `k` must be an integer >= 1, got 0. Pass how many examples to return.",
    ),
    (
        "diagnostics.leaf_norm_history",
        lambda: gcx.diagnostics.leaf_norm_history(gcx.record_norms(4).init(GRADS), GRADS),
        ValueError,
        "leaf_norm_history: `state` must be a record of 2 leaves, got one of shape [0]. Record with "
        "`per_leaf=True`.",
    ),
    (
        "per_example.value_and_grad",
        lambda: gcx.per_example.value_and_grad(GRADS, 1.0),
        TypeError,
        "value_and_grad: `fun` must be callable, got {'b': float32[3], 'w': float32[2, 3]}. "
        "Pass the loss of one example.",
    ),
    (
        "per_example.value_and_grad",
        lambda: gcx.per_example.value_and_grad(loss_of_one, -1.0),
        ValueError,
        "value_and_grad: `max_norm` must be a number > 0, got -1.0. Pass a positive number, or `schedule(step)`; inf turns clipping off.",
    ),
    (
        "per_example.norms",
        lambda: gcx.per_example.norms(GRADS),
        TypeError,
        "norms: `fun` must be callable, got {'b': float32[3], 'w': float32[2, 3]}. Pass the "
        "loss of one example.",
    ),
    (
        "per_example.leaf_norms",
        lambda: gcx.per_example.leaf_norms(GRADS),
        TypeError,
        "leaf_norms: `fun` must be callable, got {'b': float32[3], 'w': float32[2, 3]}. Pass "
        "the loss of one example.",
    ),
    (
        "per_example.explain",
        lambda: gcx.per_example.explain(GRADS),
        TypeError,
        "explain: `fun` must be callable, got {'b': float32[3], 'w': float32[2, 3]}. Pass the "
        "loss of one example.",
    ),
    (
        "per_example.sensitivity",
        lambda: gcx.per_example.sensitivity(1.0, "both"),
        ValueError,
        "sensitivity: `adjacency` must be one of 'add_or_remove_one', 'replace_one', got "
        "'both'. Pick one of them.",
    ),
    (
        "per_example.noisy_mean",
        lambda: gcx.per_example.noisy_mean(-1.0, 1.0, 8.0, 0),
        ValueError,
        "noisy_mean: `noise_multiplier` must be a number >= 0, got -1.0. Pass 0 to draw no noise.",
    ),
    (
        "per_example.noise_scale",
        lambda: gcx.per_example.noise_scale(jnp.ones((2, 2)), GRADS),
        ValueError,
        "noise_scale: `norms` must be a vector with one norm per example, got float32[2, 2]. Pass those of `per_example.norms`.",
    ),
    (
        "qk_clip",
        lambda: gcx.qk_clip(GRADS["w"], GRADS["w"], [1.0, 2.0], 1.0),
        TypeError,
        "qk_clip: `max_logits` must be the largest logit of each query head, floating[heads], got "
        "list[2]. Pass an array, the maximum over all other axes.",
    ),
    (
        "clip_by_global_norm",
        lambda: updated(gcx.clip_by_global_norm(lambda step: "1")),
        TypeError,
        "clip_by_global_norm: `max_norm` must be a schedule that returns a real scalar, got "
        "str[]. Return one number for each step.",
    ),
    (
        "clip_by_global_norm",
        lambda: updated(gcx.clip_by_global_norm(lambda step: jnp.ones(3))),
        TypeError,
        "clip_by_global_norm: `max_norm` must be a schedule that returns a real scalar, got "
        "float32[3]. Return one number for each step.",
    ),
    (
        "clip_by_global_norm",
        lambda: updated(gcx.clip_by_global_norm(lambda step: None)),
        TypeError,
        "clip_by_global_norm: `max_norm` must be a schedule that returns a real scalar, got "
        "NoneType[]. Return one number for each step.",
    ),
    (
        "clip_by_global_norm",
        lambda: updated(gcx.clip_by_global_norm(lambda step: 1j)),
        TypeError,
        "clip_by_global_norm: `max_norm` must be a schedule that returns a real scalar, got "
        "complex[]. Return one number for each step.",
    ),
    (
        "skip_large_norm",
        lambda: updated(gcx.skip_large_norm(SGD, lambda step: "1")),
        TypeError,
        "skip_large_norm: `max_norm` must be a schedule that returns a real scalar, got str[]. "
        "Return one number for each step.",
    ),
    (
        "global_norm",
        lambda: gcx.global_norm(GRADS, axis_name="data"),
        ValueError,
        "global_norm: `axis_name` must be the name of a mapped axis around this call, got "
        "'data'. Call it inside `pmap`, `shard_map` or `vmap` with that axis, or leave it out.",
    ),
    (
        "leaf_norms",
        lambda: gcx.leaf_norms(GRADS, axis_name="data"),
        ValueError,
        "leaf_norms: `axis_name` must be the name of a mapped axis around this call, got "
        "'data'. Call it inside `pmap`, `shard_map` or `vmap` with that axis, or leave it out.",
    ),
    (
        "clip_grad_norm",
        lambda: gcx.clip_grad_norm(GRADS, 1.0, axis_name="data"),
        ValueError,
        "clip_grad_norm: `axis_name` must be the name of a mapped axis around this call, got "
        "'data'. Call it inside `pmap`, `shard_map` or `vmap` with that axis, or leave it out.",
    ),
    (
        "clip_by_global_norm",
        lambda: updated(gcx.clip_by_global_norm(1.0, axis_name="data")),
        ValueError,
        "clip_by_global_norm: `axis_name` must be the name of a mapped axis around this call, "
        "got 'data'. Call it inside `pmap`, `shard_map` or `vmap` with that axis, or leave it "
        "out.",
    ),
    (
        "skip_nonfinite",
        lambda: updated(gcx.skip_nonfinite(SGD, axis_name="data")),
        ValueError,
        "skip_nonfinite: `axis_name` must be the name of a mapped axis around this call, got "
        "'data'. Call it inside `pmap`, `shard_map` or `vmap` with that axis, or leave it out.",
    ),
    (
        "record_norms",
        lambda: updated(gcx.record_norms(4, axis_name="data")),
        ValueError,
        "record_norms: `axis_name` must be the name of a mapped axis around this call, got "
        "'data'. Call it inside `pmap`, `shard_map` or `vmap` with that axis, or leave it out.",
    ),
    (
        "clip_by_global_norm",
        lambda: gcx.clip_by_global_norm(gcx.thresholds.zscore),
        TypeError,
        "clip_by_global_norm: `max_norm` must be a number, a schedule or a rule, got the "
        "function `zscore`. Call it: `zscore()`.",
    ),
    (
        "clip_by_leaf_norm",
        lambda: gcx.clip_by_leaf_norm(gcx.thresholds.percentile),
        TypeError,
        "clip_by_leaf_norm: `max_norm` must be a number, a schedule or a rule, got the function"
        " `percentile`. Call it: `percentile()`.",
    ),
    (
        "skip_large_norm",
        lambda: gcx.skip_large_norm(SGD, gcx.thresholds.mean_std),
        TypeError,
        "skip_large_norm: `max_norm` must be a number, a schedule or a rule, got the function "
        "`mean_std`. Call it: `mean_std()`.",
    ),
    (
        "granularities.layer",
        lambda: gcx.granularities.layer(-1),
        ValueError,
        "layer: `num_layer_axes` must be an integer >= 0, got -1. Give the number of leading axes "
        "that index layers, 0 for an ordinary leaf.",
    ),
    (
        "granularities.layer",
        lambda: gcx.granularities.layer(1.5),
        TypeError,
        "layer: `num_layer_axes` must be an integer >= 0, got 1.5. Give the number of leading axes "
        "that index layers, 0 for an ordinary leaf.",
    ),
    (
        "clip_by_leaf_norm",
        lambda: gcx.clip_by_leaf_norm(1.0, num_layer_axes=-1),
        ValueError,
        "clip_by_leaf_norm: `num_layer_axes` must be an integer >= 0, got -1. Give the number of "
        "leading axes that index layers, 0 for an ordinary leaf.",
    ),
    (
        "clip_by_global_norm",
        lambda: gcx.clip_by_global_norm(None),
        TypeError,
        "clip_by_global_norm: `max_norm` must be a number > 0, got None. Pass a positive "
        "number, a schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_leaf_norm",
        lambda: gcx.clip_by_leaf_norm(None),
        TypeError,
        "clip_by_leaf_norm: `max_norm` must be a number > 0, got None. Pass a positive number, "
        "a schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "zero_large_norm",
        lambda: gcx.zero_large_norm(None),
        TypeError,
        "zero_large_norm: `max_norm` must be a number > 0, got None. Pass a positive number, a "
        "schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_norm",
        lambda: gcx.clip_by_norm(None),
        TypeError,
        "clip_by_norm: `threshold` must be a number > 0, got None. Pass a positive number, a "
        "schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
    (
        "clip_by_block_rms",
        lambda: gcx.clip_by_block_rms(None),
        TypeError,
        "clip_by_block_rms: `threshold` must be a number > 0, got None. Pass a positive number,"
        " a schedule, or a rule from `gcx.thresholds`; inf never clips.",
    ),
]

# Nothing can be wrong about their arguments, or a type checker says it.
WITHOUT = {
    "diagnostics.Incident",
    "clip",  # Optax's name of `clip_by_value`
    "per_example.LeafCost",
    "per_example.Stats",
    "diagnostics.AccumulationStats",
    "granularities.Granularity",
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


@pytest.mark.parametrize(
    ("name", "call", "error", "message"), ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)]
)
def test_a_bad_call_is_refused_in_these_words(name, call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_errors_have_one_form():
    for *_, message in ROWS:
        function, _, rest = message.partition(": ")
        assert function.isidentifier() and " must be " in rest and ", got " in rest
        assert rest.endswith(".") and len(message) < 400
