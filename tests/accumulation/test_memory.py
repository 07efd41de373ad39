"""What XLA makes of a step: no copy while the window is open, and next to no scratch memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gradclip_jax as gcx
import hlo

SIDE = 384
PARAMS = {f"w{i}": jnp.ones((SIDE, SIDE)) for i in range(4)}
N = sum(x.nbytes for x in jax.tree.leaves(PARAMS))

INNER = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(1e-3),
    "clip_adamw": lambda: optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def apply_step(tx):
    return lambda params, state, grads: gcx.apply_gradients(tx, grads, state, params)


def update_step(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def scanned(tx):
    def epoch(params, state, grads):
        def step(carry, scale):
            scaled = jax.tree.map(lambda g: g * scale, grads)
            return apply_step(tx)(*carry, scaled), None

        return jax.lax.scan(step, (params, state), jnp.arange(8.0))[0]

    return epoch


@functools.cache
def compiled(make_step, name):
    tx = gcx.accumulate_gradients(INNER[name](), 4)
    step = jax.jit(make_step(tx), donate_argnums=(0, 1))
    return step.lower(PARAMS, tx.init(PARAMS), PARAMS).compile()


def scratch(program):
    """In units of the parameters."""
    return program.memory_analysis().temp_size_in_bytes / N


def large(text, **also):
    """The additions, other arithmetic and copies of arrays as large as a parameter."""
    made = re.compile(
        rf"= f32\[{SIDE},{SIDE}\]\S* (add|subtract|multiply|divide|sqrt|rsqrt|negate|copy)"
        r"(?:-start)?\("
    )
    found = map(made.search, hlo.instructions(text, **also))
    return [line.group(1) for line in found if line]


@pytest.mark.parametrize("make_step", [apply_step, scanned])
@pytest.mark.parametrize("name", INNER)
def test_scratch_is_at_most_the_parameters(name, make_step):
    assert scratch(compiled(make_step, name)) <= 1.05


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_without_clipping_there_is_no_scratch_at_all(name):
    assert scratch(compiled(apply_step, name)) <= 0.01


@pytest.mark.parametrize("name", INNER)
def test_scratch_of_update_is_that_of_its_updates(name):
    assert scratch(compiled(update_step, name)) <= 1.3


@pytest.mark.parametrize("name", INNER)
def test_every_state_buffer_is_reused(name):
    tx = gcx.accumulate_gradients(INNER[name](), 4)
    state = sum(x.nbytes for x in jax.tree.leaves(tx.init(PARAMS)))
    reused = compiled(apply_step, name).memory_analysis().alias_size_in_bytes
    assert reused >= 0.99 * (N + state)


@pytest.mark.parametrize("name", INNER)
def test_a_held_step_adds_to_the_accumulator_and_does_nothing_else(name):
    # The rest is in the body of the loop, which makes no trip.
    text = compiled(apply_step, name).as_text()
    assert large(text, loops=False) == ["add"] * len(PARAMS)
    assert "copy" not in large(text, branches=True)


def test_a_step_inside_scan_copies_nothing():
    assert "copy" not in large(compiled(scanned, "adamw").as_text(), branches=True)


def test_sharded_parameters_keep_their_sharding_and_need_no_collective():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    params = jax.device_put(PARAMS, sharding)
    tx = gcx.accumulate_gradients(optax.adamw(1e-3), 4)
    state = jax.jit(tx.init)(params)
    step = jax.jit(apply_step(tx), donate_argnums=(0, 1)).lower(params, state, params).compile()
    text = step.as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert hlo.count(text, collective) == 0
    params, state = step(params, state, jax.device_put(PARAMS, sharding))
    for x in jax.tree.leaves((params, state)):
        if np.ndim(x) == 2:
            assert x.sharding.is_equivalent_to(sharding, 2)
