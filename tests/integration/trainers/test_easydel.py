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
from pairs import STEPS, STOP, Run, TrainerTests

import gradclip_jax as gcx

TOKENS = np.random.default_rng(0).integers(0, 64, (STEPS, 8, 16))
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
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


def start_with(tx):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = ed.LlamaConfig(num_hidden_layers=1, max_position_embeddings=32, **sizes, **heads)
    model = ed.LlamaForCausalLM(config, rngs=nnx.Rngs(0), **FLOAT32)
    return ed.EasyDeLState.create(model=model, tx=tx, init_opt_state=True)


class TestEasyDeL(TrainerTests):
    def train(self, tx, first=0, last=STEPS, start=None):
        state = start or start_with(tx)
        with state.model.mesh:
            for ids in TOKENS[first:last]:
                batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
                state, _ = step(state, batch)
        return Run(state.graphstate, state.opt_state, state)

    def restored(self, tx, folder):
        self.train(tx, 0, STOP).rest.save_state(str(folder / "state"))
        state = ed.EasyDeLState.load_state(str(folder / "state"), tx_template=tx, **FLOAT32)
        return Run(state.graphstate, state.opt_state, state.replace(tx=tx))

    def converted(self, tx, half, folder):
        state = gcx.convert_state(tx, half.opt_state, half.graphstate, reduction="mean")
        return half.replace(tx=tx, opt_state=state)
