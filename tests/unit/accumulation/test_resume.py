"""A run that stops in the middle of a window and goes on from a checkpoint never stopped."""

import functools

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


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        *(("plain", stop) for stop in (0, 1, EVERY - 1, EVERY)),
        *((name, EVERY + 2) for name in ("plain", "guarded", "chain", "partition", "by leaf")),
    ],
)
def test_resuming_at_any_place_of_a_window_is_bit_identical(tmp_path, name, stop):
    # From `init` on the state has one structure, so one template restores them all.
    # tests/integration/test_sharded_transformer.py resumes in another process.
    tx, params = make(name), start()
    wanted = train(tx, params, tx.init(params), range(STEPS))
    half = train(tx, params, tx.init(params), range(stop))
    assert int(gcx.metrics(half[1])["mini_step"]) == stop % EVERY
    save(tmp_path / "checkpoint", half)
    restored = restore(tmp_path / "checkpoint", (params, tx.init(params)))
    identical(restored, half)
    identical(train(tx, *restored, range(stop, STEPS)), wanted)
