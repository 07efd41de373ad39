"""Configs: every public transformation and rule goes to JSON and comes back the same."""

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
from gradclip_jax import granularities, thresholds

SGD = optax.sgd(0.5, momentum=0.9)
LABELS = {"a": "x", "b": "y"}
Config = gcx.configs.TransformConfig
AccumulationConfig = gcx.configs.AccumulationConfig

# Each public transformation with arguments of every kind, and the call that it must equal.
CASES = {
    "clip_by_value": (
        {"max_value": 0.5, "min_value": -math.inf},
        lambda: gcx.clip_by_value(0.5, min_value=-math.inf),
    ),
    "clip_by_norm": (
        {
            "threshold": 1.0,
            "granularity": Config("layer", {"num_layer_axes": 1}),
            "reaction": "zero",
        },
        lambda: gcx.clip_by_norm(1.0, granularity=granularities.layer(1), reaction="zero"),
    ),
    "clip_by_global_norm": (
        {"max_norm": np.float32(1.0), "ord": jnp.inf, "nonfinite": "zero"},
        lambda: gcx.clip_by_global_norm(1.0, ord=jnp.inf, nonfinite="zero"),
    ),
    "zero_large_norm": ({"max_norm": 2.0}, lambda: gcx.zero_large_norm(2.0)),
    "clip_by_leaf_norm": (
        {"max_norm": {"a": Config("quantile", {"initial": 0.1}), "b": math.inf}},
        lambda: gcx.clip_by_leaf_norm({"a": thresholds.quantile(initial=0.1), "b": math.inf}),
    ),
    "clip_by_group_norm": (
        {"max_norms": {"x": {"name": "ema", "warmup_steps": 1}}, "param_labels": LABELS},
        lambda: gcx.clip_by_group_norm({"x": thresholds.ema(warmup_steps=1)}, LABELS),
    ),
    "clip_by_block_rms": ({"threshold": 0.5}, lambda: gcx.clip_by_block_rms(0.5)),
    "adaptive_grad_clip": (
        {"clipping": 0.1, "axis": (0,)},
        lambda: gcx.adaptive_grad_clip(0.1, axis=(0,)),
    ),
    "autoclip": ({"percentile": 50.0}, lambda: gcx.autoclip(50.0)),
    "zclip": ({"max_norm": None}, lambda: gcx.zclip(max_norm=None)),
    "adagc": ({"warmup_steps": 1}, lambda: gcx.adagc(warmup_steps=1)),
    "quantile_clip": ({"initial": 0.3}, lambda: gcx.quantile_clip(initial=0.3)),
    "acclip": ({"b1": 0.5}, lambda: gcx.contrib.acclip(0.5)),
    "spam_clip": ({"reset_every": None}, lambda: gcx.contrib.spam_clip(reset_every=None)),
    "stable_spam_clip": ({}, gcx.contrib.stable_spam_clip),
    "stable_adamw": ({"learning_rate": 0.1}, lambda: gcx.contrib.stable_adamw(0.1)),
    "record_norms": ({"window": 3}, lambda: gcx.record_norms(3)),
    "noisy_mean": (
        {"noise_multiplier": 1.0, "sensitivity": 1.0, "expected_batch_size": 8.0, "key": 0},
        lambda: gcx.per_example.noisy_mean(1.0, 1.0, 8.0, 0),
    ),
    "u_clip": (
        {"clip": Config("clip", {"max_delta": 0.5})},
        lambda: gcx.contrib.u_clip(gcx.clip(0.5)),
    ),
    "accumulate_gradients": (
        {"every": 2, "accumulator_dtype": jnp.bfloat16},
        lambda: gcx.accumulate_gradients(SGD, 2, accumulator_dtype=jnp.bfloat16),
    ),
    "round_stochastically": ({"seed": 3}, lambda: gcx.round_stochastically(3)),
    "watch": ({"spike_threshold": 4.0}, lambda: gcx.watch(SGD, spike_threshold=4.0)),
    "skip_nonfinite": (
        {"max_consecutive_skips": 3},
        lambda: gcx.skip_nonfinite(SGD, max_consecutive_skips=3),
    ),
    "skip_large_norm": (
        {"max_norm": Config("mean_std", {"window": 4, "warmup_steps": 2})},
        lambda: gcx.skip_large_norm(SGD, thresholds.mean_std(window=4, warmup_steps=2)),
    ),
    "skip_spikes": (
        {"norm": Config("zscore"), "max_consecutive_skips": 3},
        lambda: gcx.skip_spikes(SGD, norm=thresholds.zscore(), max_consecutive_skips=3),
    ),
    "dynamic_loss_scale": (
        {"init_scale": 2.0**10, "growth_interval": 100, "check": "gradient"},
        lambda: gcx.dynamic_loss_scale(
            SGD, init_scale=2.0**10, growth_interval=100, check="gradient"
        ),
    ),
}
# Each rule as a threshold of `clip_by_global_norm`.
RULES = {
    "percentile": ({"percentile": 50.0, "window": 3}, thresholds.percentile(50.0, 3)),
    "mean_std": (
        {"window": 3, "allow_negative": True},
        thresholds.mean_std(window=3, allow_negative=True),
    ),
    "zscore": ({"warmup_steps": 2}, thresholds.zscore(warmup_steps=2)),
    "ema": ({"warmup_max": math.inf}, thresholds.ema(warmup_max=math.inf)),
    "quantile": ({"target": 0.9}, thresholds.quantile(0.9)),
    "capped": (
        {"rule": Config("zscore"), "max_threshold": 1.0},
        thresholds.capped(thresholds.zscore(), 1.0),
    ),
    "relative_to_params": ({"ratio": 0.1}, thresholds.relative_to_params(0.1)),
}


def through_json(config):
    text = json.dumps(config.to_dict())
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


def takes_inner(config):
    functions = public_functions(gcx) | public_functions(gcx.contrib)
    functions |= public_functions(gcx.per_example)
    wraps = {"inner", "clip"} & inspect.signature(functions[config.name]).parameters.keys()
    return bool(wraps - config.arguments.keys())


def public_functions(module):
    return {key: x for key, x in vars(module).items() if key[0] != "_" and inspect.isfunction(x)}


def test_every_public_transformation_has_a_case():
    functions = public_functions(gcx) | public_functions(gcx.contrib)
    functions |= public_functions(gcx.per_example)
    returned = {key: inspect.get_annotations(x).get("return") for key, x in functions.items()}
    kinds = {key: kind for key, kind in returned.items() if isinstance(kind, type)}
    made = {key for key in kinds if issubclass(kinds[key], optax.GradientTransformation)}
    assert set(CASES) == made - {"clip"}  # Optax's name of `clip_by_value`


def test_every_public_rule_has_a_case():
    assert set(RULES) == set(public_functions(thresholds))


@pytest.mark.parametrize("name", CASES)
def test_a_config_from_json_is_the_same_and_builds_what_the_call_does(name):
    arguments, direct = CASES[name]
    config = Config(name, arguments)
    again = through_json(config)
    assert again == config and hash(again) == hash(config)
    built = again.build(SGD) if takes_inner(config) else again.build()
    assert program(built) == program(direct())


@pytest.mark.parametrize("name", RULES)
def test_a_rule_from_json_is_what_the_call_makes(name):
    arguments, rule = RULES[name]
    config = through_json(Config("clip_by_global_norm", {"max_norm": Config(name, arguments)}))
    assert program(config.build()) == program(gcx.clip_by_global_norm(rule))


def test_programs_differ_where_an_argument_does():
    for one, other in ((1.0, 2.0), (thresholds.zscore(2.5), thresholds.zscore(2.0))):
        assert program(gcx.clip_by_leaf_norm(one)) != program(gcx.clip_by_leaf_norm(other))


def test_a_rule_may_be_written_as_a_dict():
    as_dict = Config("clip_by_global_norm", {"max_norm": {"name": "zscore"}})
    assert as_dict == Config("clip_by_global_norm", {"max_norm": Config("zscore")})
    assert program(as_dict.build()) == program(gcx.clip_by_global_norm(thresholds.zscore()))


def test_a_config_is_independent_of_what_it_was_made_of_and_of_what_it_gives():
    arguments = {"max_norm": {"a": 1.0}}
    config = Config("clip_by_leaf_norm", arguments)
    arguments["max_norm"]["a"] = 7.0
    config.to_dict()["max_norm"]["a"] = 8.0
    assert config.arguments == {"max_norm": {"a": 1.0}}
    assert pickle.loads(pickle.dumps(config)) == config


def from_dict(name, *inner, **arguments):
    return Config.from_dict({"name": name, **arguments}).build(*inner)


def norm_clip(max_norm):
    return Config("clip_by_leaf_norm", {"max_norm": max_norm})


def nested(depth):
    value = 1.0
    for _ in range(depth):
        value = [value]
    return value


def nested_config(depth):
    config = {"name": "zscore"}
    for _ in range(depth):
        config = {"name": "capped", "rule": config, "max_threshold": 1.0}
    return config


def test_nested_configs_are_read_in_linear_time():
    config = Config("clip_by_global_norm", {"max_norm": nested_config(28)})
    assert through_json(config) == config


NAMES = ["__init__", "os.system", "flush", "Rule", None, 3, ["zclip"], {"a": 1}, jnp.ones(2)]
NOT_PLAIN = [optax.constant_schedule(1.0), jnp.ones(2), {1.0}, dict, 1j, {("x", "y"): 1.0}]
NO_MAPPING = [1.0, [1], "zclip", {3: 1.0}, {"max_norm": {0: 1.0}}]
# (call, type of the error, argument)
BAD = [
    *((lambda x=x: Config(x), ValueError, "name") for x in NAMES),
    *((lambda x=x: from_dict(x), ValueError, "name") for x in NAMES),
    *((lambda x=x: norm_clip(x), TypeError, "arguments") for x in NOT_PLAIN),
    *((lambda x=x: norm_clip({"a": [x]}), TypeError, "arguments") for x in NOT_PLAIN),
    *((lambda x=x: Config("zclip", x), (TypeError, ValueError), "arguments") for x in NO_MAPPING),
    *((lambda x=x: Config.from_dict(x), TypeError, "values") for x in ({"a": 1.0}, "zclip", 3)),
    (lambda: from_dict("zclip", maxnorm=1.0), ValueError, "arguments"),
    (
        lambda: from_dict("clip_by_value", max_value={"name": "quantile", "decay": 1}),
        ValueError,
        "arguments",
    ),
    (lambda: from_dict("accumulate_gradients", SGD), ValueError, "arguments"),
    (lambda: from_dict("skip_nonfinite"), ValueError, "arguments"),
    (lambda: from_dict("skip_nonfinite", SGD, SGD), ValueError, "arguments"),
    (lambda: from_dict("clip_by_global_norm", SGD, max_norm=1.0), ValueError, "inner"),
    (lambda: from_dict("clip_by_global_norm", max_norm=-1.0), ValueError, "max_norm"),
    (lambda: norm_clip({"name": "percentile", "window": 2**27}).build(), ValueError, "window"),
    (lambda: norm_clip({"name": "zscore", "z_threshold": 10**400}).build(), ValueError, "z_thr"),
    (lambda: Config("u_clip").build(None), TypeError, "clip"),
    (lambda: Config("u_clip").build("adam"), TypeError, "clip"),
    (lambda: AccumulationConfig(0), ValueError, "accumulation_steps"),
    (lambda: AccumulationConfig(2.0), TypeError, "accumulation_steps"),
    (lambda: AccumulationConfig(normalize="no"), ValueError, "normalize"),
    (lambda: AccumulationConfig(max_grad_norm=-1.0), ValueError, "max_grad_norm"),
    (lambda: AccumulationConfig(max_grad_norm="1"), TypeError, "max_grad_norm"),
    *(
        (lambda x=x: AccumulationConfig.from_dict(x), TypeError, "values")
        for x in ({"x": 1}, [], 3)
    ),
    (lambda: norm_clip(nested(40)), ValueError, "arguments"),
    (lambda: norm_clip(nested(5000)), ValueError, "arguments"),
    (
        lambda: Config("clip_by_global_norm", {"max_norm": nested_config(40)}),
        ValueError,
        "arguments",
    ),
    (lambda: AccumulationConfig().effective_batch_size(0), ValueError, "micro_batch_size"),
    (lambda: AccumulationConfig().build(None), TypeError, "inner"),
]


@pytest.mark.parametrize(("call", "error", "argument"), BAD)
def test_a_bad_config_raises(call, error, argument):
    with pytest.raises(error, match=f"`{argument}.*` must be "):
        call()


def test_nothing_that_a_dict_names_is_called_when_it_is_read():
    Config.from_dict({"name": "clip_by_global_norm", "max_norm": -1.0})


@pytest.mark.slow
def test_config_is_made_without_starting_a_backend():
    # A settings module may be imported before `jax.distributed.initialize`.
    code = (
        "import jax, gradclip_jax as gcx; "
        "gcx.configs.TransformConfig('clip_by_global_norm', {'max_norm': {'name': 'zscore'}}); "
        "gcx.configs.AccumulationConfig(max_grad_norm=1.0); "
        "jax.config.update('jax_num_cpu_devices', 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# AccumulationConfig


@pytest.mark.parametrize(
    "config",
    [
        AccumulationConfig(),
        AccumulationConfig(accumulation_steps=8, normalize=False, max_grad_norm=math.inf),
        AccumulationConfig(np.int64(2), max_grad_norm=np.float32(0.5)),
    ],
    ids=repr,
)
def test_accumulation_config_round_trips_through_json(config):
    assert through_json(config) == config and hash(through_json(config)) == hash(config)


def test_accumulation_config_has_plain_fields_and_is_frozen():
    config = AccumulationConfig()
    fields = {"accumulation_steps": 4, "normalize": True, "max_grad_norm": None}
    assert config.to_dict() == fields
    assert AccumulationConfig.from_dict({"accumulation_steps": 2}).accumulation_steps == 2
    assert config.effective_batch_size(16) == 64
    with pytest.raises(AttributeError, match="cannot assign to field"):
        config.accumulation_steps = 2


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_accumulation_config_builds_the_accumulation(normalize, max_grad_norm):
    config = AccumulationConfig(2, normalize, max_grad_norm)
    # The norm of the accumulated gradient is clipped, not that of each micro-batch.
    inner = SGD if max_grad_norm is None else optax.chain(gcx.clip_by_global_norm(1.0), SGD)
    direct = gcx.accumulate_gradients(inner, 2, reduction="mean" if normalize else "sum")
    assert program(config.build(SGD)) == program(direct)
