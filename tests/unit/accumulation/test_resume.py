"""A run that stops in the middle of a window and goes on from a checkpoint never stopped."""

import functools
import pathlib
import signal
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import trees

pytestmark = pytest.mark.slow

ocp = pytest.importorskip("orbax.checkpoint")

EVERY, STEPS = 4, 11


@functools.cache
def make(name):
    inner = optax.chain(
        gcx.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.1, 9))
    )
    tx = gcx.accumulate_gradients(inner, EVERY, noise_scale_decay=0.9)
    return {
        "plain": tx,
        "guarded": gcx.skip_nonfinite(tx),
        "chain": optax.chain(gcx.clip_by_global_norm(1.0), tx),
        "by leaf": gcx.accumulate_gradients(
            inner,
            EVERY,
            accumulator_dtype={"w": jnp.bfloat16, "b": jnp.float32},
            rounding="stochastic",
        ),
        "partition": optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    }[name]


def start():
    return {"w": trees.normal((3, 2), "bfloat16", seed=1), "b": trees.normal((2,), seed=2)}


@functools.cache  # one program for the whole run, as in training
def stepper(tx):
    @jax.jit
    def step(params, state, index):
        key = jax.random.fold_in(jax.random.key(0), index)
        grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape, p.dtype), params)
        return gcx.apply_gradients(tx, grads, state, params, weight=1.0 + index % 3)

    return step


def train(tx, params, state, steps):
    step = stepper(tx)
    for index in steps:
        params, state = step(params, state, np.int32(index))
    return params, state


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()


def restore(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def identical(ours, wanted):
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, wanted)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", ["plain", "guarded", "chain", "partition", "by leaf"])
def test_resuming_in_the_middle_of_a_window_is_bit_identical(tmp_path, name):
    tx, params, stop = make(name), start(), EVERY + 2
    wanted = train(tx, params, tx.init(params), range(STEPS))
    half = train(tx, params, tx.init(params), range(stop))
    assert int(gcx.metrics(half[1])["mini_step"]) == 2
    save(tmp_path / "checkpoint", half)
    restored = restore(tmp_path / "checkpoint", (params, tx.init(params)))
    identical(restored, half)
    identical(train(tx, *restored, range(stop, STEPS)), wanted)


@pytest.mark.parametrize("stop", [0, 1, EVERY - 1, EVERY])
def test_a_checkpoint_may_be_taken_at_any_step(tmp_path, stop):
    # From `init` on the state has one structure, so one template restores them all.
    tx, params = make("plain"), start()
    half = train(tx, params, tx.init(params), range(stop))
    save(tmp_path / "checkpoint", half)
    identical(restore(tmp_path / "checkpoint", (params, tx.init(params))), half)


# The run that is killed: it restores the last checkpoint if there is one, and kills itself
# without any warning as soon as the checkpoint of step `kill_after` is written.
SCRIPT = """
import os, pathlib, signal, sys
folder, kill_after, tests = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
sys.path[:0] = tests
import jax, numpy as np
import test_resume as run

tx, params = run.make("plain"), run.start()
state, done = tx.init(params), 0
saved = sorted(int(p.name) for p in folder.glob("[0-9]*") if p.name.isdigit())
if saved:
    params, state = run.restore(folder / str(saved[-1]), (params, state))
    done = saved[-1]
    print("resumed after", done, flush=True)
step = run.stepper(tx)
for index in range(done, run.STEPS):
    params, state = step(params, state, np.int32(index))
    if index + 1 in (3, kill_after):
        run.save(folder / str(index + 1), (params, state))
    if index + 1 == kill_after:
        os.kill(os.getpid(), signal.SIGKILL)
np.savez(folder / "end.npz", *[np.asarray(x, np.float32) for x in jax.tree.leaves((params, state))])
"""


def launch(folder, kill_after):
    here = pathlib.Path(__file__).parent
    source = pathlib.Path(gcx.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(kill_after), here, here.parents[1], source],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_run_killed_between_steps_ends_as_one_that_was_not(tmp_path):
    killed = launch(tmp_path, EVERY + 2)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = launch(tmp_path, 0)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after 6" in resumed.stdout
    tx, params = make("plain"), start()
    wanted = jax.tree.leaves(train(tx, params, tx.init(params), range(STEPS)))
    with np.load(tmp_path / "end.npz") as end:
        assert len(end.files) == len(wanted)
        for name, leaf in zip(end.files, wanted, strict=True):
            assert end[name].tobytes() == np.asarray(leaf, np.float32).tobytes()
