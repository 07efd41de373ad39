"""Configs: everything public with hyper-parameters goes to JSON and comes back the same."""

import inspect
import json
import math
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

SGD = optax.sgd(0.5, momentum=0.9)
LABELS = {"a": "x", "b": "y"}
TUPLES = ({"a": 1.0}, {"b": 0.5})


class Case:
    """A config, and the direct construction that it must equal."""

    def __init__(self, name, arguments, direct, inner=None):
        self.config = gcx.TransformConfig(name, arguments)
        self.direct = direct
        self.inner = inner


# One case for each public transformation at least.
CASES = [
    Case("clip", {"max_delta": 0.5}, lambda: gcx.clip(0.5)),
    Case(
        "clip",
        {"max_delta": 0.5, "min_delta": -math.inf},
        lambda: gcx.clip(0.5, min_delta=-math.inf),
    ),
    Case("clip_by_global_norm", {"max_norm": 1.0}, lambda: gcx.clip_by_global_norm(1.0)),
    Case(
        "clip_by_global_norm",
        {"max_norm": np.float32(1.0), "ord": jnp.inf, "nonfinite": "zero"},
        lambda: gcx.clip_by_global_norm(1.0, ord=jnp.inf, nonfinite="zero"),
    ),
    Case("zero_large_norm", {"max_norm": 2.0}, lambda: gcx.zero_large_norm(2.0)),
    Case("clip_by_leaf_norm", {"max_norm": 1.0}, lambda: gcx.clip_by_leaf_norm(1.0)),
    Case(
        "clip_by_leaf_norm",
        {
            "max_norm": {"a": {"name": "quantile", "initial": 0.1}, "b": "inf"},
            "stack_axes": {"a": 1, "b": 0},
        },
        lambda: gcx.clip_by_leaf_norm(
            {"a": gcx.thresholds.quantile(initial=0.1), "b": math.inf},
            stack_axes={"a": 1, "b": 0},
        ),
    ),
    Case(
        "clip_by_group_norm",
        {"max_norms": {"x": 1.0}, "param_labels": LABELS},
        lambda: gcx.clip_by_group_norm({"x": 1.0}, LABELS),
    ),
    Case(
        "clip_by_group_norm",
        {"max_norms": {("x", "y"): {"name": "ema", "warmup_steps": 1}}, "param_labels": LABELS},
        lambda: gcx.clip_by_group_norm({("x", "y"): gcx.thresholds.ema(warmup_steps=1)}, LABELS),
    ),
    Case("clip_by_block_rms", {"threshold": 0.5}, lambda: gcx.clip_by_block_rms(0.5)),
    Case(
        "adaptive_grad_clip",
        {"clipping": 0.1, "axis": (0,)},
        lambda: gcx.adaptive_grad_clip(0.1, axis=(0,)),
    ),
    Case("adaptive_grad_clip", {}, gcx.adaptive_grad_clip),
    Case("autoclip", {"percentile": 50.0}, lambda: gcx.autoclip(50.0)),
    Case("zclip", {"warmup_steps": 2}, lambda: gcx.zclip(warmup_steps=2)),
    Case("zclip", {"max_norm": None}, lambda: gcx.zclip(max_norm=None)),
    Case("adagc", {"warmup_steps": 1}, lambda: gcx.adagc(warmup_steps=1)),
    Case("quantile_clip", {"initial": 0.3}, lambda: gcx.quantile_clip(initial=0.3)),
    Case("acclip", {"b1": 0.5}, lambda: gcx.acclip(0.5)),
    Case(
        "spam_clip",
        {"spike_threshold": 2.0, "warmup_steps": 1, "reset_every": None},
        lambda: gcx.spam_clip(2.0, warmup_steps=1, reset_every=None),
    ),
    Case("stable_spam_clip", {}, gcx.stable_spam_clip),
    Case("stable_adamw", {"learning_rate": 0.1}, lambda: gcx.stable_adamw(0.1)),
    Case("record_norms", {"window": 3}, lambda: gcx.record_norms(3)),
    Case(
        "u_clip",
        {"clip": {"name": "clip", "max_delta": 0.5}},
        lambda: gcx.u_clip(gcx.clip(0.5)),
    ),
    Case("u_clip", {}, lambda: gcx.u_clip(optax.clip(0.5)), optax.clip(0.5)),
    Case(
        "accumulate_gradients",
        {"every": 2, "reduction": "sum", "accumulator_dtype": jnp.bfloat16},
        lambda: gcx.accumulate_gradients(SGD, 2, reduction="sum", accumulator_dtype=jnp.bfloat16),
        SGD,
    ),
    Case(
        "accumulate_gradients",
        {"every": 2, "inner": {"name": "skip_large_norm", "max_norm": 2.0}},
        lambda: gcx.accumulate_gradients(gcx.skip_large_norm(SGD, 2.0), 2),
        SGD,
    ),
    Case(
        "skip_nonfinite",
        {"max_consecutive_skips": 3},
        lambda: gcx.skip_nonfinite(SGD, max_consecutive_skips=3),
        SGD,
    ),
    Case(
        "skip_large_norm",
        {"max_norm": {"name": "mean_std", "window": 4, "warmup_steps": 2}},
        lambda: gcx.skip_large_norm(SGD, gcx.thresholds.mean_std(window=4, warmup_steps=2)),
        SGD,
    ),
]
IDS = [f"{i}-{case.config.name}" for i, case in enumerate(CASES)]
each_case = pytest.mark.parametrize("case", CASES, ids=IDS)

# Each rule as a threshold of `clip_by_global_norm`.
RULES = {
    "percentile": ({"percentile": 50.0, "window": 3}, gcx.thresholds.percentile(50.0, 3)),
    "mean_std": ({"window": 3, "warmup_steps": 2}, gcx.thresholds.mean_std(6.0, 3, 2)),
    "zscore": ({"warmup_steps": 2}, gcx.thresholds.zscore(warmup_steps=2)),
    "ema": ({"warmup_steps": 2, "warmup_max": "inf"}, gcx.thresholds.ema(1.05, 0.98, 2, math.inf)),
    "quantile": ({"target": 0.9}, gcx.thresholds.quantile(0.9)),
    "capped": (
        {"rule": {"name": "zscore"}, "max_threshold": 1.0},
        gcx.thresholds.capped(gcx.thresholds.zscore(), 1.0),
    ),
    "relative_to_params": ({"ratio": 0.1}, gcx.thresholds.relative_to_params(0.1)),
}


def through_json(config):
    text = json.dumps(config.to_dict(), allow_nan=False)
    return type(config).from_dict(json.loads(text))


def program(tx):
    """`init` and `update` as the text of what they compute; the same text, the same numbers."""
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones(2)}

    def step(grads, params):
        state = tx.init(params)
        return state, optax.with_extra_args_support(tx).update(grads, state, params)

    closed = jax.make_jaxpr(step)(params, params)
    text = re.sub(r"0x[0-9a-f]+", "", str(closed))
    return text, [np.asarray(x).tolist() for x in closed.consts]


def is_transformation(constructor):
    """By its return type: an Optax transformation, or a kind of one."""
    returned = inspect.signature(constructor).return_annotation
    return isinstance(returned, type) and issubclass(returned, optax.GradientTransformation)


def public_transformations():
    public = [getattr(gcx, name) for name in dir(gcx) if not name.startswith("_")]
    return {f.__name__ for f in public if inspect.isfunction(f) and is_transformation(f)}


def test_every_public_transformation_has_a_config():
    assert {case.config.name for case in CASES} == public_transformations()


def test_every_public_rule_has_a_config():
    public = [getattr(gcx.thresholds, name) for name in dir(gcx.thresholds) if name[0] != "_"]
    assert set(RULES) == {f.__name__ for f in public if inspect.isfunction(f)}


@each_case
def test_round_trip_through_json_is_the_same_config(case):
    assert through_json(case.config) == case.config
    assert hash(through_json(case.config)) == hash(case.config)


@each_case
def test_built_from_json_computes_what_the_direct_construction_does(case):
    built = through_json(case.config).build(case.inner)
    assert program(built) == program(case.direct())


def test_programs_differ_where_an_argument_does():
    zscore = gcx.thresholds.zscore
    for one, other in (
        (1.0, 2.0),
        (zscore(2.5), zscore(2.0)),
        ({"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 1.0}),
    ):
        assert program(gcx.clip_by_leaf_norm(one)) != program(gcx.clip_by_leaf_norm(other))


@pytest.mark.parametrize("name", RULES)
def test_rule_from_json_computes_what_the_direct_construction_does(name):
    arguments, rule = RULES[name]
    max_norm = {"name": name, **arguments}
    config = through_json(gcx.TransformConfig("clip_by_global_norm", {"max_norm": max_norm}))
    direct = gcx.clip_by_global_norm(rule)
    assert program(config.build()) == program(direct)


def test_infinity_is_a_word_in_strict_json():
    arguments = {"max_norm": math.inf, "ord": np.inf}
    config = gcx.TransformConfig("clip_by_global_norm", arguments)
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert text == '{"name": "clip_by_global_norm", "max_norm": "inf", "ord": "inf"}'
    assert gcx.TransformConfig("clip_by_global_norm", {"max_norm": "inf", "ord": "inf"}) == config


def test_tuples_come_back_as_tuples():
    config = gcx.TransformConfig("clip_by_leaf_norm", {"max_norm": TUPLES})
    assert config.arguments == {"max_norm": {"tuple": [{"a": 1.0}, {"b": 0.5}]}}
    clip = through_json(config).build()
    grads = ({"a": jnp.float32([3.0, 4.0])}, {"b": jnp.float32([2.0])})
    updates, _ = clip.update(grads, clip.init(grads))
    np.testing.assert_allclose(updates[0]["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(updates[1]["b"], [0.5], rtol=1e-6)


def test_keys_that_are_no_strings_come_back_as_they_were():
    arguments = {
        "max_norms": {0: 1.0, ("x", 1): math.inf},
        "param_labels": {"a": 0, "b": 1, "c": "x"},
    }
    config = through_json(gcx.TransformConfig("clip_by_group_norm", arguments))
    grads = {"a": jnp.float32([2.0]), "b": jnp.float32([2.0]), "c": jnp.float32([2.0])}
    clip = config.build()
    updates, state = clip.update(grads, clip.init(grads))
    assert updates["a"].tolist() == [1.0] and updates["b"].tolist() == [2.0]
    assert set(state.grad_norm) == {"0", "x+1"}


@pytest.mark.parametrize("parameter", ["tuple", "items", "a"])
def test_prefix_tree_with_a_reserved_word_as_key(parameter):
    config = gcx.TransformConfig("clip_by_leaf_norm", {"max_norm": {parameter: 1.0}})
    clip = through_json(config).build()
    grads = {parameter: jnp.float32([2.0])}
    assert clip.update(grads, clip.init(grads))[0][parameter].tolist() == [1.0]


def test_parameter_called_name_can_have_a_threshold_and_a_label():
    grads = {"name": jnp.float32([2.0])}
    for function, arguments in (
        ("clip_by_leaf_norm", {"max_norm": {"name": 1.0}}),
        ("clip_by_group_norm", {"max_norms": {"x": 1.0}, "param_labels": {"name": "x"}}),
    ):
        clip = through_json(gcx.TransformConfig(function, arguments)).build()
        assert clip.update(grads, clip.init(grads))[0]["name"].tolist() == [1.0]


def test_config_is_apart_from_the_dict_it_was_made_of_and_the_one_it_gives():
    arguments = {"max_norm": {"a": 1.0}}
    config = gcx.TransformConfig("clip_by_leaf_norm", arguments)
    arguments["max_norm"]["a"] = 7.0
    config.to_dict()["max_norm"]["a"] = 8.0
    assert config.arguments == {"max_norm": {"a": 1.0}}
    assert pickle.loads(pickle.dumps(config)) == config


def test_inner_goes_to_the_innermost_wrapper():
    nested = {"every": 2, "inner": {"name": "skip_nonfinite", "inner": {"name": "u_clip"}}}
    built = gcx.TransformConfig("accumulate_gradients", nested).build(optax.clip(0.5))
    direct = gcx.accumulate_gradients(gcx.skip_nonfinite(gcx.u_clip(optax.clip(0.5))), 2)
    assert program(built) == program(direct)


def test_whole_optimizer_fits_into_one_config():
    optimizer = {"name": "stable_adamw", "learning_rate": 0.1}
    config = gcx.TransformConfig("accumulate_gradients", {"every": 2, "inner": optimizer})
    direct = gcx.accumulate_gradients(gcx.stable_adamw(0.1), 2)
    built = through_json(config).build()
    assert program(built) == program(direct)


def complaint_of(kind, make):
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)


KEYS = "max_norm, ord, axis_name, nonfinite"
PLAIN = "a plain value, or lists, tuples and mappings of such"
CALL = "Call the constructor itself with a function, an array or an object."


def test_unknown_name_is_refused():
    for make in (
        lambda: gcx.TransformConfig("flush"),
        lambda: gcx.TransformConfig.from_dict({"name": "flush"}),
    ):
        said = complaint_of(ValueError, make)
        assert said.startswith("TransformConfig: `name` must be one of 'clip', ")
        assert said.endswith(", got 'flush'. Pick one of them.")


@pytest.mark.parametrize("name", ["__init__", "os.system", "zscore", None, 3, ["zclip"]])
def test_only_names_of_the_table_are_ever_called(name):
    assert f"got {name!r}. Pick" in complaint_of(ValueError, lambda: gcx.TransformConfig(name))


def test_unknown_rule_is_refused_when_the_config_is_made():
    arguments = {"max_norm": {"a": [{"name": "zclip"}]}}
    said = complaint_of(ValueError, lambda: gcx.TransformConfig("clip_by_leaf_norm", arguments))
    assert said == (
        "TransformConfig: `name` must be one of 'percentile', 'mean_std', 'zscore', 'ema', "
        "'quantile', 'capped', 'relative_to_params', got 'zclip'. Pick one of them."
    )


def test_unknown_argument_is_refused():
    said = complaint_of(
        ValueError, lambda: gcx.TransformConfig("clip_by_global_norm", {"maxnorm": 1.0})
    )
    assert said == (
        f"clip_by_global_norm: `arguments` must be a mapping with keys among {KEYS}, "
        "got 'maxnorm'. Take the key out."
    )


def test_argument_called_name_is_refused():
    arguments = {"name": "zscore", "max_norm": 1.0}
    said = complaint_of(ValueError, lambda: gcx.TransformConfig("clip_by_global_norm", arguments))
    assert said.endswith("got 'name'. Take the key out.")


def test_unknown_argument_of_a_rule_is_refused():
    arguments = {"max_norm": {"name": "quantile", "decay": 0.9}}
    said = complaint_of(ValueError, lambda: gcx.TransformConfig("clip_by_global_norm", arguments))
    assert said == (
        "quantile: `arguments` must be a mapping with keys among target, rate, initial, "
        "got 'decay'. Take the key out."
    )


def test_arguments_that_are_no_mapping_are_refused():
    said = complaint_of(TypeError, lambda: gcx.TransformConfig("clip_by_global_norm", 1.0))
    assert said == (
        f"clip_by_global_norm: `arguments` must be a mapping with keys among {KEYS}, "
        "got 1.0. Write it as `to_dict` does."
    )


def test_missing_argument_is_refused():
    said = complaint_of(ValueError, lambda: gcx.TransformConfig("accumulate_gradients"))
    assert said == (
        "accumulate_gradients: `every` must be given, got nothing. Add it to the arguments."
    )


def test_dict_without_a_name_is_refused():
    for values in ({"max_norm": 1.0}, "zclip"):
        said = complaint_of(TypeError, lambda values=values: gcx.TransformConfig.from_dict(values))
        assert said == (
            "TransformConfig.from_dict: `values` must be a mapping with the key 'name', "
            f"got {values!r}. Write it as `to_dict` does."
        )


@pytest.mark.parametrize(
    "value",
    [
        optax.constant_schedule(1.0),
        gcx.thresholds.zscore(),
        jnp.ones(2),
        {1.0},
        gcx.adaptive_grad_clip,
        dict,
        1j,
    ],
    ids=["schedule", "rule", "array", "set", "function", "class", "complex"],
)
def test_what_is_not_plain_is_refused(value):
    for wrapped in (value, {"a": [value]}):
        arguments = {"max_norm": wrapped}
        said = complaint_of(
            TypeError,
            lambda arguments=arguments: gcx.TransformConfig("clip_by_leaf_norm", arguments),
        )
        assert said == f"clip_by_leaf_norm: `max_norm` must be {PLAIN}, got {value!r}. {CALL}"


def test_label_function_is_refused():
    arguments = {"max_norms": {"x": 1.0}, "param_labels": lambda params: "x"}
    said = complaint_of(TypeError, lambda: gcx.TransformConfig("clip_by_group_norm", arguments))
    assert said.startswith(f"clip_by_group_norm: `param_labels` must be {PLAIN}, got <function")


def test_wrapper_without_an_inner_one_is_refused():
    config = gcx.TransformConfig("u_clip")
    said = complaint_of(ValueError, config.build)
    hint = "Pass it to `build`, or name it in the arguments."
    assert said == f"u_clip: `clip` must be given, got nothing. {hint}"


def test_inner_transformation_that_nothing_takes_is_refused():
    config = gcx.TransformConfig("clip_by_global_norm", {"max_norm": 1.0})
    said = complaint_of(ValueError, lambda: config.build(SGD))
    assert said == (
        "clip_by_global_norm: `inner` must be left out, got a transformation. "
        "Join the two with `optax.chain`."
    )


def test_inner_that_is_no_transformation_is_refused():
    config = gcx.TransformConfig("skip_nonfinite")
    said = complaint_of(TypeError, lambda: config.build("adam"))
    assert said == (
        "TransformConfig.build: `inner` must be an `optax.GradientTransformation`, got 'adam'. "
        "Pass an Optax optimizer such as `optax.adamw(1e-3)`."
    )


def test_bad_number_is_refused_by_build_as_by_the_constructor():
    config = gcx.TransformConfig("clip_by_global_norm", {"max_norm": -1.0})
    said = complaint_of(ValueError, config.build)
    assert said == complaint_of(ValueError, lambda: gcx.clip_by_global_norm(-1.0))


def test_config_is_made_without_starting_a_backend():
    # A settings module may be imported before `jax.distributed.initialize`.
    code = (
        "import jax, gradclip_jax as gcx; "
        "gcx.TransformConfig('clip_by_global_norm', {'max_norm': {'name': 'zscore'}}); "
        "gcx.AccumulationConfig(max_grad_norm=1.0); "
        "jax.config.update('jax_num_cpu_devices', 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "config",
    [
        gcx.AccumulationConfig(),
        gcx.AccumulationConfig(accumulation_steps=8, normalize=False),
        gcx.AccumulationConfig(max_grad_norm=math.inf),
        gcx.AccumulationConfig(np.int64(2), max_grad_norm=np.float32(0.5)),
    ],
    ids=repr,
)
def test_accumulation_config_round_trips_through_json(config):
    assert through_json(config) == config


def test_accumulation_config_has_plain_fields():
    assert gcx.AccumulationConfig(max_grad_norm=math.inf).to_dict() == {
        "accumulation_steps": 4,
        "normalize": True,
        "max_grad_norm": "inf",
    }


def test_accumulation_config_refuses_unknown_keys():
    keys = "accumulation_steps, normalize, max_grad_norm"
    rule = f"AccumulationConfig.from_dict: `values` must be a mapping with keys among {keys}"
    said = complaint_of(ValueError, lambda: gcx.AccumulationConfig.from_dict({"steps": 4}))
    assert said == f"{rule}, got 'steps'. Take the key out."
    said = complaint_of(TypeError, lambda: gcx.AccumulationConfig.from_dict(4))
    assert said == f"{rule}, got 4. Write it as `to_dict` does."
