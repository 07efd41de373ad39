"""Bad calls and the error of each: its type, the function, the argument and the leaf that it names.

The wording of errors is free to change. `ROWS` lists calls of one function each. `BAD` lists values
that are passed as every argument of every public callable; `ACCEPTED` explains those that do not raise.
"""

import inspect
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from public import CLASSES, FUNCTIONS

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
W = jnp.ones((2, 3))
GRADS = {"w": W, "b": jnp.ones(3)}
HALF = {"w": jnp.ones((2, 3), jnp.float16), "b": jnp.ones(3)}
COMPLEX = jnp.ones(3, jnp.complex64)
MULTI_STEPS = optax.MultiSteps(SGD, 2).gradient_transformation()
EXAMPLES = jnp.ones((3, 2, 3))
PROBE = jnp.zeros((2, 4))
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
    ("global_norm", lambda f: f([jnp.zeros((), int)] * 8), TypeError, "tree", "tree[4]"),
    ("global_norm", lambda f: jax.jit(lambda p: f(GRADS, ord=p))(2.0), TypeError, "ord"),
    ("clip_grad_norm", lambda f: f({"n": jnp.arange(3)}, 1.0), TypeError, "grads", "grads['n']"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(2, 2), ONES(4, 1)), ValueError, "max_logits"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(3, 2), ONES(4)), ValueError, "key"),
    ("stable_adamw", lambda f: updated(f(1e-3), {"w": W, "b": COMPLEX}), TypeError, "updates", "updates['b']"),
    ("qk_clip", lambda f: f(np.ones((4, 2), int), ONES(2, 2), ONES(4)), TypeError, "query"),
    ("qk_clip", lambda f: f({"a": ONES(4, 2), "b": ONES(2, 2)}, ONES(2, 2), ONES(4)), ValueError, "query", "query['b']"),
    ("qk_clip", lambda f: f(ONES(4, 2), None, ONES(4), head_axis=2), ValueError, "query", "head_axis"),
    ("clip_by_norm", lambda f: f(1.0, granularity=gcx.granularities.group({"w": 1, "b": "1"})).init(GRADS), ValueError, "param_labels", "'1'"),
    ("clip_by_global_norm", lambda f: f(GRADS, 1.0), TypeError, "max_norm", "clip_grad_norm"),
    ("clip_by_leaf_norm", lambda f: f(gcx.thresholds.ema()).update({"w": W}, f(gcx.thresholds.ema()).init(GRADS)), TypeError, "state", "float32[2]"),
    ("clip_by_norm", lambda f: updated(f({"a": 1.0}, granularity=GROUP)), TypeError, "param_labels"),
    ("clip_by_norm", lambda f: f([1.0, 2.0], granularity=gcx.granularities.group({"w": "a", "b": "c"})), TypeError, "threshold"),
    ("clip_by_global_norm", lambda f: updated(f(lambda step: jnp.ones(3))), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: jax.jit(lambda: updated(f(gcx.thresholds.zscore)))(), TypeError, "max_norm"),
    ("clip_by_global_norm", lambda f: updated(optax.inject_hyperparams(f)(1.0, ord=1.0)), TypeError, "ord"),
    ("clip_by_leaf_norm", lambda f: updated(f(1.0, num_layer_axes=2)), ValueError, "num_layer_axes", "updates['b']"),
    ("clip_by_leaf_norm", lambda f: updated(f(1.0, num_layer_axes={"x": 1})), TypeError, "num_layer_axes"),
    ("clip_by_leaf_norm", lambda f: f({"w": 1.0, "b": 1.0}), TypeError, "max_norm", "clip_by_group_norm"),
    ("clip_by_group_norm", lambda f: f({"a": -1.0}, {"w": "a", "b": "b"}), ValueError, "max_norms", "['a']"),
    ("clip_by_group_norm", lambda f: updated(f({"a": 1.0, "head": 1.0}, "a")), ValueError, "max_norms", "'head'"),
    ("adaptive_grad_clip", lambda f: f(axis=(0, -2)).update({"w": W}, None, {"w": W}), ValueError, "axis", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f().update(GRADS, None, {**GRADS, "w": ONES(2, 5)}), TypeError, "updates", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f().update({"b": GRADS["b"]}, None, GRADS), TypeError, "updates", "params['w']"),
    ("autoclip", lambda f: optax.inject_hyperparams(f)(50.0, 8).init(W), TypeError, "window"),
    ("autoclip", lambda f: f().update(W, gcx.zclip().init(W)), TypeError, "state"),
    ("clip_by_group_norm", lambda f: f({"a": 1.0, "b": gcx.thresholds.ema()}, ["a", "b"]).update([W, W], None), TypeError, "state"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype={"w": "f4"}), TypeError, "accumulator_dtype"),
    ("accumulate_gradients", lambda f: f(optax.chain(gcx.clip_by_value(1.0), f(SGD, 2)), 3).init(GRADS), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(SGD, lambda step: 0).init(GRADS), ValueError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, 2).update({"a": [W]}, f(SGD, 2).init({"a": (W,)}), {"a": (W,)}), TypeError, "updates"),
    ("round_stochastically", lambda f: f().update(GRADS, f().init(GRADS), HALF), TypeError, "params", "params['w']"),
    ("skip_nonfinite", lambda f: f(gcx.accumulate_gradients(gcx.dynamic_loss_scale(SGD), 2)).init(W), TypeError, "inner"),
    ("microbatched_value_and_grad", lambda f: jax.jit(lambda n: f(loss_of_all, n))(2), TypeError, "num_microbatches"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2, aux_reduction={"a": "maen"}), ValueError, "aux_reduction"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: 10), 2, has_aux=True)(1.0, ONES(4)), TypeError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: x.reshape(-1, 2).sum(1)), 2, has_aux=True, aux_reduction="concatenate")(1.0, ONES(8)), TypeError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 4)(1.0, {"a": ONES(8), "b": ONES(9)}), ValueError, "batch", "args[1]['b']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2)(1.0, x=ONES(4)), TypeError, "args"),
    ("skip_if", lambda f: step(f(SGD, gcx.SkipRule(lambda p: 0.0, lambda *a: (False, ()), lambda *a: ONES(3)))), TypeError, "predicate"),
    ("skip_if", lambda f: step(f(SGD, gcx.SkipRule(lambda p: jnp.int32(0), lambda *a: (False, ()), lambda *a: 0.5))), TypeError, "predicate"),
    ("clip_by_global_norm", lambda f: step(f(gcx.thresholds.Rule(lambda n: jnp.int32(0), lambda n, s, p: (n, s + 0.5)))), TypeError, "max_norm"),
    ("microbatched_value_and_grad", lambda f: f(lambda p, x: (p, x), 2)(1.0, ONES(4)), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(lambda p, x: (p, x), 2, has_weight=True)(1.0, ONES(4)), TypeError, "weight"),
    ("skip_spikes", lambda f: step(gcx.skip_nonfinite(f(SGD, loss=4.0))), TypeError, "value"),
    ("skip_nonfinite", lambda f: step(f(SGD), {"a": None, "b": W}, {"a": W, "b": W}), TypeError, "updates", "eqx.filter"),
    ("combine_norms", lambda f: f([3]), TypeError, "norms", "norms[0]"),
    ("skip_spikes", lambda f: updated(f(SGD, norm=lambda step: "1")), TypeError, "norm"),
    ("skip_spikes", lambda f: f(SGD, norm=gcx.thresholds.relative_to_params()), ValueError, "norm"),
    ("skip_spikes", lambda f: f(SGD), ValueError, "norm"),
    ("skip_spikes", lambda f: f(SGD, loss=1.0).update(W, f(SGD, loss=1.0).init(W)), TypeError, "value"),
    ("skip_spikes", lambda f: f(SGD, loss=1.0).update(W, f(SGD, loss=1.0).init(W), value=ONES(3)), TypeError, "value"),
    ("skip_spikes", lambda f: f(SGD, loss=gcx.thresholds.relative_to_params()), ValueError, "loss"),
    ("skip_spikes", lambda f: f(gcx.dynamic_loss_scale(SGD), loss=1.0).init(W), TypeError, "inner"),
    ("dynamic_loss_scale", lambda f: f(f(SGD)).init(W), TypeError, "inner"),
    ("scale_loss", lambda f: f((LOSS_SCALE, LOSS_SCALE), 1.0), TypeError, "state"),
    ("convert_state", lambda f: f(optax.chain(ADAM, optax.trace(0.9)), ADAM.init(W), W), TypeError, "state"),
    ("convert_state", lambda f: f(SGD, types.SimpleNamespace(opt_state=SGD.init(W)), W), TypeError, "state", "`.opt_state`"),
    ("convert_state", lambda f: f(ADAM, ADAM.init({**GRADS, "b": W}), GRADS), TypeError, "params", "state[0].mu['b']"),
    ("convert_state", lambda f: f(gcx.accumulate_gradients(SGD, 2), MULTI_STEPS.init({"w": W}), GRADS), TypeError, "state", "state.acc_grads"),
    ("convert_state", lambda f: f(SGD, MULTI_STEPS.update(W, MULTI_STEPS.init(W))[1], W), ValueError, "state", "state.mini_step"),
    ("diagnostics.suggest_max_norm", lambda f: f([0.0, 0.0]), ValueError, "norms"),
    ("watch", lambda f: step(f(SGD), batch_id=np.int64(2**31)), ValueError, "batch_id"),
    ("watch", lambda f: f(SGD, taps=ONES(3)).init(GRADS), ValueError, "taps"),
    ("watch", lambda f: step(f(SGD, taps={"a": PROBE}), taps={"b": PROBE}), ValueError, "taps"),
    ("watch", lambda f: f(SGD).update(GRADS, f(SGD).init({"w": W}), GRADS), ValueError, "state"),
    ("watch", lambda f: f(SGD, trainable={"w": 1}), TypeError, "trainable", "trainable['w']"),
    ("diagnostics.read_log", lambda f: f([{"g/loss": 1.0, "d/loss": 1.0}]), ValueError, "log", "prefix='d/'"),
    ("diagnostics.plot_log", lambda f: f([]), ValueError, "log"),
    ("diagnostics.plot_log", lambda f: f([{"accuracy": 1.0}]), ValueError, "log"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, param_labels="all"), TypeError, "max_norm"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, {"x": 1.0}, param_labels={"w": "x", "b": "y"})(GRADS, EXAMPLES), ValueError, "max_norm", "'y'"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, {"x": 1.0}, param_labels={"w": "x"})(GRADS, EXAMPLES), TypeError, "param_labels"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, argnums=1)(W, EXAMPLES), ValueError, "argnums"),
    ("per_example.value_and_grad", lambda f: f(lambda p, x: (0.0, x), 1.0, has_weight=True)(W, EXAMPLES), TypeError, "fun"),
    ("per_example.norms", lambda f: f(lambda p, e: 0.0)(1.0, {"key": jax.random.key(0), "x": ONES(3, 2)}), ValueError, "batch", "args[1]['key']", "leading batch axis", "jax.random.split"),
    ("per_example.norms", lambda f: f(lambda p, e: 0.0)(1.0, {"x": ONES(3, 2), "y": ONES(2)}), ValueError, "batch", "args[1]['x']", "args[1]['y']"),
    ("taps.metrics", lambda f: f({"a": jnp.zeros(3)}), ValueError, "stats", "stats['a']"),
]
# fmt: on

ACCUMULATE, WATCH, PROBES = (
    gcx.accumulate_gradients(SGD, 2),
    gcx.watch(SGD),
    gcx.taps.make_probes(["a"]),
)
LOG = [{"step": i, "loss": 3.0, "grad_norm": 1.0} for i in range(3)]
BAD = {
    **{repr(x): x for x in (None, True, 0, -1, 3, 2**40, 0.5, -1.5, math.nan, math.inf, -math.inf)},
    **{repr(x): x for x in (1e-50, 1e39, 1j, "", "other", b"data", (), [], [0, "a"], {}, {"w": "a"}, {1, 2})},
    **{repr(x): x for x in (int, np.int64(3_000_000_000), np.datetime64("2020-01-01"))},
    "10**400": 10**400, "object": object(), "module": math, "generator": (i for i in ()), "lambda:": lambda: 0,
    "lambda x": lambda x: x, "float[3]": ONES(3), "float[7, 2]": jnp.ones((7, 2)), "int[3]": np.arange(3),
    "str[1]": np.array(["a"]), "bool[3]": np.ones(3, bool), "key": jax.random.key(0), "SGD": SGD,
    "optax.adam": optax.adam, "zscore": gcx.thresholds.zscore, "rule": gcx.thresholds.zscore(),
    "axis": gcx.granularities.axis(0), "shape": jax.ShapeDtypeStruct((3,), np.float32),
}  # fmt: skip
ANY = {*BAD}
NUMBERS = {"3", repr(2**40), repr(np.int64(3_000_000_000)), "0.5", "inf"}
FLOATS = {"0.5", "-1.5", "nan", "inf", "-inf", "1e-50", "1e+39"}
EMPTY = {"None", "()", "[]", "{}"}
ARRAYS = {"float[3]", "float[7, 2]"}
# Why a value of `BAD` is accepted: the reason, the values, and a pattern of the functions and arguments.
# fmt: off
ACCEPTED = [
    ("in the interval", NUMBERS, r"(?!.*(group|autoclip|dynamic|noise|suggest|percentile)).* (absolute|clipping|eps|factor|initial|max_(norm|threshold|value)|rate|ratio|relative|(z_)?threshold|warmup_max|weight_decay|learning_rate|norm)|clip_by_group_norm max_norms|skip_spikes loss"),
    ("also 0, NaN and infinity", {"0"}, r"stable_adamw weight_decay|clip_grad_norm norm"),
    ("a norm of non-finite gradients", {"None", "nan"}, r"clip_grad_norm norm"),
    ("a loss may be negative", {"None", "0", "-1", "-1.5"}, r"skip_spikes loss"),
    ("below `max_value`", {"None", "0", "-1", "0.5", "-1.5", "-inf"}, r"clip_by_value min_value"),
    ("no bound", {"None"}, r"zclip max_norm"),
    ("in [0, 1)", {"0", "0.5"}, r".* (decay|b1|b2|target)"),
    ("a count", {"3"}, r".* (every|warmup_steps|percentile|window|init_scale|growth_interval|history|check_every|relearn_after|num_layers|seed|which|max_consecutive_skips)"),
    ("also 0", {"0"}, r".* (seed|which|ddof|num_layer_axes|num_real_microbatches)|qk_clip head_axis"),
    ("the default", {"None"}, r".* (axis_name|replica_axis|num_layers|which|max_consecutive_skips|num_layer_axes|num_real_microbatches|policy|prefix|saved|accumulator_dtype|microbatch_transform|ord|trainable|axis|taps|aux_reduction)|Monitor log|autoclip window|convert_state reduction|per_example.value_and_grad param_labels|qk_clip key|taps.tap probe|thresholds.Rule init"),
    ("no axes", {"()"}, r"(?!skip|dynamic|watch axis).* (axis_name|replica_axis)"),
    ("an order", {"inf"}, r".* ord"),
    ("axes of both leaves", {"0", "-1", "()", "[]"}, r".* axis"),
    ("positions", {"0"}, r".* argnums"),
    ("the last argument is the batch", {"-1"}, r".* batch_argnums"),
    ("no keys, no batch, nothing but the gradient", {"()", "[]"}, r"microbatched\S+ (batch|rng)_argnums|watch of"),
    ("a schedule", {"lambda x"}, r"\S*clip_by\S+ (threshold|max_norms?)|accumulate_gradients every|stable_adamw learning_rate|skip_spikes (norm|loss)"),
    ("a rule", {"rule"}, r"\S*clip_by\S+ (threshold|max_norms?)|skip_spikes (norm|loss)|thresholds.capped rule"),
    ("no group has a threshold", {"{}"}, r"clip_by_group_norm max_norms"),
    ("a transformation", {"SGD"}, r"(?!flush|apply).* (inner|tx|microbatch_transform)"),
    ("a granularity", {"axis"}, r"\S+ granularity"),
    ("a function", {"lambda x"}, r"SkipRule init|thresholds.Rule init|.* microbatch_transform|Monitor (policy|log)"),
    ("a function that runs later", {"lambda:", "optax.adam"}, r"Monitor (policy|log)"),
    ("a function without arguments", {"lambda:"}, r"diagnostics.verify_step step"),
    ("bools", {"True"}, r".* (rms|resume|rewind_on_rise|uses_params|allow_negative|counts_nonfinite|is_group|is_rms|trainable)"),
    ("strings", {"''", "'other'"}, r"diagnostics.read_log prefix|(thresholds.Rule|SkipRule) name"),
    ("a new file", {"'other'"}, r"Monitor log"),
    ("floating-point trees; a tree may have no leaves", FLOATS | EMPTY | ARRAYS, r".*(global_norm|leaf_norms) tree|clip_grad\S+ grads"),
    ("complex trees", {"1j"}, r".*(global_norm|leaf_norms) tree|clip_grad_norm grads"),
    ("norms >= 0", EMPTY | ARRAYS | {"0.5", "nan", "inf", "1e-50", "1e+39"}, r"combine_norms norms"),
    ("trees without leaves", EMPTY, r"qk_clip query|convert_state state|taps.metrics stats|.* (taps|aux_reduction)"),
    ("no names", {"()", "[]", "{}"}, r"taps.make_probes names"),
    ("names of the probes of submodules", {repr({"w": "a"})}, r"taps.make_probes names"),
    ("arrays", FLOATS | ARRAYS, r"scale_loss loss|taps.tap (x|probe)"),
    ("arrays with one token for each row", ARRAYS, r"clip_cotangent x"),
    ("steps that can be saved", {"()", "[]", "{}", "{1, 2}", "int[3]", "generator"}, r"Monitor.read saved"),
    ("numbers of a log", {"0", "nan", "inf", "1e-50", "1e+39", "float[3]", "int[3]"} | NUMBERS, r"diagnostics.noise_scale (small|big)"),
    ("smaller than the big batch", {"3", "0.5", "1e-50", "float[3]"}, r"diagnostics.noise_scale small_batch"),
    ("larger than the small batch", NUMBERS - {"3", "0.5", "inf"} | {"1e+39"}, r"diagnostics.noise_scale big_batch"),
    ("norms of a log", NUMBERS - {"inf"} | ARRAYS | {"1e-50", "1e+39", "int[3]"}, r"diagnostics.suggest_max_norm norms"),
    ("any pytree may contain the state, or a leaf that is not an array", ANY - {"SGD", "rule", "shape"}, r"(has_updated|metrics|raise_if_failed) state"),
    ("any pytree may have finite leaves", ANY - {"shape"}, r"diagnostics.nonfinite_leaves tree"),
    ("leaves that are not arrays have no row", ANY, r"Monitor params"),
    ("SGD has no state with the shapes of parameters", EMPTY | FLOATS | ARRAYS | {"True", "0", "-1", "3", repr(np.int64(3_000_000_000)), "1j", "int[3]", "bool[3]", "key", "shape"}, r"convert_state params"),
    ("any hashable object is a label", ANY - EMPTY - ARRAYS - {"[0, 'a']", repr({"w": "a"}), "{1, 2}", "lambda:", "lambda x", repr(int), "int[3]", "str[1]", "bool[3]", "key", "SGD", "optax.adam", "zscore", "rule", "axis"}, r"(granularities.group|per_example.norms) param_labels"),
    ("one label for all", {"None"}, r"per_example.norms param_labels"),
    ("the default", {"None"}, r"(?!skip_spikes.update loss).*\.update (value|loss|weight)"),
    ("a clip by a number has no state, and reads no parameters", ANY, r"clip_by_\S+\.(init|update) (state|params)|adaptive_grad_clip\.(init params|update state)"),
    ("the state of a guard or of `watch` does not depend on parameters; SGD has no state", ANY, r"(skip|watch|dynamic|round)\S*\.init params"),
    ("SGD reads no parameters", {"None"}, r"(skip|dynamic|accumulate)\S+\.update params"),
    ("a loss", FLOATS | {"True", "0", "-1", "3", repr(2**40), repr(np.int64(3_000_000_000))}, r".*\.update value"),
    ("a loss, or an argument of the optimizer", ANY - {"10**400"}, r"(?!skip_spikes).*\.update loss"),
    ("a loss, without an argument of the optimizer", FLOATS | {"True", "0", "-1", "3", repr(2**40), repr(np.int64(3_000_000_000))}, r"skip_spikes.update loss"),
    ("an argument of the optimizer", ANY, r"(?!accumulate).*\.update (weight|flush)"),
    ("a number of tokens, or NaN for a guard outside", NUMBERS | {"0", "nan"}, r"accumulate_gradients.update weight"),
    ("a bool", {"True"}, r"accumulate_gradients.update flush"),
    ("arrays, also without a gradient", EMPTY | FLOATS | ARRAYS | {"True", "0", "-1", "3", repr(np.int64(3_000_000_000)), "1j", "int[3]", "bool[3]", "key", "shape"}, r"(accumulate|stable)\S+\.init params"),
    ("a tree of floating-point leaves", EMPTY | FLOATS | ARRAYS, r"clip_by_\S+\.update updates"),
    ("complex trees", {"1j"}, r"clip_by_(global|leaf)\S+\.update updates"),
]
# Errors that name another argument, because the two contradict each other or one is derived from the other.
INSTEAD = {
    "clip_cotangent x": "axis", "qk_clip max_logits": "key", "qk_clip head_axis": "key", "apply_gradients grads": "updates",
    "per_example.norms batch_argnums": "batch", "per_example.value_and_grad batch_argnums": "batch",
    "SkipRule init": "predicate", "SkipRule should_skip": "predicate", "SkipRule advance": "predicate",
    "thresholds.Rule init": "max_norm", "thresholds.Rule update": "max_norm", "skip_spikes.update loss": "value",
}
# The transformation that checks what its caller passed on, or that uses the object.
INNER = {
    "flush": "accumulate_gradients", "apply_gradients": "accumulate_gradients", "granularities": "clip_by_norm",
    "SkipRule": "skip_if", "thresholds.Rule": "clip_by_global_norm", "diagnostics.read_log": "read_log",
}
# Errors that are not of this package: of the function or the optimizer that was passed, or of the system.
FOREIGN = [
    ("optax.adam", "a function, and its own error", r".* (param_labels|trainable|microbatch_transform|learning_rate|step|init|should_skip|advance|update|partition)"),
    ("lambda:", "a function, and its own error", r"granularities.Granularity partition"),
    ("lambda x", "a function, and its own error", r"granularities.Granularity partition|diagnostics.verify_step step"),
    ("SGD", "the optimizer does not accept the state", r"(flush|apply_gradients) tx"),
    ("''", "the path of a folder", r"diagnostics.read_log log|Monitor log"),
    ("'other'", "the path of no file", r"diagnostics.read_log log"),
]
CALLS = {
    "combine_norms": {"norms": [1.0, 2.0]}, "global_norm": {"tree": GRADS}, "leaf_norms": {"tree": GRADS},
    "clip_grad_norm": {"grads": GRADS, "max_norm": 1.0}, "clip_cotangent": {"x": W, "max_norm": 1.0},
    "qk_clip": {"query": ONES(4, 2), "key": ONES(4, 2), "max_logits": ONES(4)},
    "clip_by_block_rms": {"threshold": 1.0}, "clip_by_global_norm": {"max_norm": 1.0},
    "clip_by_group_norm": {"max_norms": {"a": 1.0}, "param_labels": "a"}, "clip_by_leaf_norm": {"max_norm": 1.0},
    "clip_by_norm": {"threshold": 1.0}, "clip_by_value": {"max_value": 1.0}, "clip_grad_value": {"grads": GRADS, "max_value": 1.0},
    "accumulate_gradients": {"inner": SGD, "every": 2},
    "microbatched_value_and_grad": {"fun": loss_of_all, "num_microbatches": 2},
    "flush": {"tx": ACCUMULATE, "state": ACCUMULATE.init(GRADS), "params": GRADS},
    "reset_accumulation": {"state": ACCUMULATE.init(GRADS)}, "has_updated": {"state": ACCUMULATE.init(GRADS)},
    "apply_gradients": {"tx": ACCUMULATE, "grads": GRADS, "state": ACCUMULATE.init(GRADS), "params": GRADS},
    "metrics": {"state": ACCUMULATE.init(GRADS)}, "stable_adamw": {"learning_rate": 1e-3},
    "skip_nonfinite": {"inner": SGD}, "skip_spikes": {"inner": SGD, "norm": 1.0},
    "skip_if": {"inner": SGD, "predicate": lambda grads, params, **extra: jnp.bool_(False)},
    "raise_if_failed": {"state": gcx.skip_nonfinite(SGD).init(GRADS)}, "dynamic_loss_scale": {"inner": SGD},
    "scale_loss": {"state": LOSS_SCALE, "loss": jnp.float32(1.0)}, "last_row": {"state": WATCH.init(GRADS)},
    "watch": {"inner": SGD}, "incidents": {"state": WATCH.init(GRADS), "params": GRADS},
    "convert_state": {"tx": ACCUMULATE, "state": SGD.init(GRADS), "params": GRADS},
    "diagnostics.noise_scale": {"small": 2.0, "big": 1.0, "small_batch": 8, "big_batch": 32},
    "diagnostics.accumulation_stats": {"state": ACCUMULATE.init(GRADS)}, "diagnostics.read_log": {"log": LOG},
    "diagnostics.suggest_max_norm": {"norms": [1.0, 2.0]}, "diagnostics.nonfinite_leaves": {"tree": GRADS},
    "diagnostics.verify_step": {"step": lambda: W}, "granularities.group": {"param_labels": "a"},
    "granularities.Granularity": {"partition": gcx.granularities.axis(0).partition},
    "per_example.norms": {"fun": loss_of_one}, "per_example.value_and_grad": {"fun": loss_of_one, "max_norm": 1.0},
    "taps.make_probes": {"names": ["a"]}, "taps.metrics": {"stats": PROBES}, "taps.tap": {"x": W, "probe": PROBES["a"]},
    "thresholds.capped": {"rule": gcx.thresholds.zscore(), "max_threshold": 1.0},
    "thresholds.Rule": {"init": lambda norm: (), "update": lambda norm, state, param_norm: (norm, state)},
    "SkipRule": {"init": lambda params: (), "should_skip": lambda grads, state, params, **extra: (jnp.bool_(False), ()), "advance": lambda state, observed, skipped: state},
    "Monitor": {"params": GRADS}, "Monitor.read": {"state": WATCH.init(GRADS)},
} | dict.fromkeys(("adagc", "adaptive_grad_clip", "autoclip", "zclip", "round_stochastically", "granularities.axis", "granularities.layer", *(f"thresholds.{x}" for x in ("ema", "mean_std", "percentile", "quantile", "zscore", "relative_to_params"))), {})
# fmt: on
# The functions of transformations; a wrapper has extra arguments.
WRAPPERS = {"accumulate_gradients", "skip_nonfinite", "skip_spikes", "watch", "dynamic_loss_scale"}
TRANSFORMATIONS = {
    name: FUNCTIONS[name](**CALLS[name])
    for name in (*sorted(WRAPPERS), "stable_adamw", "round_stochastically", "adaptive_grad_clip")
    + ("clip_by_global_norm", "clip_by_leaf_norm", "clip_by_value")
} | {"skip_spikes": gcx.skip_spikes(SGD, norm=1.0, loss=1.0)}


def update_of(tx, has_extra_args):
    def update_with_extra_args(updates, state, params, value, loss, weight, flush):
        def update(updates):
            extra_args = {"value": value, "loss": loss, "weight": weight, "flush": flush}
            return tx.update(updates, state, params, **extra_args)

        # A call outside of `jit` takes a second for `watch`.
        return jax.eval_shape(update, updates) if updates is GRADS else update(updates)

    if has_extra_args:
        return update_with_extra_args
    return lambda updates, state, params: tx.update(updates, state, params)


UPDATES = {
    f"{name}.{function}": call
    for name, tx in TRANSFORMATIONS.items()
    for function, call in (("init", tx.init), ("update", update_of(tx, name in WRAPPERS)))
}
EXTRA_ARGS = {"value": None, "loss": 1.0, "weight": None, "flush": False}
for name, tx in TRANSFORMATIONS.items():
    CALLS[f"{name}.init"] = {"params": GRADS}
    arguments = {"updates": GRADS, "state": tx.init(GRADS), "params": GRADS}
    CALLS[f"{name}.update"] = arguments | (EXTRA_ARGS if name in WRAPPERS else {})
# What users receive instead of building it; `plot_log` reads as `read_log` does, and plots.
RESULTS = {
    f"diagnostics.{x}"
    for x in ("AccumulationStats", "Incident", "Outcome", "Report", "Verification", "plot_log")
} | {"per_example.Stats"}
PUBLIC = (
    FUNCTIONS
    | CLASSES
    | UPDATES
    | {"Monitor.read": lambda state, saved: gcx.Monitor(GRADS).read(state, saved=saved)}
)


def call_and_use(name, arguments):
    """Call a function, and use what it returned: build, initialize, update or differentiate."""
    result = PUBLIC[name](**{"saved": None} | arguments if name == "Monitor.read" else arguments)
    if isinstance(result, gcx.granularities.Granularity):
        result = gcx.clip_by_norm(1.0, granularity=result)
    elif isinstance(result, gcx.thresholds.Rule):
        result = gcx.clip_by_global_norm(result)
    elif isinstance(result, gcx.SkipRule):
        result = gcx.skip_if(SGD, result)
    if isinstance(result, optax.GradientTransformation):
        jax.eval_shape(
            lambda grads: step(
                optax.with_extra_args_support(result), grads, grads, value=jnp.float32(1)
            ),
            GRADS,
        )
    elif name.startswith(("microbatched", "per_example")):
        jax.eval_shape(result, W, ONES(4, 2, 3))


def outcome(name, argument, label):
    """What a bad value leads to: "accepted", "named", or the error."""
    value = (i for i in ()) if label == "generator" else BAD[label]
    try:
        call_and_use(name, CALLS[name] | {argument: value})
    except (TypeError, ValueError, OSError, AttributeError, OverflowError) as error:
        function, _, rest = str(error).partition(": ")
        inner = INNER.get(name, INNER.get(name.split(".")[0]))
        right = {name, *name.split("."), inner}
        # `update` compares its arguments.
        default = "updates" if f"{name} {argument}".endswith(".update params") else argument
        other = INSTEAD.get(f"{name} {argument}", default)
        is_named = any(re.search(rf"`{x}\b|\b{x}=|of `{x}|at {x}", rest) for x in (argument, other))
        is_ours = isinstance(error, (TypeError, ValueError)) and " must be " in rest
        return (
            "named"
            if is_ours and function in right and is_named
            else f"{type(error).__name__}: {error}"
        )
    return "accepted"


def pairs():
    for name in CALLS:
        for parameter in inspect.signature(PUBLIC[name]).parameters.values():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                yield name, parameter.name


def expected(name, argument, label):
    def fits(pattern):
        return re.fullmatch(pattern, f"{name} {argument}")

    if any(label in labels and fits(pattern) for _, labels, pattern in ACCEPTED):
        return "accepted"
    return "foreign" if any(label == x and fits(pattern) for x, _, pattern in FOREIGN) else "named"


def check_pairs(name, argument, labels):
    found = {x: (outcome(name, argument, x), expected(name, argument, x)) for x in labels}
    # The error of a function that was passed may occur before or after a check.
    wrong = {
        x: y
        for x, y in found.items()
        if y[0] != y[1] and not (y[1] == "foreign" and y[0] != "accepted")
    }
    assert not wrong


@pytest.mark.slow
def test_every_public_callable_is_called():
    assert (PUBLIC.keys() - RESULTS) == CALLS.keys()
    for name, arguments in CALLS.items():
        call_and_use(name, arguments)


@pytest.mark.parametrize(
    ("label", "error"),
    [("nan", ValueError), ("-1.5", ValueError), ("1j", TypeError), ("'other'", TypeError)],
)
def test_a_number_out_of_range_is_a_value_error_and_another_type_a_type_error(label, error):
    for name, argument in pairs():
        is_number = [expected(name, argument, x) for x in ("0.5", "float[3]")] == [
            "accepted",
            "named",
        ]
        if is_number and expected(name, argument, label) == "named" and "labels" not in argument:
            with pytest.raises(error):
                call_and_use(name, CALLS[name] | {argument: BAD[label]})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), list(pairs()))
def test_a_bad_value_raises_with_the_function_and_the_argument_or_is_explained(
    name, argument, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # a log named 'other'
    check_pairs(name, argument, BAD)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.sampled
def test_a_sample_of_the_same(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = list(BAD)
    for i, (name, argument) in enumerate(pairs()):
        if i % 4 == part:
            check_pairs(name, argument, labels[i % 22 :: 22])


@pytest.mark.parametrize("row", ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)])
def test_a_bad_call_names_the_function_and_the_argument(row):
    name, call, error, argument, *path = row
    with pytest.raises(error) as caught:
        call(FUNCTIONS[name])
    function, _, rest = str(caught.value).partition(": ")
    assert function == name.split(".")[-1]
    assert rest.startswith(f"`{argument}") or f"of `{argument}`" in rest
    assert all(one in rest for one in path)
    assert " must be " in rest and ", got " in rest and len(rest) < 400
