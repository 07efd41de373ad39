"""Metrics of any state: registered fields, fixed keys, and a path where a name occurs twice."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from guard_cases import feed

CLIP = {"clip_factor", "clip_fraction", "clip_threshold", "grad_norm"}
ACCUMULATION = {"mini_step", "gradient_step", "empty_windows"}
NONFINITE = {"skipped_nonfinite", "consecutive_skips", "guard_failed"}
LARGE = NONFINITE | {"skipped_large_norm", "grad_norm", "skip_threshold"}
WATCH = {"grad_norm", "update_norm", "parameter_norm", "nonfinite_elements"}

PARAMS = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
LABELS = {"w": "body", "b": "head"}


def clip(max_norm=1.0):
    return gcx.clip_by_global_norm(max_norm)


PLACES = {
    "partition": (optax.partition({"body": clip(), "head": optax.sgd(0.1)}, LABELS), CLIP),
    "inject_hyperparams": (  # the learning rate that it stores is no metric of ours
        optax.inject_hyperparams(lambda rate: optax.chain(clip(), optax.sgd(rate)))(rate=0.1),
        CLIP,
    ),
    "multi_steps": (optax.MultiSteps(clip(), 2), CLIP),
    "skip_nonfinite": (gcx.skip_nonfinite(clip()), CLIP | NONFINITE),
    "skip_spikes": (gcx.skip_spikes(optax.sgd(0.1), norm=9.0), LARGE),
}


@pytest.mark.parametrize("name", PLACES)
def test_scalars_of_our_states_are_found_wherever_the_state_is(name):
    tx, keys = PLACES[name]
    found = gcx.metrics(tx.init(PARAMS))
    assert list(found) == sorted(keys)
    assert all(x.shape == () and isinstance(x, jax.Array) for x in found.values())


def test_a_foreign_state_with_fields_of_ours_reports_nothing():
    class Foreign(NamedTuple):
        grad_norm: Any = 1.0
        clip_threshold: Any = 1.0

    assert gcx.metrics(Foreign()) == gcx.metrics(optax.adam(0.1).init(PARAMS)) == {}


def test_a_state_is_found_inside_any_pytree():
    tx = optax.chain(clip(), optax.sgd(0.1))
    train_state = {"params": PARAMS, "optimizer": [tx.init(PARAMS)]}
    nameless = jax.tree_util.Partial(jnp.dot, tx.init(PARAMS))  # its parts have no names
    assert set(gcx.metrics(train_state)) == set(gcx.metrics(nameless)) == CLIP


def test_keys_and_dtypes_are_the_same_at_every_step_and_under_vmap():
    tx = gcx.watch(gcx.skip_nonfinite(gcx.accumulate_gradients(clip(), 2)))
    first = gcx.metrics(tx.init(PARAMS))
    assert set(first) == CLIP | ACCUMULATION | NONFINITE | WATCH

    @jax.jit
    @jax.vmap
    def train(scales):
        def step(state, scale):
            grads = jax.tree.map(lambda p: p * scale, PARAMS)
            _, state = tx.update(grads, state, PARAMS)
            return state, gcx.metrics(state)

        return jax.lax.scan(step, tx.init(PARAMS), scales)

    state, rows = train(np.arange(1.0, 7.0, dtype="f").reshape(2, 3))
    rows, last = jax.device_get((rows, jax.jit(gcx.metrics)(state)))
    assert {key: row.dtype for key, row in rows.items()} == {k: x.dtype for k, x in first.items()}
    chex.assert_trees_all_equal(jax.tree.map(lambda row: row[:, -1], rows), last)
    measured = {"grad_norm": 15, "update_norm": 0, "parameter_norm": 5, "nonfinite_elements": 0}
    assert {key: rows[key][0, -1] for key in WATCH} == measured


def test_metrics_of_several_guards_are_combined():
    inner = gcx.skip_spikes(optax.sgd(0.1), norm=10.0, max_consecutive_skips=2)
    tx = gcx.skip_nonfinite(gcx.accumulate_gradients(inner, 2), max_consecutive_skips=3)
    _, state = feed(tx, [1.0, 1.0, np.nan, 1.0, 50.0, 50.0, 50.0, np.inf])
    found = {key: int(x) for key, x in gcx.metrics(state).items() if x.dtype != jnp.float32}
    assert found == {
        "consecutive_skips": 4,
        "empty_windows": 0,
        "gradient_step": 1,  # the guard inside skipped two others
        "guard_failed": 1,
        "mini_step": 0,
        "skipped_large_norm": 2,
        "skipped_nonfinite": 2,  # the sum
    }
    inner = gcx.skip_spikes(optax.sgd(0.1), norm=9.0)
    for both in (gcx.skip_spikes(inner, norm=8.0), gcx.skip_spikes(optax.chain(inner), norm=8.0)):
        _, state = feed(both, [7.0])
        assert gcx.metrics(state)["skip_threshold"] == 8  # the smallest
        assert gcx.metrics(state)["grad_norm"] == 7


def test_a_name_that_occurs_twice_carries_its_path():
    tx = optax.chain(clip(10.0), optax.adam(0.1), clip(0.01))
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    found = gcx.metrics(state)
    keys = CLIP - {"grad_norm"}
    assert set(found) == {"grad_norm"} | {f"{key}/{place}" for key in keys for place in (0, 2)}
    assert found["clip_threshold/0"] == 10.0 and found["grad_norm"] == 5.0
    assert found["clip_threshold/2"] == np.float32(0.01)
    parts = optax.partition({"body": clip(), "head": optax.sgd(0.1)}, LABELS)
    found = gcx.metrics(optax.named_chain(("first", clip()), ("split", parts)).init(PARAMS))
    places = "first", "split/inner_states/body/inner_state"
    assert {"grad_norm", "grad_norm/body", *(f"clip_factor/{x}" for x in places)} <= set(found)
    labels = {key: f"a/{key}" for key in PARAMS}
    parts = optax.partition({label: clip() for label in labels.values()}, labels)
    found = gcx.metrics(parts.init(PARAMS))
    assert {f"grad_norm/{label}" for label in labels.values()} <= set(found)


def test_groups_carry_their_label():
    tx = gcx.clip_by_group_norm({"body": 1.0, "head": 8.0}, LABELS)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    found = {key: float(x) for key, x in gcx.metrics(state).items()}
    assert found == {
        "clip_factor/body": pytest.approx(1 / 3),
        "clip_factor/head": 1.0,
        "clip_fraction": 0.5,
        "clip_threshold/body": 1.0,
        "clip_threshold/head": 8.0,
        "grad_norm/body": 3.0,
        "grad_norm/head": 4.0,
    }
    found = gcx.metrics(optax.chain(tx, tx).init(PARAMS))
    assert {"grad_norm/body/0", "grad_norm/head/1", "clip_fraction/0"} < set(found)


def test_nothing_is_computed_inside_jit():
    tx = optax.chain(clip(), gcx.skip_spikes(optax.adam(0.1), norm=1.0))
    jaxpr = jax.make_jaxpr(gcx.metrics)(tx.init(PARAMS))
    assert not jaxpr.eqns
