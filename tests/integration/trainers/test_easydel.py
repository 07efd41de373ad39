"""EasyDeL: the step of its trainer on a small Llama, with its train state and checkpoints."""

import functools

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from easydel.trainers.trainer._fn import training_step
from flax import nnx
from jax.sharding import PartitionSpec as P
from pairs import EVERY, NAMES, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

TOKENS = np.random.default_rng(0).integers(0, 64, (STEPS, 8, 16))
step = jax.jit(functools.partial(training_step, partition_spec=P(("dp", "fsdp"))))


@pytest.fixture(autouse=True)
def adam_that_does_not_amplify_rounding(monkeypatch):
    """A rounding error of a gradient moves a parameter by at most lr / eps = 0.1 times as much.

    At the default eps of 1e-8 it is a million times as much: gradients of `q_proj` and `k_proj` are
    about 1e-6 here, and Adam makes steps of 1e-2 of their rounding errors. Two runs of Optax, the
    second with `max_norm` one ulp larger, then differ by 2.7e-4 after 20 steps, ours from Optax's by
    2.6e-4 (EasyDeL 0.3.0, JAX 0.9.2, one CPU device).
    """
    monkeypatch.setattr(optax, "adam", functools.partial(optax.adam, eps=0.1))


def start(tx):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = ed.LlamaConfig(num_hidden_layers=1, max_position_embeddings=32, **sizes, **heads)
    model = ed.LlamaForCausalLM(
        config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    return ed.EasyDeLState.create(model=model, tx=tx, init_opt_state=True)


def train(state, tokens=TOKENS):
    with state.model.mesh:
        for ids in tokens:
            batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
            state, _ = step(state, batch)
    return state


@pytest.mark.parametrize("name", NAMES)
def test_trains_as_with_optax(name):
    ours, theirs = train(start(of_ours(name))), train(start(of_optax(name)))
    check_same(ours.graphstate, theirs.graphstate)
    assert gcx.metrics(ours.opt_state)["clip_factor"] < 1


def test_goes_on_in_mid_window(tmp_path):
    tx = of_ours("both")
    whole, half = train(start(tx)), train(start(tx), TOKENS[:STOP])
    half.save_state(str(tmp_path / "state"))
    rest = ed.EasyDeLState.load_state(
        str(tmp_path / "state"),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        tx_template=tx,
    )
    assert gcx.metrics(rest.opt_state)["mini_step"] == STOP % EVERY
    check_same(train(rest.replace(tx=tx), TOKENS[STOP:]).graphstate, whole.graphstate)


def test_a_run_of_optax_goes_on_with_ours():
    half, tx = train(start(of_optax("accumulated")), TOKENS[:STOP]), of_ours("both")
    state = gcx.convert_state(tx, half.opt_state, half.graphstate, reduction="mean")
    rest = train(half.replace(tx=tx, opt_state=state), TOKENS[STOP:])
    theirs = train(start(of_optax("accumulated")))
    check_same(rest.graphstate, theirs.graphstate)
