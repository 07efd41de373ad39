"""EasyDeL: the step of its trainer on a small Llama, with its train state and checkpoints."""

import functools

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from easydel.trainers.trainer._fn import training_step
from flax import nnx
from jax.sharding import PartitionSpec as P
from pairs import EVERY, NAMES, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

TOKENS = np.random.default_rng(0).integers(0, 64, (STEPS, 8, 16))
step = jax.jit(functools.partial(training_step, partition_spec=P(("dp", "fsdp"))))


def start(tx):
    config = ed.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
    )
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
    check_same(ours.graphstate, theirs.graphstate, rtol=1e-4, atol=2e-5)
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
    check_same(train(rest.replace(tx=tx), TOKENS[STOP:]).graphstate, whole.graphstate, 1e-4, 2e-5)


def test_a_run_of_optax_goes_on_with_ours():
    half, tx = train(start(of_optax("accumulated")), TOKENS[:STOP]), of_ours("both")
    state = gcx.convert_state(tx, half.opt_state, half.graphstate)
    rest = train(half.replace(tx=tx, opt_state=state), TOKENS[STOP:])
    theirs = train(start(of_optax("accumulated")))
    check_same(rest.graphstate, theirs.graphstate, rtol=1e-4, atol=2e-5)
