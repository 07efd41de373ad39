"""Bad calls and the error of each: its type, the function, the argument and the leaf that it names.

The wording of errors is free to change. `ROWS` lists calls of one function each, and `KINDS` the bad
values of arguments that several functions have. Every public function has a row in one of them.
"""

import inspect
import math
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
    ("clip_cotangent", lambda f: f(W, 1.0, axis=2), ValueError, "axis"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(2, 2), ONES(4, 1)), ValueError, "max_logits"),
    ("qk_clip", lambda f: f(ONES(4, 2), ONES(3, 2), ONES(4)), ValueError, "key"),
    ("stable_adamw", lambda f: f(1e-3).update(W, f(1e-3).init(W)), ValueError, "params"),
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
    ("clip_by_group_norm", lambda f: f([1.0], "a"), TypeError, "max_norms"),
    ("clip_by_group_norm", lambda f: updated(f({"a": 1.0, "head": 1.0}, "a")), ValueError, "max_norms", "'head'"),
    ("adaptive_grad_clip", lambda f: f(0.1).update(GRADS, f(0.1).init(GRADS), None), ValueError, "params"),
    ("adaptive_grad_clip", lambda f: f(axis=(0, -2)).update({"w": W}, None, {"w": W}), ValueError, "axis", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f().update(GRADS, None, {**GRADS, "w": ONES(2, 5)}), TypeError, "updates", "updates['w']"),
    ("adaptive_grad_clip", lambda f: f().update({"b": GRADS["b"]}, None, GRADS), TypeError, "updates", "params['w']"),
    ("clip_by_value", lambda f: f(1.0, min_value=1.0), ValueError, "min_value"),
    ("autoclip", lambda f: optax.inject_hyperparams(f)(50.0, 8).init(W), TypeError, "window"),
    ("autoclip", lambda f: f().update(W, gcx.zclip().init(W)), TypeError, "state"),
    ("accumulate_gradients", lambda f: f(SGD, 2, accumulator_dtype={"w": "f4"}), TypeError, "accumulator_dtype"),
    ("accumulate_gradients", lambda f: f(optax.chain(gcx.clip_by_value(1.0), f(SGD, 2)), 3).init(GRADS), TypeError, "inner"),
    ("accumulate_gradients", lambda f: f(SGD, lambda step: 0).init(GRADS), ValueError, "every"),
    ("accumulate_gradients", lambda f: f(SGD, 2).update({"a": [W]}, f(SGD, 2).init({"a": (W,)}), {"a": (W,)}), TypeError, "updates"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), weight=1j), TypeError, "weight"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), weight=-1), ValueError, "weight"),
    ("accumulate_gradients", lambda f: step(f(SGD, 2), flush=np.array([True])), TypeError, "flush"),
    ("round_stochastically", lambda f: f().update(GRADS, f().init(GRADS)), ValueError, "params"),
    ("round_stochastically", lambda f: f().update(GRADS, f().init(GRADS), HALF), TypeError, "params", "params['w']"),
    ("skip_nonfinite", lambda f: f(gcx.accumulate_gradients(gcx.dynamic_loss_scale(SGD), 2)).init(W), TypeError, "inner"),
    ("microbatched_value_and_grad", lambda f: f(jnp.sum, 4, num_real_microbatches=5), ValueError, "num_real_microbatches"),
    ("microbatched_value_and_grad", lambda f: jax.jit(lambda n: f(loss_of_all, n))(2), TypeError, "num_microbatches"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2, aux_reduction={"a": "maen"}), ValueError, "aux_reduction"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: 10), 2, has_aux=True)(1.0, ONES(4)), TypeError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(with_aux(lambda x: x.reshape(-1, 2).sum(1)), 2, has_aux=True, aux_reduction="concatenate")(1.0, ONES(8)), TypeError, "aux_reduction", "aux['t']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 4)(1.0, {"a": ONES(8), "b": ONES(9)}), ValueError, "batch", "args[1]['b']"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2)(1.0, x=ONES(4)), TypeError, "args"),
    ("microbatched_value_and_grad", lambda f: f(loss_of_all, 2, rng_argnums=None)(1.0, ONES(4)), TypeError, "rng_argnums"),
    ("skip_if", lambda f: step(f(SGD, gcx.SkipRule(lambda p: 0.0, lambda *a: (False, ()), lambda *a: ONES(3)))), TypeError, "predicate"),
    ("skip_if", lambda f: step(f(SGD, gcx.SkipRule(lambda p: jnp.int32(0), lambda *a: (False, ()), lambda *a: 0.5))), TypeError, "predicate"),
    ("clip_by_global_norm", lambda f: step(f(gcx.thresholds.Rule(lambda n: jnp.int32(0), lambda n, s, p: (n, s + 0.5)))), TypeError, "max_norm"),
    ("microbatched_value_and_grad", lambda f: f(lambda p, x: (p, x), 2)(1.0, ONES(4)), TypeError, "fun"),
    ("microbatched_value_and_grad", lambda f: f(lambda p, x: (p, x), 2, has_weight=True)(1.0, ONES(4)), TypeError, "weight"),
    ("has_updated", lambda f: f(gcx.accumulate_gradients(SGD, 2)), TypeError, "state"),
    ("skip_spikes", lambda f: step(gcx.skip_nonfinite(f(SGD, loss=4.0))), TypeError, "value"),
    ("skip_nonfinite", lambda f: step(f(SGD), {"a": None, "b": W}, {"a": W, "b": W}), TypeError, "updates", "eqx.filter"),
    ("combine_norms", lambda f: f([3]), TypeError, "norms", "norms[0]"),
    ("skip_spikes", lambda f: updated(f(SGD, norm=lambda step: "1")), TypeError, "norm"),
    ("skip_spikes", lambda f: f(SGD, norm=gcx.thresholds.relative_to_params()), ValueError, "norm"),
    ("skip_spikes", lambda f: f(SGD), ValueError, "norm"),
    ("skip_nonfinite", lambda f: step(f(SGD), value=ONES(3)), TypeError, "value"),
    ("skip_nonfinite", lambda f: f(SGD, axis_name=()), ValueError, "axis_name"),
    ("dynamic_loss_scale", lambda f: f(SGD, axis_name=()), ValueError, "axis_name"),
    ("skip_spikes", lambda f: f(SGD, norm=1.0, axis_name=()), ValueError, "axis_name"),
    ("skip_spikes", lambda f: f(SGD, loss=1.0).update(W, f(SGD, loss=1.0).init(W)), TypeError, "value"),
    ("skip_spikes", lambda f: f(SGD, loss=1.0).update(W, f(SGD, loss=1.0).init(W), value=ONES(3)), TypeError, "value"),
    ("skip_spikes", lambda f: f(SGD, loss=gcx.thresholds.relative_to_params()), ValueError, "loss"),
    ("skip_spikes", lambda f: f(gcx.dynamic_loss_scale(SGD), loss=1.0).init(W), TypeError, "inner"),
    ("dynamic_loss_scale", lambda f: f(f(SGD)).init(W), TypeError, "inner"),
    ("dynamic_loss_scale", lambda f: f(SGD, init_scale=0.5), ValueError, "init_scale"),
    ("scale_loss", lambda f: f((LOSS_SCALE, LOSS_SCALE), 1.0), TypeError, "state"),
    ("metrics", lambda f: f(gcx.clip_by_global_norm(1.0)), TypeError, "state"),
    ("raise_if_failed", lambda f: f(gcx.skip_nonfinite(SGD)), TypeError, "state"),
    ("convert_state", lambda f: f(optax.chain(ADAM, optax.trace(0.9)), ADAM.init(W), W), TypeError, "state"),
    ("convert_state", lambda f: f(SGD, types.SimpleNamespace(opt_state=SGD.init(W)), W), TypeError, "state", "`.opt_state`"),
    ("convert_state", lambda f: f(ADAM, ADAM.init({**GRADS, "b": W}), GRADS), TypeError, "params", "state[0].mu['b']"),
    ("convert_state", lambda f: f(gcx.accumulate_gradients(SGD, 2), MULTI_STEPS.init({"w": W}), GRADS), TypeError, "state", "state.acc_grads"),
    ("convert_state", lambda f: f(SGD, MULTI_STEPS.update(W, MULTI_STEPS.init(W))[1], W), ValueError, "state", "state.mini_step"),
    ("diagnostics.verify_step", lambda f: f(W, W), TypeError, "step"),
    ("diagnostics.suggest_max_norm", lambda f: f([0.0, 0.0]), ValueError, "norms"),
    ("watch", lambda f: f(SGD, of="gradient"), ValueError, "of"),
    ("watch", lambda f: f(SGD).update(GRADS, f(SGD).init(GRADS)), ValueError, "params"),
    ("watch", lambda f: step(f(SGD), GRADS, GRADS, value=ONES(2)), TypeError, "value"),
    ("watch", lambda f: step(f(SGD), batch_id=np.int64(2**31)), ValueError, "batch_id"),
    ("watch", lambda f: f(SGD, taps=ONES(3)).init(GRADS), ValueError, "taps"),
    ("watch", lambda f: step(f(SGD, taps={"a": PROBE}), taps={"b": PROBE}), ValueError, "taps"),
    ("watch", lambda f: f(SGD).update(GRADS, f(SGD).init({"w": W}), GRADS), ValueError, "state"),
    ("watch", lambda f: f(SGD, trainable={"w": 1}), TypeError, "trainable", "trainable['w']"),
    ("last_row", lambda f: f(SGD.init(GRADS)), TypeError, "state"),
    ("diagnostics.read_log", lambda f: f([]), ValueError, "log"),
    ("diagnostics.read_log", lambda f: f([{"g/loss": 1.0, "d/loss": 1.0}]), ValueError, "log", "prefix='d/'"),
    ("diagnostics.noise_scale", lambda f: f(1.0, 2.0, 32, 8), ValueError, "small_batch"),
    ("diagnostics.plot_log", lambda f: f([]), ValueError, "log"),
    ("diagnostics.plot_log", lambda f: f([{"accuracy": 1.0}]), ValueError, "log"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, param_labels="all"), TypeError, "max_norm"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, {"x": 1.0}, param_labels={"w": "x", "b": "y"})(GRADS, EXAMPLES), ValueError, "max_norm", "'y'"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, {"x": 1.0}, param_labels={"w": "x"})(GRADS, EXAMPLES), TypeError, "param_labels"),
    ("per_example.value_and_grad", lambda f: f(loss_of_one, 1.0, argnums=1)(W, EXAMPLES), ValueError, "argnums"),
    ("per_example.value_and_grad", lambda f: f(lambda p, x: (0.0, x), 1.0, has_weight=True)(W, EXAMPLES), TypeError, "fun"),
    ("per_example.norms", lambda f: f(lambda p, e: 0.0)(1.0, {"key": jax.random.key(0), "x": ONES(3, 2)}), ValueError, "batch", "args[1]['key']", "leading batch axis", "jax.random.split"),
    ("per_example.norms", lambda f: f(lambda p, e: 0.0)(1.0, {"x": ONES(3, 2), "y": ONES(2)}), ValueError, "batch", "args[1]['x']", "args[1]['y']"),
    ("taps.tap", lambda f: f(COMPLEX, PROBE), TypeError, "x"),
    ("taps.metrics", lambda f: f({"a": jnp.zeros(3)}), ValueError, "stats", "stats['a']"),
]
# fmt: on

# Kind of argument: its names, values that raise a ValueError, and values that raise a TypeError.
# Every function with an argument of such a name is called with all of them.
# fmt: off
KINDS = {
    "positive number": (
        (
            "absolute", "clipping", "eps", "factor", "init_scale", "initial", "learning_rate",
            "max_norm", "max_threshold", "max_value", "rate", "ratio", "relative",
            "threshold", "warmup_max", "z_threshold",
        ),
        [0, -1.0, 1e-50, 1e39, math.nan, -math.inf, np.float32(-1)], ["1", True, np.ones(3), 1j],
    ),
    "number in [0, 1)": (
        ("b1", "b2", "decay"),
        [1.0, -0.1, math.nan], ["0.9", np.ones(2)],
    ),
    "share": (("target",), [-0.1, 1.1, math.nan], ["0.9", True, np.ones(2)]),
    "percentile": (("percentile",), [101, -1, 0.9, math.nan], ["half", GRADS]),
    "count": (
        (
            "check_every", "every", "growth_interval", "history", "max_consecutive_skips",
            "num_microbatches", "relearn_after", "warmup_steps", "window",
        ),
        [0, -1], [1.5, "1", np.array([2])],
    ),
    "count from zero": (
        ("ddof", "num_layer_axes", "num_real_microbatches", "seed"), [-1], [1.5, "1"],
    ),
    "choice": (
        ("check", "granularity", "nonfinite", "reaction", "reduction"),
        ["other", 3, W], [],
    ),
    "order": (("ord",), [0, -1.0, 3, math.nan, "2", np.ones(2)], [W]),
    "axis": (("axis",), [], ["0", 1.5, True, [0, [1]]]),
    "axis name": (("axis_name", "replica_axis"), [], [["data"], 0, ("data", 1), {"data"}, b"data"]),
    "dtype": (("accumulator_dtype",), [], ["float33", jnp.int32, jnp.complex64]),
    "function": (("fun",), [], [GRADS]),
    "transformation": (("inner", "tx"), [], ["adam", optax.adam, GRADS, 2]),
    "state": (("state",), [], [SGD, gcx.clip_by_value(1.0)]),
}
# fmt: on
UNLIKE = [  # they take other values, or another argument is checked first
    ("apply_gradients", "state"),
    ("clip_by_norm", "reaction"),
    ("convert_state", "state"),
    ("has_updated", "state"),
    ("metrics", "state"),
    ("raise_if_failed", "state"),
]
REQUIRED = (
    dict.fromkeys(("grads", "params", "tree"), GRADS)
    | dict.fromkeys(("key", "query", "x"), W)
    | dict.fromkeys(("learning_rate", "loss", "rule", "threshold"), 1.0)
    | dict.fromkeys(("max_norm", "max_threshold", "max_value"), 1.0)
    | dict.fromkeys(("every", "num_microbatches"), 2)
    | dict.fromkeys(("inner", "tx"), SGD)
    | {"fun": loss_of_one, "max_norms": {"a": 1.0}, "param_labels": "a"}
    | {"log": [{"loss": 1.0}], "max_logits": jnp.ones(3), "names": ["a"], "norms": [1.0]}
    | {"state": (), "predicate": bool}
)
OTHERS = {"skip_spikes": {"norm": 1.0}}  # one of `norm` and `loss` is required

# Nothing can be wrong about their arguments, or a type checker says it.
WITHOUT = {
    "Monitor",
    "taps.make_probes",
    "diagnostics.nonfinite_leaves",
    "diagnostics.AccumulationStats",
    "diagnostics.Incident",
    "diagnostics.Outcome",
    "diagnostics.Report",
    "diagnostics.Verification",
    "granularities.Granularity",
    "granularities.group",  # its labels are checked against a tree: see `clip_by_norm`
    "per_example.Stats",
    "SkipRule",
    "thresholds.Rule",
}


def arguments_by_kind():
    """Each argument of `KINDS` of each public function, with the name of its kind."""
    for name in sorted(FUNCTIONS):
        parameters = inspect.signature(FUNCTIONS[name]).parameters
        for kind, (arguments, *_) in KINDS.items():
            for argument in arguments:
                if argument in parameters and (name, argument) not in UNLIKE:
                    yield name, argument, kind


def test_every_public_function_has_a_row():
    listed = {name for name, *_ in (*ROWS, *arguments_by_kind())}
    assert (FUNCTIONS | CLASSES).keys() - WITHOUT == listed


@pytest.mark.parametrize(("name", "argument", "kind"), list(arguments_by_kind()))
def test_a_bad_value_raises_in_every_function_with_the_argument(name, argument, kind):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    required = [x.name for x in parameters if x.default is x.empty and x.kind != x.VAR_KEYWORD]
    others = {x: REQUIRED[x] for x in required} | OTHERS.get(name, {})
    _, out_of_range, of_another_type = KINDS[kind]
    none = [None] if argument in required else []
    for values, error in ((out_of_range, ValueError), (of_another_type + none, TypeError)):
        for value in values:
            with pytest.raises(error, match=f"^{name.split('.')[-1]}: `{argument}` must be "):
                function(**others | {argument: value})


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
