"""Configs: every public transformation and rule goes to JSON and comes back the same."""

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

# Configs with arguments of every kind, the call that each must equal, and what it is built around.
CASES = {
    "plain values": (
        Config("clip_by_value", {"max_value": 0.5, "min_value": -math.inf}),
        gcx.clip_by_value(0.5, min_value=-math.inf),
    ),
    "scalar arrays": (
        Config("clip_by_global_norm", {"max_norm": np.float32(1.0), "ord": jnp.inf}),
        gcx.clip_by_global_norm(1.0, ord=jnp.inf),
    ),
    "a tuple": (
        Config("adaptive_grad_clip", {"clipping": 0.1, "axis": (0,)}),
        gcx.adaptive_grad_clip(0.1, axis=(0,)),
    ),
    "None": (Config("zclip", {"max_norm": None}), gcx.zclip(max_norm=None)),
    "a granularity": (
        Config("clip_by_norm", {"threshold": 1.0, "granularity": Config("layer")}),
        gcx.clip_by_norm(1.0, granularity=granularities.layer()),
    ),
    "a tree with a rule": (
        Config("clip_by_leaf_norm", {"max_norm": {"a": Config("quantile"), "b": math.inf}}),
        gcx.clip_by_leaf_norm({"a": thresholds.quantile(), "b": math.inf}),
    ),
    "a rule as a dict, and labels": (
        Config(
            "clip_by_group_norm",
            {"max_norms": {"x": {"name": "ema", "decay": 0.5}}, "param_labels": LABELS},
        ),
        gcx.clip_by_group_norm({"x": thresholds.ema(decay=0.5)}, LABELS),
    ),
    "a transformation": (
        Config("u_clip", {"clip": Config("clip", {"max_delta": 0.5})}),
        gcx.contrib.u_clip(gcx.clip(0.5)),
    ),
    "a rule around a rule": (
        Config(
            "clip_by_global_norm",
            {"max_norm": Config("capped", {"rule": Config("zscore"), "max_threshold": 1.0})},
        ),
        gcx.clip_by_global_norm(thresholds.capped(thresholds.zscore(), 1.0)),
    ),
    "a dtype": (
        Config("accumulate_gradients", {"every": 2, "accumulator_dtype": jnp.bfloat16}),
        gcx.accumulate_gradients(SGD, 2, accumulator_dtype=jnp.bfloat16),
        SGD,
    ),
    "a count": (
        Config("skip_nonfinite", {"max_consecutive_skips": 3}),
        gcx.skip_nonfinite(SGD, max_consecutive_skips=3),
        SGD,
    ),
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


@pytest.mark.parametrize("name", CASES)
def test_a_config_from_json_is_the_same_and_builds_what_the_call_does(name):
    config, direct, *inner = CASES[name]
    again = through_json(config)
    assert again == config and hash(again) == hash(config)
    assert program(again.build(*inner)) == program(direct)


def test_every_public_transformation_rule_and_granularity_has_a_config():
    kinds = (optax.GradientTransformation, thresholds.Rule, granularities.Granularity)
    modules = (gcx, gcx.contrib, gcx.per_example, thresholds, granularities)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    made = {x: getattr(y, "__annotations__", {}).get("return") for x, y in public.items()}
    names = {x for x, kind in made.items() if isinstance(kind, type) and issubclass(kind, kinds)}
    assert names >= {"skip_spikes", "u_clip", "noisy_mean", "zscore", "layer"}
    for name in names:
        assert through_json(Config(name)) == Config(name)


def test_programs_differ_where_an_argument_does():
    for one, other in ((1.0, 2.0), (thresholds.zscore(2.5), thresholds.zscore(2.0))):
        assert program(gcx.clip_by_leaf_norm(one)) != program(gcx.clip_by_leaf_norm(other))


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
    (lambda: from_dict("skip_nonfinite", SGD, SGD), ValueError, "inner"),
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
