"""Random programs against plain Python; the same few in the suite, others without end in `make fuzz`.

1. `microbatched_value_and_grad` with random signatures against `jax.value_and_grad`.
2. Runs that are converted to another optimizer and back against runs that are not.
3. Every transformation on hostile gradients under `jax_debug_nans` and `jax_debug_infs`.
"""

import math
import os
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from registry import TRANSFORMATIONS

import gradclip_jax as gcx

pytestmark = pytest.mark.slow


def few(examples: int) -> settings:
    """So many in the suite, as many as one has patience for in `make fuzz`."""
    return settings() if os.environ.get("FUZZ") else settings(max_examples=examples)


# --- 1. micro-batches -----------------------------------------------------------------------


@few(10)
@given(
    st.permutations(["params", "params", "batch", "batch"]),
    st.sampled_from([1, 2, 3]),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.integers(0, 2**31 - 1),
)
def test_micro_batches_of_any_signature_are_the_batch(roles, parts, choices, seed):
    is_first_only, is_from_end, has_aux, has_weight = choices
    params, batches = [[i for i, x in enumerate(roles) if x == k] for k in ("params", "batch")]
    argnums = params[0] if is_first_only else tuple(params)
    argnums = jax.tree.map(lambda i: i - len(roles) * is_from_end, argnums)
    rng, shapes = np.random.default_rng(seed), {"params": (2,), "batch": (6, 2)}
    args = [np.float32(rng.standard_normal(shapes[role])) for role in roles]

    def loss(*args):
        rows = sum(jnp.tanh(args[i] @ args[j]) ** 2 for i in batches for j in params)
        importance = jnp.abs(args[batches[0]][:, 0]) if has_weight else jnp.ones_like(rows)
        weight = jnp.sum(importance)
        value = jnp.sum(importance * rows) / weight
        aux = {"rows": rows, "mean": value}
        extra = (weight, aux) if has_weight and has_aux else weight if has_weight else aux
        return (value, extra) if has_weight or has_aux else value

    options = {"argnums": argnums, "has_aux": has_aux or has_weight}
    expected = jax.jit(jax.value_and_grad(loss, **options))(*args)
    options = {"argnums": argnums, "has_aux": has_aux, "has_weight": has_weight}
    split = gcx.microbatched_value_and_grad(loss, parts, batch_argnums=tuple(batches), **options)
    found = jax.jit(split)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, expected)


# --- 2. conversions there and back ----------------------------------------------------------


def _identity(inner):
    return inner


# Each as Optax has it, or without it, and as here. No norm of a gradient comes near a bound.
LAYERS = {
    "clip": (
        partial(optax.chain, optax.clip_by_global_norm(1e3)),
        partial(optax.chain, gcx.clip_by_global_norm(1e3)),
    ),
    "new clip": (_identity, partial(optax.chain, gcx.clip_by_leaf_norm(1e3))),
    "new watch": (_identity, gcx.watch),
    "new spike guard": (_identity, lambda inner: gcx.skip_spikes(inner, norm=1e6)),
    "guard": (lambda inner: optax.apply_if_finite(inner, 100), gcx.skip_nonfinite),
    "window": (
        lambda inner: optax.MultiSteps(inner, 3).gradient_transformation(),
        lambda inner: gcx.accumulate_gradients(inner, 3),
    ),
    "sum": (
        lambda inner: optax.MultiSteps(inner, 3, use_grad_mean=False).gradient_transformation(),
        lambda inner: gcx.accumulate_gradients(inner, 3, reduction="sum"),
    ),
}
INNER = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(optax.linear_schedule(0.1, 0.01, 20)),
}
layers = st.lists(st.sampled_from(sorted(LAYERS)), max_size=4, unique=True).filter(
    lambda names: not {"window", "sum"} <= {*names}
)


@few(8)
@example(["guard", "sum"], "sgd", 5, 2)
@given(layers, st.sampled_from(sorted(INNER)), st.integers(0, 7), st.integers(0, 7))
def test_a_run_converted_and_back_is_that_run(names, inner, before, here):
    theirs, ours = INNER[inner], INNER[inner]
    for name in reversed(names):
        theirs, ours = LAYERS[name][0](theirs), LAYERS[name][1](ours)

    def run(tx, state, params, steps):
        update = jax.jit(tx.update)
        for step in steps:
            grads = {"w": jnp.array([math.sin(step), 1.0]), "b": jnp.float32(math.cos(step))}
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    reduction = "sum" if "sum" in names else "mean"
    convert = partial(gcx.convert_state, reduction=reduction)
    start = {"w": jnp.zeros(2), "b": jnp.float32(0.0)}
    params, state = run(theirs, theirs.init(start), start, range(before))
    expected, _ = run(theirs, state, params, range(before, 18))
    found, there = run(ours, convert(ours, state, params), params, range(before, before + here))
    assert jax.tree.structure(there) == jax.tree.structure(ours.init(start))
    back = jax.jit(convert, static_argnums=0)(theirs, there, found)
    found, _ = run(theirs, back, found, range(before + here, 18))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


# --- 3. debugging modes of JAX --------------------------------------------------------------


@few(12)
@given(st.sampled_from(sorted(TRANSFORMATIONS)), st.integers(0, 2**31 - 1))
def test_no_finite_gradient_makes_jax_report_a_nan_or_an_infinity(name, seed):
    """Gradients of zero, of opposite signs, and as large and small as their squares allow."""
    rng, tx = np.random.default_rng(seed), TRANSFORMATIONS[name]()
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    with jax.debug_nans(True), jax.debug_infs(True):
        state = tx.init(params)
        for size in rng.choice([0.0, 1e-30, 1e-6, 1.0, -1.0, 1e6], 4):
            grads = {"w": jnp.full((2, 3), size), "b": jnp.full(3, size)}
            _, state = tx.update(grads, state, params)
            gcx.metrics(state)
