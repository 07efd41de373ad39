"""Random gates and random streams of micro-batches against the model in `gates_model`.

The author of this file and of the model knows the documentation, not the source. Each group draws
compositions and streams for one claim. `FUZZ=1` draws new ones without end.
"""

import itertools
import os
from dataclasses import dataclass
from functools import partial

import gates_model as model
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from accumulation_cases import taken
from marks import slow

SHAPES = {"x": (2,), "y": (3,)}
FUZZ = bool(os.environ.get("FUZZ"))
LIMIT, SCALE = {"max_consecutive_skips": 5}, {"init_scale": 8.0, "growth_interval": 3}


def is_large(grads, params, **extra_args):
    return gcx.global_norm(grads) > 10.0


# name: (the guard, its arguments, the arguments of the model's guard)
GUARDS = {
    "nonfinite": (gcx.skip_nonfinite, LIMIT, {"kind": "nonfinite"}),
    "step": (gcx.skip_nonfinite, LIMIT | {"check": "step"}, {"kind": "nonfinite", "check": "step"}),
    "norm": (gcx.skip_spikes, LIMIT | {"norm": 10.0}, {"norm": 10.0}),
    "loss": (gcx.skip_spikes, LIMIT | {"loss": 4.0}, {"loss": 4.0}),
    "both": (gcx.skip_spikes, LIMIT | {"norm": 10.0, "loss": 4.0}, {"norm": 10.0, "loss": 4.0}),
    "scale": (gcx.dynamic_loss_scale, SCALE, {"kind": "scale"}),
    "if": (gcx.skip_if, LIMIT | {"predicate": is_large}, {"kind": "if", "norm": 10.0}),
}


@dataclass
class Group:
    """What the compositions and the streams of one group contain."""

    shapes: str  # of compositions, see `draw`
    events: str  # calls that are not ordinary
    keys: str = ""  # extra arguments
    guards: str = "nonfinite step norm scale"
    checks: str = ""  # beyond parameters, has_updated, skips and counters of windows
    options: str = ""  # mask, watch, flush, sum
    leaves: str = "sgd adam"
    rate: float = 0.45  # of calls with an event
    seed: int = 0  # of the composition in the suite


# fmt: off
GROUPS = {
    "steps and windows": Group("plain nested window inside chain partition", "nan spike", options="watch"),
    "computed steps": Group("plain nested window inside", "nan toxic", guards="step", checks="consecutive_skips guard_failed", leaves="toxic"),
    "weights and flush": Group("window", "nan bad_weight", "weight flush", "nonfinite step scale"),
    "losses": Group("plain nested window", "nan loss_spike loss_nan", "value", "nonfinite both loss"),
    "overflow": Group("plain nested window", "huge large", "", "nonfinite", "consecutive_skips guard_failed", "sum", "adam"),
    "guards on both sides": Group("both", "nan spike", "flush", seed=4),  # a scale outside
    "consecutive skips of nested guards": Group("nested", "nan spike", checks="consecutive_skips guard_failed", seed=1),
    "micro-batches of weight zero": Group("window", "nan padding", "weight flush"),
    "windows without weight": Group("window", "empty", "weight", "nonfinite step norm", "guard_failed", rate=0.9),
    "the function flush": Group("window both chain partition", "nan", options="flush"),
    "the function flush and consecutive skips": Group("window both", "nan large", checks="consecutive_skips guard_failed", options="flush sum", rate=0.8),
    "norm of this call": Group("plain nested window", "nan spike", checks="grad_norm", seed=7),  # a scale outside
    "masks": Group("plain nested window inside both", "nan frozen spike", options="mask"),
    "mean loss of a window": Group("inside both", "loss_spike loss_nan", "value weight", "nonfinite both loss", seed=1),
    "predicates": Group("plain nested window inside both", "spike medium", "weight flush", "if norm", "consecutive_skips guard_failed", "sum", rate=0.7),
    "infinite measurements": Group("plain nested", "nan huge loss_large", "value", "step", options="watch", leaves="sgd"),
}
# fmt: on


def draw_leaf(rng, group):
    kind = str(rng.choice(group.leaves.split()))
    sgd = optax.sgd(lambda count: 0.1 / (1 + count))

    def toxic(updates, params=None):
        return jax.tree.map(lambda x: jnp.where(updates["x"][0] > 1.5, jnp.nan, x), updates)

    tx = optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(0.1)) if kind == "adam" else sgd
    tx = optax.chain(optax.stateless(toxic), sgd) if kind == "toxic" else tx
    return tx, model.Leaf(kind)


def draw_guards(rng, group, number, may_scale):
    wraps, guards = [], []
    mask = {"trainable": {"x": True, "y": False}} if "mask" in group.options else {}
    for i in range(number):
        names = [k for k in group.guards.split() if k != "scale" or (may_scale and i == 0)]
        guard, options, named = GUARDS[str(rng.choice(names))]
        wraps.append(partial(guard, **options, **mask))
        guards.append(model.Guard(**named, mask=mask.get("trainable")))
    return wraps, guards


def wrapped(tx, wraps):
    for wrap in reversed(wraps):
        tx = wrap(tx)
    return tx


def draw(rng, group):
    """A transformation and its model."""
    shape = str(rng.choice(group.shapes.split()))
    number = {"inside": 0, "nested": int(rng.integers(2, 4))}.get(shape, int(rng.integers(1, 3)))
    if shape in ("chain", "partition"):  # a guard around them raises
        number = 0
    wraps, outer = draw_guards(rng, group, number, True)
    number = int(rng.integers(1, 3)) if shape in ("inside", "both") else 0
    within_wraps, within = draw_guards(rng, group, number, not outer)
    has_watch = "watch" in group.options or rng.random() < 0.1
    is_watch_outside = has_watch and rng.random() < 0.5
    tx, made = draw_leaf(rng, group)
    tx, window = gcx.watch(tx) if has_watch and not is_watch_outside else tx, None
    tx = wrapped(tx, within_wraps)
    if shape not in ("plain", "nested"):
        every = [1, 2, 3, lambda step: 1 + step % 3][rng.integers(4)]
        reduction = "sum" if "sum" in group.options else "mean"
        tx = gcx.accumulate_gradients(tx, every, reduction=reduction)
        window = model.Accumulation(every, reduction)
    if shape in ("chain", "partition"):
        made, window = model.Stack([], window, [], made), None
    if shape == "chain":
        clip = gcx.clip_by_global_norm(lambda count: 1.0 + 0.25 * count)
        tx, made = optax.chain(clip, tx, optax.scale(0.5)), model.Chain(made)
    if shape == "partition":
        other, other_made = draw_leaf(rng, group)
        other_wraps, guards = draw_guards(rng, group, 1, False)
        tx = optax.partition({"x": tx, "y": wrapped(other, other_wraps)}, {"x": "x", "y": "y"})
        made = model.Partition({"x": made, "y": model.Stack(guards, None, [], other_made)})
    tx = wrapped(tx, wraps)
    return gcx.watch(tx) if is_watch_outside else tx, model.Stack(outer, window, within, made)


def draw_call(rng, group):
    """Gradients and extra arguments of one call."""
    grads = {k: rng.normal(size=s) * 0.5 for k, s in SHAPES.items()}
    extra = {"value": rng.uniform(1, 3), "weight": float(rng.integers(1, 4))}
    extra["flush"] = bool(rng.random() < 0.2)
    event = str(rng.choice(group.events.split())) if rng.random() < group.rate else ""
    bad = [np.nan, np.inf, -np.inf][rng.integers(3)]
    if event in ("spike", "medium"):
        grads = model.scaled(grads, {"spike": 50, "medium": 8}[event] / model.norm(grads))
    grads["x"][0] = 2.0 if event == "toxic" else min(grads["x"][0], 1.2)
    if event in ("nan", "padding"):
        grads[str(rng.choice(list(SHAPES)))][1] = bad
    if event in ("huge", "large", "frozen"):  # the sum of two large gradients overflows
        grads["y"][1] = {"huge": 3e19, "large": 1.3e19}.get(event, rng.choice([bad, 1e4, 3e19]))
    changed = {"bad_weight": ("weight", abs(bad)), "loss_spike": ("value", 50.0)}
    changed |= {"loss_nan": ("value", abs(bad)), "loss_large": ("value", 1e20)}
    changed |= dict.fromkeys(("padding", "empty"), ("weight", 0.0))
    extra |= [changed[event]] if event in changed else []
    return grads, {k: extra[k] for k in group.keys.split()}


def expected(made, params, group):
    guards = [gate for gate in made.gates if isinstance(gate, model.Guard)]
    windows = [gate for gate in made.gates if isinstance(gate, model.Accumulation)]
    found = {f"params/{k}": x for k, x in params.items()} | {"has_updated": made.has_updated}
    for cause in ("nonfinite", "large_norm", "large_loss", "other"):
        found[f"skipped_{cause}"] = sum(guard.skips[cause] for guard in guards)
    for window in windows:
        found |= {"mini_step": window.mini_step, "gradient_step": window.gradient_step}
        found["empty_windows"] = window.empty
    for guard in guards:
        found |= {"loss_scale": guard.scale} if guard.kind == "scale" else {}
    failed = any(not isinstance(g, model.Accumulation) and g.has_failed for g in made.gates)
    extra = {"consecutive_skips": made.skips_in_a_row, "guard_failed": failed}
    extra["grad_norm"] = made.grad_norm
    return found | {k: extra[k] for k in group.checks.split()}


def run(group, seed, num_calls=30):
    """Run one composition on one stream; return the first difference, or None."""
    rng = np.random.default_rng(seed)
    tx, made = draw(rng, group)
    is_fused = rng.random() < 0.5

    @jax.jit
    def update(grads, state, params, extra):
        scale = gcx.metrics(state).get("loss_scale", 1.0)
        grads = jax.tree.map(lambda x: x * scale, grads)
        return taken(tx, grads, state, params, fast=is_fused, **extra)

    @jax.jit
    def flush(state, params):
        updates, state = gcx.flush(tx, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def observe(state):
        return dict(gcx.metrics(state)) | {"has_updated": gcx.has_updated(state)}

    want = {k: rng.normal(size=s) for k, s in SHAPES.items()}
    params = {k: jnp.asarray(x, jnp.float32) for k, x in want.items()}
    state, history = tx.init(params), [f"seed {seed}"]
    for _ in range(num_calls):
        if "flush" in group.options and rng.random() < 0.2:
            params, state = flush(state, params)
            updates = made.flush() or {}
            history.append("flush()")
        else:
            grads, extra = draw_call(rng, group)
            scale = expected(made, want, group).get("loss_scale", 1.0)
            arrays = {k: jnp.float32(x) for k, x in grads.items()}
            params, state = update(arrays, state, params, jax.tree.map(jnp.asarray, extra))
            updates = made.update(model.scaled(grads, scale), **extra)
            history.append(f"{ {k: x.round(2).tolist() for k, x in grads.items()} } {extra}")
        want = {k: x + updates.get(k, 0.0) for k, x in want.items()}
        got = observe(state) | {f"params/{k}": x for k, x in params.items()}
        for key, value in expected(made, want, group).items():
            found = got.get(key, 0)  # without a guard there is no metric of its skips
            if not np.allclose(value, found, rtol=2e-4, atol=2e-5, equal_nan=True):
                return "\n".join([*history, f"{key} is {found}, expected {value}"])
    return None


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("number", [0, *slow(1, 2)])
@pytest.mark.sampled
def test_gates_agree_with_the_documentation(name, number):
    first = GROUPS[name].seed + number
    for seed in itertools.count(first) if FUZZ else [first]:
        assert (difference := run(GROUPS[name], seed)) is None, difference
