"""The programs that are compiled, ours beside Optax's for the same thing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _devices
import jax
import jax.numpy as jnp
import optax
from _compare import fast, train

import gradclip_jax as gcx

Tree = Any


@dataclass(frozen=True)
class Case:
    """A function of the tree, its arguments as shapes, and which are donated."""

    function: Callable[..., Any]
    args: Callable[[Tree], tuple[Any, ...]]
    donate: tuple[int, ...] = ()

    def compile_for(self, platform: str, tree: Tree) -> _devices.Compiled:
        """The program for one device."""
        args = _devices.placed(self.args(tree), _devices.one_device(platform))
        return _devices.compile_for(platform, self.function, *args, donate=self.donate)


@dataclass(frozen=True)
class Pair:
    """Ours, and what Optax has for the same thing."""

    ours: Callable[[], Case]
    theirs: Callable[[], Case] | None = None

    def makers(self) -> dict[str, Callable[[], Case]]:
        """By whose it is; without Optax's where it has none."""
        ours = {"gcx": self.ours}
        return ours if self.theirs is None else ours | {"optax": self.theirs}


def _of_tree(function: Callable[[Tree], Any]) -> Case:
    return Case(function, lambda tree: (tree,))


def _update(tx: Any) -> Case:
    """Gradients and state in, updates and state out, in place."""

    def update(grads: Tree, state: Tree, params: Tree) -> Any:
        return tx.update(grads, state, params)

    return Case(update, lambda t: (t, jax.eval_shape(tx.init, t), t), donate=(0, 1))


def _step(tx: Any, how: Callable[[Any], Callable[..., Any]] = train) -> Case:
    """Parameters and state in and out, in place."""
    return Case(how(tx), lambda t: ((t, jax.eval_shape(tx.init, t)), t), donate=(0,))


def _optax_leaf_norms(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)))), tree)


def _optax_global_and_leaf_clip() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.clip_by_block_rms(1.0))


def _adamw() -> Any:
    return optax.adamw(1e-4)


def _ours() -> Any:
    return optax.chain(gcx.clip_by_global_norm(1.0), _adamw())


def _theirs() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), _adamw())


def _if_finite(tx: Any) -> Case:
    """Optax's guard; nine skips in a row are allowed."""
    return _step(optax.apply_if_finite(tx, 9))


def toy_loss(params: Tree, batch: Any) -> Any:
    """Touches every parameter, and is no larger than its gradient."""
    scale = jnp.mean(batch)
    return sum(jnp.mean(jnp.square(x.astype(jnp.float32) * scale)) for x in jax.tree.leaves(params))


def microbatched(value_and_grad: Callable[..., Any]) -> Case:
    batch = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    return Case(value_and_grad, lambda t: (t, batch))


def _optax_microbatch() -> Case:
    from optax import microbatching

    return microbatched(microbatching.microbatch(jax.value_and_grad(toy_loss), 1, 8))


NEVER = 10**9
PROGRAMS = {
    "norm": Pair(lambda: _of_tree(gcx.global_norm), lambda: _of_tree(optax.tree.norm)),
    "clip": Pair(
        lambda: _update(gcx.clip_by_global_norm(1.0)),
        lambda: _update(optax.clip_by_global_norm(1.0)),
    ),
    "leaf norms": Pair(lambda: _of_tree(gcx.leaf_norms), lambda: _of_tree(_optax_leaf_norms)),
    "clip by leaf norm": Pair(
        lambda: _update(gcx.clip_by_leaf_norm(1.0)),
        lambda: _update(optax.clip_by_block_rms(1.0)),
    ),
    "clip by block RMS": Pair(
        lambda: _update(gcx.clip_by_block_rms(1.0)),
        lambda: _update(optax.clip_by_block_rms(1.0)),
    ),
    "adaptive_grad_clip": Pair(
        lambda: _update(gcx.adaptive_grad_clip(0.01)),
        lambda: _update(optax.adaptive_grad_clip(0.01)),
    ),
    "zclip": Pair(lambda: _update(gcx.zclip()), lambda: _update(optax.clip_by_global_norm(1.0))),
    "adagc": Pair(lambda: _update(gcx.adagc()), lambda: _update(_optax_global_and_leaf_clip())),
    "clip + AdamW": Pair(lambda: _step(_ours()), lambda: _step(_theirs())),
    "hold (and emission inside), apply_gradients": Pair(
        lambda: _step(gcx.accumulate_gradients(_ours(), 8), fast),
        lambda: _step(optax.MultiSteps(_theirs(), 8)),
    ),
    "hold (and emission inside) of AdamW, apply_gradients": Pair(
        lambda: _step(gcx.accumulate_gradients(_adamw(), 8), fast),
        lambda: _step(optax.MultiSteps(_adamw(), 8)),
    ),
    "hold (and emission inside), update": Pair(
        lambda: _step(gcx.accumulate_gradients(_ours(), 8)),
        lambda: _step(optax.MultiSteps(_theirs(), 8)),
    ),
    "skip_nonfinite(AdamW), apply_gradients": Pair(
        lambda: _step(gcx.skip_nonfinite(_adamw()), fast),
        lambda: _if_finite(_adamw()),
    ),
    "skip_nonfinite(AdamW), update": Pair(
        lambda: _step(gcx.skip_nonfinite(_adamw())),
        lambda: _if_finite(_adamw()),
    ),
    "skip_nonfinite(AdamW, check=gradient), apply_gradients": Pair(
        lambda: _step(gcx.skip_nonfinite(_adamw(), check="gradient"), fast),
        lambda: _if_finite(_adamw()),
    ),
    "skip_spikes(AdamW), apply_gradients": Pair(
        lambda: _step(gcx.skip_spikes(_adamw(), norm=gcx.thresholds.mean_std(6.0)), fast),
        lambda: _if_finite(_adamw()),
    ),
    "dynamic_loss_scale(AdamW), apply_gradients": Pair(
        lambda: _step(gcx.dynamic_loss_scale(_adamw()), fast),
        lambda: _if_finite(_adamw()),
    ),
    "skip_large_norm(AdamW), apply_gradients": Pair(
        lambda: _step(gcx.skip_large_norm(_adamw(), 10.0), fast),
        lambda: _if_finite(_adamw()),
    ),
    "skip_nonfinite(clip + AdamW), apply_gradients": Pair(
        lambda: _step(gcx.skip_nonfinite(_ours()), fast),
        lambda: _if_finite(_theirs()),
    ),
    "skip_nonfinite(clip + AdamW, check=gradient), apply_gradients": Pair(
        lambda: _step(gcx.skip_nonfinite(_ours(), check="gradient"), fast),
        lambda: _if_finite(_theirs()),
    ),
    "skip_nonfinite(accumulation), apply_gradients": Pair(
        lambda: _step(gcx.skip_nonfinite(gcx.accumulate_gradients(_ours(), 8)), fast),
        lambda: _step(optax.MultiSteps(optax.apply_if_finite(_theirs(), 9), 8)),
    ),
    "microbatched_value_and_grad": Pair(
        lambda: microbatched(gcx.microbatched_value_and_grad(toy_loss, 8)), _optax_microbatch
    ),
}
