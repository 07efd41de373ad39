"""The grid of `clip_by_norm` as a product: every granularity x threshold x reaction.

The oracle is float64 NumPy: which unit each element counts to, the threshold of each unit from
its own norms so far, and the factor. It shares nothing with the library. test_rules.py compares
the other rules with the numbers of their authors.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx
from gradclip_jax import granularities, thresholds

SHAPES = {"a": (3, 4), "b": (3, 2, 2), "c": (5,)}
STEPS, UNBOUNDED = 7, float(np.finfo(np.float32).max)


def drawn(seed: int, *axes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: np.float32(rng.standard_normal((*axes, *shape))) for k, shape in SHAPES.items()}


def stream() -> dict[str, np.ndarray]:
    """Gradients of seven steps: norms of the leaves differ, and rise and fall from step to step."""
    scales = np.float32([1.0, 0.5, 2.0, 8.0, 0.05, 1.5, 4.0])
    return {k: (x.T * scales).T for k, x in drawn(0, STEPS).items()}


def _numbered(first: int, *shape: int) -> np.ndarray:
    return first + np.arange(math.prod(shape)).reshape(shape)


# What `clip_by_norm` gets, and for each leaf the unit of each element, broadcast to its shape.
GRANULARITIES = {
    "global": ("global", {"a": 0, "b": 0, "c": 0}),
    "group": (granularities.group({"a": 1, "b": 1, "c": "head"}), {"a": 0, "b": 0, "c": 1}),
    "leaf": ("leaf", {"a": 0, "b": 1, "c": 2}),
    "stacked layer": (
        granularities.layer({"a": 1, "b": 3, "c": 0}),
        {"a": _numbered(0, 3, 1), "b": _numbered(3, 3, 2, 2), "c": 15},
    ),
    "axis": (granularities.axis(0), {"a": _numbered(0, 1, 4), "b": _numbered(4, 1, 2, 2), "c": 8}),
}

LAST_NORM = thresholds.Rule(
    lambda norm: jnp.full_like(norm, 1e9), lambda norm, last, _: (last, norm)
)
THRESHOLDS = {
    "number": (1.5, lambda n, p: np.full(STEPS, 1.5)),
    "schedule": (lambda count: 0.5 + count, lambda n, p: 0.5 + np.arange(STEPS)),
    "percentile": (
        thresholds.percentile(40.0, window=4),
        lambda n, p: np.array(
            [np.percentile(n[max(0, t - 3) : t + 1], 40.0) for t in range(STEPS)]
        ),
    ),
    "relative_to_params": (
        thresholds.relative_to_params(0.8, 1e-3),
        lambda n, p: np.full(STEPS, 0.8 * max(p, 1e-3)),
    ),
    "own rule": (LAST_NORM, lambda n, p: np.array([1e9, *n[:-1]])),
    "capped": (
        thresholds.capped(LAST_NORM, 1.1),
        lambda n, p: np.minimum([1e9, *n[:-1]], 1.1),
    ),
}


def unit_norms(leaves: dict[str, np.ndarray], units: dict[str, Any]) -> np.ndarray:
    """The norm of each unit, from the unit of each element."""
    squares = [np.square(x.astype(np.float64)).ravel() for x in leaves.values()]
    ids = [np.broadcast_to(units[name], x.shape).ravel() for name, x in leaves.items()]
    return np.sqrt(np.bincount(np.concatenate(ids), np.concatenate(squares)))


# One granularity with all thresholds, and all with one threshold of each kind.
KINDS = "number", "own rule", "relative_to_params"
GRID = [
    pytest.param(x, y, marks=() if x == "axis" and y in KINDS else pytest.mark.slow)
    for x in GRANULARITIES
    for y in (THRESHOLDS if x == "axis" else KINDS)
]


@pytest.mark.parametrize(("granularity", "threshold"), GRID)
@pytest.mark.sampled
def test_every_step_of_every_unit_is_that_of_the_formula(granularity, threshold):
    (cut, units_of), (value, thresholds_of) = GRANULARITIES[granularity], THRESHOLDS[threshold]
    grads, params = stream(), drawn(1)
    norms = np.stack(
        [unit_norms({k: x[t] for k, x in grads.items()}, units_of) for t in range(STEPS)]
    )
    param_norms = unit_norms(params, units_of)
    pairs = zip(norms.T, param_norms, strict=True)
    bounds = np.stack([thresholds_of(n, p) for n, p in pairs], axis=1)
    factors = {"scale": np.minimum(1, bounds / norms), "zero": np.where(norms <= bounds, 1.0, 0.0)}
    found = run(value, cut, grads, params)
    # Where norm and threshold are equal but for rounding, "zero" may fall to either side.
    is_decided = np.abs(norms - bounds) > 1e-5 * norms
    assert np.any(factors["scale"][is_decided] < 1) and np.any(norms < bounds)
    for reaction, factor in factors.items():
        updates, state = found[reaction]
        for name, x in grads.items():
            units = np.broadcast_to(units_of[name], x.shape[1:])
            keep = is_decided[:, units] if reaction == "zero" else True
            error = np.abs(updates[name] - x.astype(np.float64) * factor[:, units])
            assert np.all(np.where(keep, error, 0) <= 3e-5 * np.abs(x)), (reaction, name)
        clipped = np.mean((norms > bounds)[is_decided.all(axis=1)], axis=1)
        np.testing.assert_allclose(state.clip_fraction[is_decided.all(axis=1)], clipped, rtol=1e-6)
        exact = {"grad_norm": norms, "clip_threshold": np.minimum(bounds, UNBOUNDED)}
        if reaction == "scale":
            exact["clip_factor"] = factor
        for name, x in exact.items():
            if granularity != "group":
                x = np.linalg.norm(x, axis=1) if name == "grad_norm" else x.min(axis=1)
            told = np.stack(jax.tree.leaves(getattr(state, name)), axis=1).squeeze()
            rtol = 1e-6 if name == "grad_norm" else 3e-5
            np.testing.assert_allclose(told, x.squeeze(), rtol=rtol, err_msg=name)


def run(threshold, granularity, grads, params):
    """The updates and states of all steps for both reactions, from one compiled program."""
    make = functools.partial(gcx.clip_by_norm, threshold, granularity=granularity)
    clips = {reaction: make(reaction=reaction) for reaction in ("scale", "zero")}

    @jax.jit
    def all_steps(grads, states):
        def body(states, grads):
            both = {k: clip.update(grads, states[k], params) for k, clip in clips.items()}
            return {k: state for k, (_, state) in both.items()}, both

        return jax.lax.scan(body, states, grads)[1]

    found = all_steps(grads, {k: clip.init(params) for k, clip in clips.items()})
    return jax.tree.map(np.asarray, found)
