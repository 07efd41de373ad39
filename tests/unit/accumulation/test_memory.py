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
from accumulation_cases import collectives, taken

SIDE = 384
PARAMS = {f"w{i}": jnp.ones((SIDE, SIDE)) for i in range(4)}
N = sum(x.nbytes for x in jax.tree.leaves(PARAMS))

INNER = {
    "adamw": lambda: optax.adamw(1e-3),
    "clip_adamw": lambda: optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def apply_step(tx):
    # In the order of what is returned, in which JAX gives donated buffers to results.
    return lambda params, state, grads: gcx.apply_gradients(tx, grads, state, params)


def scanned(tx):
    def epoch(params, state, grads):
        def step(carry, scale):
            scaled = jax.tree.map(lambda g: g * scale, grads)
            return apply_step(tx)(*carry, scaled), None

        return jax.lax.scan(step, (params, state), jnp.arange(8.0))[0]

    return epoch


def compile_step(step, state, params=PARAMS):
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()


@functools.cache
def compiled(make_step, name, every=4):
    tx = gcx.accumulate_gradients(INNER[name](), every)
    return compile_step(make_step(tx), tx.init(PARAMS))


def scratch(program):
    """In units of the parameters."""
    return program.memory_analysis().temp_size_in_bytes / N


def large(text, **which):
    """The additions, other arithmetic and copies of arrays as large as a parameter."""
    made = re.compile(
        rf"= f32\[{SIDE},{SIDE}\]\S* (add|subtract|multiply|divide|sqrt|rsqrt|negate|copy)"
        r"(?:-start)?\("
    )
    found = map(made.search, hlo.instructions(text, **which))
    return [line.group(1) for line in found if line]


@pytest.mark.parametrize(("name", "limit"), [("adamw", 0.01), ("clip_adamw", 1.05)])
def test_a_step_reuses_every_buffer_and_needs_scratch_only_to_clip(name, limit):
    program = compiled(apply_step, name)
    assert scratch(program) <= limit
    state = gcx.accumulate_gradients(INNER[name](), 4).init(PARAMS)
    buffers = N + sum(x.nbytes for x in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= 0.99 * buffers


def test_a_step_inside_scan_copies_nothing_and_needs_the_gradient_as_scratch():
    program = compiled(scanned, "clip_adamw")
    assert scratch(program) <= 2.05
    assert "copy" not in large(program.as_text(), branches=True)


def test_a_step_that_only_accumulates_adds_to_the_accumulator_and_does_nothing_else():
    text = compiled(apply_step, "adamw").as_text()
    # On a CPU, the optimizer is in a loop.
    assert sorted(large(text, loops=False)) == ["add"] * len(PARAMS)


def test_a_window_of_one_keeps_no_buffer_and_is_the_step_of_the_optimizer():
    tx = gcx.accumulate_gradients(optax.adamw(1e-3), 1)
    assert tx.init(PARAMS).accumulation.gradient.total == ()
    program, bare = compiled(apply_step, "adamw", 1), optax.adamw(1e-3)
    step = lambda p, s, g: taken(bare, g, s, p, fast=False)  # noqa: E731
    plain = compile_step(step, bare.init(PARAMS))
    assert sorted(large(program.as_text())) == sorted(large(plain.as_text()))
    assert scratch(program) <= scratch(plain) + 0.01
    assert hlo.count(program.as_text(), "while") == 0


def test_sharded_parameters_keep_their_sharding_and_need_no_collective():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    params = jax.device_put(PARAMS, sharding)
    tx = gcx.accumulate_gradients(optax.adamw(1e-3), 4)
    state = jax.jit(tx.init)(params)
    step = compile_step(apply_step(tx), state, params)
    assert collectives(step.as_text()) == {}
    params, state = step(params, state, jax.device_put(PARAMS, sharding))
    for x in jax.tree.leaves((params, state)):
        if np.ndim(x) == 2:
            assert x.sharding.is_equivalent_to(sharding, 2)
