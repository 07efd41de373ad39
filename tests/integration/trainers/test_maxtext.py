"""MaxText: its training loop on a small decoder and synthetic tokens, with its own checkpoints."""

import functools
import tempfile
from pathlib import Path
from unittest import mock

import jax
import maxtext
import pytest
from flax import nnx
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train.train import train_loop
from maxtext.utils import train_utils
from pairs import EVERY, STEPS, STOP, check_same, of_optax, of_ours

import gradclip_jax as gcx

SMALL = {
    "base_emb_dim": 16,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 8 / jax.device_count(),
    "dtype": "float32",
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_goodput_recording": False,
    "async_checkpointing": False,
    "gradient_clipping_threshold": 0,  # or MaxText clips in front of ours
}

OUTPUT = tempfile.mkdtemp()  # of runs without checkpoints


def config(folder, steps=STEPS, **options):
    base = Path(maxtext.__file__).parent / "configs/base.yml"
    options |= SMALL | {
        "run_name": "run",
        "steps": steps,
        "base_output_directory": folder or OUTPUT,
    }
    options["enable_checkpointing"] = folder is not None
    return pyconfig.initialize([None, str(base), *(f"{k}={v}" for k, v in options.items())])


def with_optimizer(tx):
    return mock.patch.object(optimizers, "get_optimizer", lambda *args, **kwargs: tx)


def train(tx, folder=None, steps=STEPS, **options):
    """Goes on from the last checkpoint in the folder; the parameters."""
    with with_optimizer(tx):
        return train_loop(config(folder, steps, **options), None).filter(nnx.Param)


def restored(tx, folder):
    """The manager of checkpoints, and the state that a run in this folder begins with."""
    with with_optimizer(tx):
        _, manager, *_, state = train_utils.setup_train_loop(config(folder), None)
    return manager, state


with_optax = functools.cache(lambda name: train(of_optax(name)))


@pytest.mark.parametrize("name", ["alone", "guarded", "accumulated"])
def test_trains_as_with_optax(name):
    check_same(train(of_ours(name)), with_optax(name))


def test_passes_the_loss_where_it_would_skip_spikes_itself():
    tx = gcx.skip_spikes(of_ours("alone"), loss=100.0)  # an error without a loss
    check_same(train(tx, skip_step_on_spikes=True), with_optax("alone"))


def test_goes_on_in_mid_window(tmp_path):
    tx = of_ours("both")
    train(tx, tmp_path, STOP)
    found = gcx.metrics(restored(tx, tmp_path)[1].optimizer.opt_state)
    assert found["mini_step"] == STOP % EVERY and found["clip_factor"] < 1
    check_same(train(tx, tmp_path), with_optax("accumulated"))


def test_a_run_of_optax_goes_on_with_ours(tmp_path):
    train(of_optax("accumulated"), tmp_path / "optax", STOP)
    _, half = restored(of_optax("accumulated"), tmp_path / "optax")
    tx = of_ours("both")
    manager, rest = restored(tx, tmp_path / "ours")
    state = gcx.convert_state(
        tx, half.optimizer.opt_state, nnx.state(half.model, nnx.Param), reduction="mean"
    )
    nnx.update(rest.model, nnx.state(half.model))
    nnx.update(rest.optimizer.opt_state, nnx.state(state))
    rest.optimizer.step[...] = half.optimizer.step[...]
    checkpointing.maybe_save_checkpoint(manager, nnx.state(rest), config(tmp_path / "ours"), None)
    check_same(train(tx, tmp_path / "ours"), with_optax("accumulated"))
