"""Recovery: save good checkpoints, rewind after bad data, and stop if that does not help.

Usage:

    python replay.py           # demonstrate in a temporary folder: 60 of 400 batches are spoilt
    python replay.py FOLDER    # train in this folder, and continue there after a kill

The monitor reads the rows of `watch` every 25 steps. It proposes when to save a checkpoint, tells
which one to restore after bad data (as for PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section
5.1), and gives up if restoring does not help. Its log is FOLDER/run.jsonl.
"""

import functools
import itertools
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import gradclip_jax as gcx

STEPS, READ_EVERY, BATCHES = 400, 25, 2000


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["wi"] + params["b"]) @ params["wo"] - y) ** 2)


def init(seed):
    keys = jax.random.split(jax.random.key(seed))
    params = {"wi": jax.random.normal(keys[0], (4, 32)), "b": jnp.zeros(32)}
    return {**params, "wo": jax.random.normal(keys[1], (32, 1)) / 6}


def make_data(seed, spoilt=()):
    """Batches by id; those of the spoilt ids have labels of noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCHES, 32, 4)).astype("f")
    y = np.sin(x[..., :1] * x[..., 1:2])
    y[list(spoilt)] = 30 * rng.standard_normal(y[list(spoilt)].shape)
    return x, y


# --8<-- [start:train]
def make_optimizer(learning_rate):
    # `step_size` multiplies the learning rate, which may be a schedule.
    step_size = optax.inject_hyperparams(optax.scale)(step_size=1.0)
    return gcx.watch(gcx.skip_nonfinite(optax.chain(optax.adam(learning_rate), step_size)))


@functools.partial(jax.jit, static_argnums=0)
def step_fn(tx, run, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(run["params"], x, y)
    params, state = gcx.apply_gradients(
        tx, grads, run["state"], run["params"], value=loss, batch_id=run["next_id"]
    )
    return {"params": params, "state": state, "next_id": run["next_id"] + 1}


class Checkpoints(ocp.CheckpointManager):
    """Orbax checkpoints: the last good one and all later ones."""

    def save_run(self, step, run):
        print(f"saving step {step}", flush=True)
        self.save(step, args=ocp.args.StandardSave(run))
        self.wait_until_finished()

    def resume(self, report, run):
        """Restore the checkpoint that the report names, otherwise the latest."""
        is_rewind = report.action in ("rewind", "lower")
        step = report.good_step if is_rewind else self.latest_step()
        run = self.restore(step, args=ocp.args.StandardRestore(run))
        for later in self.all_steps():
            if later > step:
                self.delete(later)
        # The log counts how often to lower it, so that a kill before the next save loses nothing.
        run["state"] = optax.tree.set(run["state"], step_size=0.3**report.num_lowers)
        return run


def train(folder, seed=0, spoilt=(), steps=STEPS, learning_rate=3e-3):
    """Train in a folder; return the parameters and the monitor."""
    (x, y), params, tx = make_data(seed, spoilt), init(seed), make_optimizer(learning_rate)
    run = {"params": params, "state": tx.init(params), "next_id": jnp.array(0)}
    checkpoints = Checkpoints(folder.resolve() / "checkpoints")
    monitor = gcx.Monitor(params, log=folder / "run.jsonl", resume=True)
    report = monitor.report  # in a run that was killed, the last one of its log
    if checkpoints.all_steps():
        run = checkpoints.resume(report, run)
    else:
        checkpoints.save_run(0, run)
    while report.action != "stop" and int(run["state"].step_count) < steps:
        for _ in range(READ_EVERY):
            ids = itertools.count(int(run["next_id"]))
            run["next_id"] = jnp.array(next(i for i in ids if i not in report.batch_ids))
            run = step_fn(tx, run, x[run["next_id"]], y[run["next_id"]])
        report = monitor.read(run["state"], saved=checkpoints.all_steps())
        if report.reason:
            print(f"{report.action} (good: {report.good_step}): {report.reason}", flush=True)
        if report.action in ("rewind", "lower"):
            run = checkpoints.resume(report, run)
        elif report.action == "save":
            checkpoints.save_run(report.step, run)
        for old in checkpoints.all_steps():
            if old < (report.good_step or 0):
                checkpoints.delete(old)
    checkpoints.close()
    return run["params"], monitor


# --8<-- [end:train]


def train_plainly(seed=0, spoilt=(), steps=STEPS):
    (x, y), params, tx = make_data(seed, spoilt), init(seed), make_optimizer(3e-3)
    run = {"params": params, "state": tx.init(params), "next_id": jnp.array(0)}
    for i in range(steps):
        run = step_fn(tx, run, x[i], y[i])
    return run["params"]


def test_loss(params):
    x, y = make_data(1000)
    return float(loss_fn(params, x.reshape(-1, 4), y.reshape(-1, 1)))


def main(folder=None):
    spoilt = range(330, 390)
    if folder is not None:
        params, monitor = train(pathlib.Path(folder), 0, spoilt)
        print(monitor.summary())
        print(f"loss {test_loss(params):.4f}; log: {folder}/run.jsonl")
        return
    print(__doc__)
    print(f"clean: loss {test_loss(train_plainly(0)):.4f}")
    print(f"clean, another seed: loss {test_loss(train_plainly(1)):.4f}")
    print(f"spoilt: loss {test_loss(train_plainly(0, spoilt)):.4f}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        params, _ = train(pathlib.Path(temporary), 0, spoilt)
        print(f"spoilt, with recovery: loss {test_loss(params):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
