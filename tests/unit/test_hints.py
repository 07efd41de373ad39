"""Likely mistakes raise errors or warnings that say what to write instead."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import gradclip_jax as gcx

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
LABELS = {"w": "a", "b": "b"}
sgd = optax.sgd(1.0)
clip, CHAIN = gcx.clip_by_global_norm(1.0), optax.chain(optax.clip(1.0), optax.adam(1.0))
accumulate, microbatched = gcx.accumulate_gradients, gcx.microbatched_value_and_grad
rules, scaled = gcx.thresholds, gcx.dynamic_loss_scale(sgd)


def step(tx, state=None, grads=PARAMS, **extra):
    state = tx.init(PARAMS) if state is None else state
    return optax.with_extra_args_support(tx).update(grads, state, PARAMS, **extra)


WATCHED = gcx.watch(sgd)


def read():
    return gcx.Monitor(PARAMS).read(step(WATCHED)[1])


def skip_rule(init=lambda p: (), skip=lambda g, s, p: (False, ()), advance=lambda s, o, k: s):
    return lambda: step(gcx.skip_if(sgd, gcx.SkipRule(init, skip, advance)))


def restored(tx):
    """A step after a checkpoint restored the tuples of a state as lists."""

    def is_tuple(node):
        return type(node) is tuple

    state = jax.tree.map(lambda x: list(x) if is_tuple(x) else x, tx.init(PARAMS), is_leaf=is_tuple)
    return step(tx, state)


def clipped_by(**arguments):
    return lambda: step(gcx.clip_by_norm(1.0, **arguments))


def clipped_to(init=lambda norm: (), update=lambda norm, state, param_norm: (norm, state)):
    return lambda: step(gcx.clip_by_global_norm(rules.Rule(init, update)))


def loss_of_batch(w, x):
    return jnp.mean((x @ w)[:, 0])


# The call, and what the error names: the argument, or the line to write.
# fmt: off
MISTAKES = {
    "params before state": (lambda: gcx.apply_gradients(gcx.skip_nonfinite(sgd), PARAMS, PARAMS, gcx.skip_nonfinite(sgd).init(PARAMS)), "`(state|params)`.*state, params"),
    "params before the state of Optax": (lambda: gcx.apply_gradients(sgd, PARAMS, PARAMS, sgd.init(PARAMS)), "^apply_gradients: `state`.*state, params"),
    "limit by position": (lambda: gcx.skip_nonfinite(sgd, 5), "max_consecutive_skips="),
    "norm by position": (lambda: gcx.skip_spikes(sgd, 10.0), "norm="),
    "every_k_schedule": (lambda: accumulate(sgd, every_k_schedule=2), "Pass `every=`"),
    "mask": (lambda: gcx.skip_nonfinite(sgd, mask={"w": True, "b": False}), "Pass `trainable=`"),
    "norm_type": (lambda: gcx.clip_grad_norm(PARAMS, 1.0, norm_type=2), "Pass `ord=`"),
    "clipnorm": (lambda: gcx.clip_by_global_norm(clipnorm=1.0), "max_norm"),
    "state without loss": (lambda: step(gcx.skip_spikes(sgd, norm=1.0, loss=1.0), gcx.skip_spikes(sgd, norm=1.0).init(PARAMS), value=1.0), "`state`.*convert_state"),
    "list in a guard": (lambda: restored(gcx.skip_nonfinite(CHAIN)), "^skip_nonfinite: `state`.*list"),
    "list in an accumulation": (lambda: restored(accumulate(CHAIN, 2)), "^accumulate_gradients: `state`.*list"),
    "stats of a vmapped state": (lambda: gcx.diagnostics.accumulation_stats(jax.vmap(accumulate(sgd, 2).init)({"w": jnp.ones((3, 2))})), r"`state`.*vmap.*x\[i\]"),
    "max norm of a report": (lambda: gcx.diagnostics.suggest_max_norm(read()), "`norms`.*monitor.rows"),
    "max norm of a monitor": (lambda: gcx.diagnostics.suggest_max_norm(gcx.Monitor(PARAMS)), "`norms`.*monitor.rows"),
    "plot of a report": (lambda: gcx.diagnostics.plot_log(read()), r"`log`.*plot_log\(monitor\)"),
    "plot of rows": (lambda: gcx.diagnostics.plot_log(read().rows), r"`log`.*plot_log\(monitor\)"),
    "read in jit": (lambda: jax.jit(read)(), "Monitor.read: `state`.*outside `jit`.*Return"),
    "incidents in jit": (lambda: jax.jit(lambda: gcx.incidents(WATCHED.init(PARAMS), PARAMS))(), "incidents: `state`.*outside `jit`.*Return"),
    "raise_if_failed in jit": (lambda: jax.jit(gcx.raise_if_failed)(gcx.skip_nonfinite(sgd).init(PARAMS)), "`state`.*outside `jit`.*guard_failed"),
    "verify_step in jit": (lambda: jax.jit(lambda x: gcx.diagnostics.verify_step(jnp.sin, x))(1.0), r"`args`.*outside `jit`.*verify_step\("),
    "max norm in jit": (lambda: jax.jit(gcx.diagnostics.suggest_max_norm)(jnp.ones(4)), "`norms`.*outside `jit`.*monitor.rows"),
    "watch(of=None)": (lambda: gcx.watch(sgd, of=None), r"`of`.*of=\("),
    "arity of should_skip": (skip_rule(skip=lambda g, s: (False, ())), r"`predicate`.*\(grads, state, params, \*\*extra_args\)"),
    "result of should_skip": (skip_rule(skip=lambda g, s, p: False), "`predicate`.*should_skip.*Return"),
    "shape of should_skip": (skip_rule(skip=lambda g, s, p: (jnp.zeros(3, bool), ())), "`predicate`.*jnp.any"),
    "arity of advance": (skip_rule(advance=lambda s: s), r"`predicate`.*\(state, observed, skipped\)"),
    "shape of advance": (skip_rule(init=lambda p: jnp.zeros(()), advance=lambda s, o, k: jnp.ones(3)), "`predicate`.*init"),
    "arity of init": (skip_rule(init=lambda: ()), "`predicate`.*init"),
    "arity of a predicate": (lambda: step(gcx.skip_if(sgd, lambda grads: True)), "`predicate`.*grads, params"),
    "arity of a reaction": (clipped_by(reaction=lambda norm: 1.0), "`reaction`.*norm, threshold"),
    "tuple of a reaction": (clipped_by(reaction=lambda norm, threshold: (2.0, 1.0)), "`reaction`.*Return"),
    "vector of a reaction": (clipped_by(reaction=lambda norm, threshold: jnp.ones(3), granularity="leaf"), "`reaction`.*Return"),
    "factor above 1": (clipped_by(reaction=lambda norm, threshold: 16.7), "`reaction`"),
    "factor below 0": (clipped_by(reaction=lambda norm, threshold: -1.0), "`reaction`"),
    "factor of an example": (lambda: gcx.per_example.value_and_grad(jnp.dot, 1.0, reaction=lambda norm, threshold: 16.7)(jnp.ones(2), jnp.ones((3, 2))), "`reaction`"),
    "axis uncalled": (clipped_by(granularity=gcx.granularities.axis), r"`granularity`.*axis\("),
    "layer uncalled": (clipped_by(granularity=gcx.granularities.layer), r"`granularity`.*layer\("),
    "arity of Rule.update": (clipped_to(update=lambda norm, state: (norm, state)), r"`max_norm`.*update.*\(norm, state, param_norm\)"),
    "arity of Rule.init": (clipped_to(init=lambda: ()), r"`max_norm`.*init.*\(zeros\)"),
    "rule of a guard": (lambda: step(gcx.skip_spikes(sgd, norm=rules.Rule(None, lambda n, s, p: n))), "`norm`.*Rule.update"),
    "vector of a rule": (clipped_to(update=lambda n, s, p: (jnp.ones(5), s)), "`max_norm`.*[Rr]ule"),
    "string of a rule": (clipped_to(update=lambda n, s, p: ("1", s)), "`max_norm`.*[Rr]ule"),
    "state of a rule": (clipped_to(init=lambda n: n, update=lambda n, s, p: (n, (s, s))), "`max_norm`.*[Rr]ule"),
    "shape of the state of a rule": (clipped_to(init=lambda n: n, update=lambda n, s, p: (n, jnp.ones(3))), "`max_norm`.*init"),
    "schedule uncalled": (lambda: step(gcx.stable_adamw(optax.constant_schedule)), "`learning_rate`"),
    "negative norms": (lambda: gcx.combine_norms([-3.0, 4.0]), "`norms"),
    "negative array of norms": (lambda: gcx.combine_norms(jnp.array([-3.0, 4.0]), ord=1), "`norms"),
    "loss of a whole batch": (lambda: gcx.per_example.value_and_grad(loss_of_batch, 1.0)(jnp.ones((2, 1)), jnp.ones((3, 2))), r"x\[None\]"),
    "nonfinite_leaves in jit": (lambda: jax.jit(gcx.diagnostics.nonfinite_leaves)(PARAMS), "`tree`.*outside `jit`.*Return"),
    "pairwise aux": (lambda: microbatched(lambda p, x: (p * x.sum(), x[:, None] * x), 2, has_aux=True)(1.0, jnp.ones(4)), "`aux_reduction`"),
    "integer with too many digits": (lambda: gcx.clip_by_global_norm(10**5000), "^clip_by_global_norm: `max_norm`.*bits"),
    "large integer of a rule": (clipped_to(update=lambda n, s, p: (10**400, s)), "^clip_by_global_norm: `max_norm`"),
    "string as the state of a rule": (clipped_to(init=lambda norm: "a"), "^clip_by_global_norm: `init`"),
    "string as the state of a guard": (skip_rule(init=lambda p: "a"), "^skip_if: `init`"),
    "transformation of micro-batches uncalled": (lambda: microbatched(lambda p, x: p * x.sum(), 2, microbatch_transform=optax.adam)(1.0, jnp.ones(4)), "`microbatch_transform`.*Call"),
    "norms of one step for two steps": (lambda: gcx.diagnostics.noise_scale([3.0, 5.0], [1.5], 8, 32), "^noise_scale: .*equal length"),
    "weight of flush": (lambda: gcx.flush(accumulate(sgd, 2), accumulate(sgd, 2).init(PARAMS), PARAMS, weight=1.0), "`weight`"),
    "axis of heads": (lambda: gcx.qk_clip(jnp.ones((4, 2)), None, jnp.ones(4), head_axis="a"), "`head_axis`"),
    "logits": (lambda: gcx.qk_clip(jnp.ones((4, 2)), None, "a"), "`max_logits`"),
}
# fmt: on


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.sampled
def test_a_likely_mistake_raises_an_error_that_says_what_to_write(name):
    call, wanted = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        call()
    lines = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert "Equinox" not in lines[0]
    assert any(re.search(wanted, line) for line in lines), lines


AXES = {
    "clip": lambda name: step(gcx.clip_by_global_norm(1.0, axis_name=name)),
    "leaf": lambda name: step(gcx.clip_by_leaf_norm(1.0, axis_name=name)),
    "norm": lambda name: gcx.global_norm(PARAMS, axis_name=name),
    "guard": lambda name: step(gcx.skip_nonfinite(sgd, axis_name=name)),
    "watch": lambda name: step(gcx.watch(sgd, axis_name=name)),
    "replicas": lambda name: step(gcx.watch(sgd, replica_axis=name)),
    "per_example": lambda name: gcx.per_example.value_and_grad(jnp.dot, 1.0, axis_name=name)(
        jnp.ones(2), jnp.ones((3, 2))
    ),
}


@pytest.mark.parametrize("name", AXES)
def test_the_name_of_an_axis_that_is_not_mapped_is_named_with_its_argument(name):
    with pytest.raises((NameError, ValueError), match="`(axis_name|replica_axis)`.*nope"):
        AXES[name]("nope")


def donated(tx):
    state = tx.init(PARAMS)
    jax.tree.map(lambda x: x.delete(), state)
    return state


@pytest.mark.parametrize("name", ["zclip", "autoclip", "round_stochastically", "stable_adamw"])
def test_a_donated_state_of_other_transformations_is_named_as_such(name):
    tx = gcx.stable_adamw(1.0) if name == "stable_adamw" else getattr(gcx, name)()
    with pytest.raises(ValueError, match="donated"):
        step(tx, donated(tx))


@pytest.mark.parametrize("argument", ["grads", "state", "params"])
def test_apply_gradients_names_a_donated_argument_of_an_optimizer_of_optax(argument):
    tx = optax.adam(1.0)
    arguments = {"grads": PARAMS, "state": tx.init(PARAMS), "params": PARAMS}
    arguments[argument] = jax.tree.map(jnp.array, arguments[argument])
    jax.tree.map(lambda x: x.delete(), arguments[argument])
    with pytest.raises(ValueError, match=f"^apply_gradients: `{argument}`.*donated"):
        gcx.apply_gradients(tx, **arguments)


class Pair:
    """A pytree whose class does not define equality."""

    def __init__(self, *parts):
        self.parts = parts


jax.tree_util.register_pytree_node(Pair, lambda x: (x.parts, None), lambda _, xs: Pair(*xs))


def test_the_state_of_a_rule_may_be_of_any_pytree_class():
    init, skip, advance = lambda p: Pair(0.0, 1.0), lambda g, s, p: (False, ()), lambda s, o, k: s
    step(gcx.skip_if(sgd, gcx.SkipRule(init, skip, advance)))


def test_labels_in_a_dict_for_params_in_a_frozen_dict_say_what_to_do():
    frozen = pytest.importorskip("flax.core").FrozenDict
    with pytest.raises(TypeError, match="FrozenDict"):
        gcx.clip_by_group_norm(1.0, LABELS).init(frozen(PARAMS))


def test_a_flax_model_with_dropout_says_how_to_split_it():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    with pytest.raises(TypeError, match="^microbatched_value_and_grad: .*nnx.split"):
        microbatched(lambda model, x: jnp.mean(model(x)), 2)(model, jnp.ones((4, 2)))


def test_integer_leaves_are_treated_alike_by_per_example_and_micro_batches():
    params = {"w": jnp.float32(1.0), "i": jnp.int32(1)}

    def result(fun):
        try:
            return fun(params, jnp.ones(4))[1]["i"].dtype
        except TypeError as error:
            assert "args[0]['i']" in str(error)
            return "raises"

    def loss(params, x):
        return params["w"] * jnp.mean(x)

    assert result(microbatched(loss, 2)) == result(gcx.per_example.value_and_grad(loss, 1.0))


def test_raise_if_failed_names_the_guard_the_count_and_the_leaves():
    def overflow(grads, state, params=None):
        return grads, {**state, "w": state["w"] / 0}

    inner = optax.GradientTransformation(lambda params: params, overflow)
    tx = gcx.skip_nonfinite(inner, max_consecutive_skips=2)
    _, state = step(tx)
    gcx.raise_if_failed(state)
    for _ in range(2):
        _, state = step(tx, state, {**PARAMS, "w": jnp.array([1.0, jnp.nan])})
    with pytest.raises(RuntimeError, match=r"(?s): 2 consecutive.*skip_nonfinite.*2.*\['w'\]"):
        gcx.raise_if_failed(state)
    _, state = step(tx, state)
    with pytest.raises(RuntimeError, match="earlier step.*steps were applied.*skip_nonfinite: 2"):
        gcx.raise_if_failed(state)


def test_the_sum_of_a_window_that_was_dropped_is_not_reported_as_non_finite():
    tx = accumulate(gcx.skip_nonfinite(sgd, max_consecutive_skips=1), 1 + 1)
    _, state = step(tx, None, {**PARAMS, "w": jnp.array([1.0, jnp.nan])})
    _, state = step(tx, state)
    assert gcx.diagnostics.nonfinite_leaves(state.accumulation.gradient.total)
    with pytest.raises(RuntimeError, match="The state is finite"):
        gcx.raise_if_failed(state)


def constant_rule(name):
    return rules.Rule(jnp.zeros_like, lambda norm, state, _: (1.0, state), name=name)


def skip_rule(name):
    return gcx.SkipRule(lambda _: jnp.zeros(()), lambda *_: (False, ()), lambda x, *_: x, name)


@pytest.mark.parametrize(
    "build",
    [
        lambda name: gcx.skip_spikes(sgd, norm=constant_rule(name)),
        lambda name: gcx.skip_if(sgd, skip_rule(name)),
    ],
)
def test_the_state_of_another_rule_raises(build):
    with pytest.raises(TypeError, match="`state`.*rule 'new'.*convert_state"):
        step(build("new"), build("old").init(PARAMS))


CLIPS = {
    "nested": optax.chain(optax.chain(clip)),
    "named": optax.named_chain(("clip", clip)),
    "masked": optax.masked(clip, {"w": True, "b": False}),
    "inject": optax.inject_hyperparams(gcx.clip_by_global_norm)(1.0),
    "watch": gcx.watch(clip),
    "value": gcx.clip_by_value(1.0),
}
SCALED_CLIPS = {name: optax.chain(tx, scaled) for name, tx in CLIPS.items()} | {
    "in an accumulation": accumulate(optax.chain(clip, scaled), 2),
    "in a watch": gcx.watch(optax.chain(clip, scaled)),
}


@pytest.mark.filterwarnings("ignore:A clip receives")  # `watch` reads the metrics
@pytest.mark.parametrize("name", SCALED_CLIPS)
@pytest.mark.sampled
def test_a_clip_of_scaled_gradients_is_found_in_any_chain(name):
    """Its threshold would be that of the scaled gradient, 65,536 times too small."""
    tx = SCALED_CLIPS[name]
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match="clip"):
        gcx.scale_loss(state, jnp.float32(1.0))
    with pytest.raises(TypeError, match="clip"):
        gcx.apply_gradients(tx, PARAMS, state, PARAMS)
    # `update` of a chain does not see the clip; a program that scales the loss reads the metric.
    state = step(tx)[1]
    with pytest.warns(UserWarning, match="clip") as found:
        gcx.metrics(state)
    assert found[0].filename == __file__


def test_the_states_of_two_optimizers_in_a_tuple_are_told_from_a_chain_in_the_hint():
    states = clip.init(PARAMS), scaled.init(PARAMS)
    with pytest.raises(TypeError, match="two optimizers, pass only the one with the loss scale"):
        gcx.scale_loss(states, jnp.float32(1.0))
    gcx.scale_loss(states[1], jnp.float32(1.0))


@pytest.mark.parametrize("names", [("clip", "scale"), ("scale", "the last clip")])
def test_a_clip_in_the_named_chain_of_a_loss_scale_warns(names):
    """The state of a named chain does not contain its order."""
    parts = {"clip": clip, "scale": scaled, "the last clip": clip}
    state = optax.named_chain(*[(name, parts[name]) for name in names]).init(PARAMS)
    for call in (gcx.metrics, lambda state: gcx.scale_loss(state, jnp.float32(1.0))):
        with pytest.warns(UserWarning, match="named chain"):
            call(state)


GROUPS = optax.partition({"x": clip, "y": scaled}, {"w": "x", "b": "y"})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "tx",
    [gcx.dynamic_loss_scale(optax.chain(clip, sgd)), optax.chain(scaled, clip), GROUPS],
    ids=["inside", "after", "in another group"],
)
def test_a_clip_of_unscaled_gradients_is_allowed(tx):
    state = tx.init(PARAMS)
    gcx.scale_loss(state, jnp.float32(1.0))
    gcx.metrics(gcx.apply_gradients(tx, PARAMS, state, PARAMS)[1])


WRAPPERS = {"accumulate": lambda tx: accumulate(tx, 2), "guard": gcx.skip_nonfinite}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.sampled
def test_a_wrapper_around_only_clips_warns_that_the_optimizer_runs_outside(wrapper, name):
    with pytest.warns(UserWarning, match="outside"):
        step(optax.chain(WRAPPERS[wrapper](CLIPS[name]), optax.adamw(1e-3)))


FACTORIES = [getattr(rules, x) for x in ("zscore", "mean_std", "percentile", "quantile", "ema")]
FACTORIES += [rules.relative_to_params, rules.capped]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda x: x.__name__)
def test_a_factory_of_rules_that_was_not_called_raises_with_the_call(factory):
    with pytest.raises(TypeError, match=rf"`max_norm` must be .*{factory.__name__}\("):
        gcx.clip_by_leaf_norm(factory)
