"""The training steps that are measured: ours beside Optax's counterpart and a step with nothing.

All use AdamW.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradclip_jax as gcx
from benchmarks._measure import Case
from benchmarks._models import Model

Tree = Any
EVERY = 8


@dataclass(frozen=True)
class Step:
    """A training step of a model: loss, backward pass, update.

    Attributes:
        tx: the optimizer.
        run: `(params, state, batch) -> (params, state, loss)`.
    """

    tx: Any
    run: Callable[..., Any]

    def state(self, params: Tree) -> Tree:
        """The state as shapes."""
        return jax.eval_shape(self.tx.init, params)


Maker = Callable[[Model], Step]


@dataclass(frozen=True)
class Row:
    """A step of ours.

    Attributes:
        ours: makes it.
        theirs: the entry of `OPTAX` that it is measured by: the same thing, or the nearest.
        accumulates: whether the step is mostly held; held and emitted are counted apart.
    """

    ours: Maker
    theirs: str
    accumulates: bool = False


def _updated(tx: Any, value_and_grad: Any = jax.value_and_grad) -> Maker:
    """By `update` and `apply_updates`."""

    def make(model: Model) -> Step:
        def run(params: Tree, state: Tree, batch: Tree) -> Any:
            loss, grads = value_and_grad(model.loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        return Step(tx, run)

    return make


def applied(tx: Any) -> Maker:
    """By `apply_gradients`."""

    def make(model: Model) -> Step:
        def run(params: Tree, state: Tree, batch: Tree) -> Any:
            loss, grads = jax.value_and_grad(model.loss)(params, batch)
            return *gcx.apply_gradients(tx, grads, state, params), loss

        return Step(tx, run)

    return make


def _by_hand(fun: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A `value_and_grad` in micro-batches, as many write it: a scan over the reshaped batch."""

    def value_and_grad(params: Tree, batch: Tree) -> Any:
        def add(total: Any, micro_batch: Tree) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(fun)(params, micro_batch)), None

        parts = jax.tree.map(lambda x: x.reshape(EVERY, -1, *x.shape[1:]), batch)
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        return jax.tree.map(lambda x: x / EVERY, lax.scan(add, zeros, parts)[0])

    return value_and_grad


_ADAMW = optax.adamw(1e-4)


def _then_adamw(clip: Any) -> Any:
    return optax.chain(clip, _ADAMW)


_OPTAX_CLIP = _then_adamw(optax.clip_by_global_norm(1.0))
NOTHING = "nothing"
"""The entry of `OPTAX` that only has the loss, the gradient and AdamW."""
OPTAX = {
    NOTHING: _updated(_ADAMW),
    "clip_by_global_norm": _updated(_OPTAX_CLIP),
    "clip_by_block_rms": _updated(_then_adamw(optax.clip_by_block_rms(1.0))),
    "adaptive_grad_clip": _updated(_then_adamw(optax.adaptive_grad_clip(0.01))),
    "apply_if_finite": _updated(optax.apply_if_finite(_ADAMW, 9)),
    "apply_if_finite(clip)": _updated(optax.apply_if_finite(_OPTAX_CLIP, 9)),
    "MultiSteps(clip)": _updated(optax.MultiSteps(_OPTAX_CLIP, EVERY)),
    # Both leave out a micro-batch that is not finite, and a window.
    "MultiSteps(apply_if_finite(clip), skip_not_finite)": _updated(
        optax.MultiSteps(
            optax.apply_if_finite(_OPTAX_CLIP, 9),
            EVERY,
            should_skip_update_fn=optax.skip_not_finite,
        )
    ),
    "a `scan` by hand": _updated(_ADAMW, _by_hand),
}

_CLIP = _then_adamw(gcx.clip_by_global_norm(1.0))


def watched(
    tx: Any, make: Callable[[Any], Maker], of: Any = ("gradient", "update", "parameter")
) -> Maker:
    """A watched transformation; of stacked blocks each layer by itself."""

    def watch(model: Model) -> Step:
        params, granularity = model.params, "leaf"
        if isinstance(params, dict):
            # A list of blocks is unrolled, a dict of arrays is stacked.
            axes = {name: int(name == "blocks" and type(x) is dict) for name, x in params.items()}
            granularity = gcx.granularities.layer(axes)
        return make(gcx.watch(tx, of=of, granularity=granularity))(model)

    return watch


def _example_loss(model: Model) -> Callable[..., jax.Array]:
    """The loss of one example, which has no batch axis."""
    return lambda params, example: model.loss(params, jax.tree.map(lambda x: x[None], example))


def _per_example(model: Model) -> Step:
    def value_and_grad(_: Any) -> Any:
        return gcx.per_example.value_and_grad(_example_loss(model), 1.0)

    return _updated(_ADAMW, value_and_grad)(model)


def _aggregated(model: Model) -> Step:
    """Optax's per-example clipping, which gets the materialized gradient of every example."""
    tx = optax.chain(optax.contrib.differentially_private_aggregate(1.0, 0.0, 0), _ADAMW)

    def value_and_grad(_: Any) -> Any:
        one = jax.value_and_grad(_example_loss(model))

        def run(params: Tree, batch: Tree) -> Any:
            losses, grads = jax.vmap(one, (None, 0))(params, batch)
            return jnp.mean(losses), grads

        return run

    return _updated(tx, value_and_grad)(model)


# Too large for the table of all models; `gpu.py` times them.
PER_EXAMPLE = {"ours": _per_example, "Optax": _aggregated}
ACCUMULATED = gcx.accumulate_gradients(_CLIP, EVERY)
_SPIKES = gcx.skip_spikes(_ADAMW, norm=gcx.thresholds.mean_std(6.0))
ROWS = {
    "clip_by_global_norm": Row(_updated(_CLIP), "clip_by_global_norm"),
    "clip_by_leaf_norm": Row(
        _updated(_then_adamw(gcx.clip_by_leaf_norm(1.0))), "clip_by_block_rms"
    ),
    "clip_by_block_rms": Row(
        _updated(_then_adamw(gcx.clip_by_block_rms(1.0))), "clip_by_block_rms"
    ),
    "adaptive_grad_clip": Row(
        _updated(_then_adamw(gcx.adaptive_grad_clip(0.01))), "adaptive_grad_clip"
    ),
    "autoclip": Row(_updated(_then_adamw(gcx.autoclip())), "clip_by_global_norm"),
    "adagc": Row(_updated(_then_adamw(gcx.adagc())), "clip_by_global_norm"),
    "skip_nonfinite": Row(applied(gcx.skip_nonfinite(_ADAMW)), "apply_if_finite"),
    "skip_nonfinite(clip)": Row(applied(gcx.skip_nonfinite(_CLIP)), "apply_if_finite(clip)"),
    'skip_nonfinite(check="step")': Row(
        applied(gcx.skip_nonfinite(_ADAMW, check="step")), "apply_if_finite"
    ),
    "skip_spikes(norm=10.0)": Row(applied(gcx.skip_spikes(_ADAMW, norm=10.0)), "apply_if_finite"),
    "skip_spikes": Row(applied(_SPIKES), "apply_if_finite"),
    "dynamic_loss_scale": Row(applied(gcx.dynamic_loss_scale(_ADAMW)), "apply_if_finite"),
    "accumulate_gradients(clip)": Row(applied(ACCUMULATED), "MultiSteps(clip)", True),
    "accumulate_gradients(clip), bfloat16": Row(
        applied(gcx.accumulate_gradients(_CLIP, EVERY, accumulator_dtype=jnp.bfloat16)),
        "MultiSteps(clip)",
        True,
    ),
    "skip_nonfinite(accumulate_gradients(clip))": Row(
        applied(gcx.skip_nonfinite(ACCUMULATED)),
        "MultiSteps(apply_if_finite(clip), skip_not_finite)",
        True,
    ),
    "watch(clip), the gradient": Row(
        watched(_CLIP, _updated, ("gradient",)), "clip_by_global_norm"
    ),
    "watch(clip)": Row(watched(_CLIP, _updated), "clip_by_global_norm"),
    "microbatched_value_and_grad": Row(
        _updated(_ADAMW, lambda fun: gcx.microbatched_value_and_grad(fun, EVERY)),
        "a `scan` by hand",
    ),
}


def case_of(model: Model, make: Maker, scanned: int = 1) -> Case:
    """A step of a model, or a `scan` over `scanned` steps on the same batch."""
    params, batch = model.arrays
    step = make(model)

    def carry() -> Any:
        return jax.tree.map(jnp.copy, (params, step.tx.init(params)))

    def run(carry: Any, batch: Any) -> Any:
        if scanned == 1:
            return step.run(*carry, batch)[:2]
        return lax.scan(lambda x, _: (step.run(*x, batch)[:2], None), carry, length=scanned)[0]

    return Case(run, carry, (batch,))
