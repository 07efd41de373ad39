"""MaxText: its training loop on a small decoder and synthetic tokens, with its own checkpoints."""

import tempfile
from pathlib import Path
from unittest import mock

import jax
import maxtext
from flax import nnx
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train.train import train_loop
from maxtext.utils import train_utils
from pairs import STEPS, STOP, Run, TrainerTests, check_same, of_optax, of_ours

import gradclip_jax as gcx

SMALL = {
    "run_name": "run",
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
OPTIONS = Path(maxtext.__file__).parent / "configs/base.yml"


def config(folder, steps=STEPS, **options):
    options |= SMALL | {"steps": steps, "base_output_directory": folder}
    return pyconfig.initialize([None, str(OPTIONS), *(f"{k}={v}" for k, v in options.items())])


def with_optimizer(tx):
    return mock.patch.object(optimizers, "get_optimizer", lambda *args, **kwargs: tx)


def restored(tx, folder):
    """The manager of checkpoints, and the state that a run in this folder begins with."""
    with with_optimizer(tx):
        _, manager, *_, state = train_utils.setup_train_loop(config(folder), None)
    return manager, state


class TestMaxText(TrainerTests):
    def train(self, tx, first=0, last=STEPS, start=None, **options):
        """Goes on from the last checkpoint in a folder."""
        folder = start or tempfile.mkdtemp()
        with with_optimizer(tx):
            params = train_loop(config(folder, last, **options), None).filter(nnx.Param)
        return Run(params, restored(tx, folder)[1].optimizer.opt_state, folder)

    def restored(self, tx, folder):
        return self.train(tx, 0, STOP, folder)

    def converted(self, tx, half, folder):
        _, half = restored(of_optax("accumulated"), half)
        manager, rest = restored(tx, folder)
        state = gcx.convert_state(
            tx, half.optimizer.opt_state, nnx.state(half.model, nnx.Param), reduction="mean"
        )
        nnx.update(rest.model, nnx.state(half.model))
        nnx.update(rest.optimizer.opt_state, nnx.state(state))
        rest.optimizer.step[...] = half.optimizer.step[...]
        checkpointing.maybe_save_checkpoint(manager, nnx.state(rest), config(folder), None)
        return folder

    def test_passes_the_loss_where_it_would_skip_spikes_itself(self):
        tx = gcx.skip_spikes(of_ours("alone"), loss=100.0)  # an error without a loss
        ours = self.train(tx, skip_step_on_spikes=True)
        check_same(ours.params, self.train(of_optax("alone")).params)
