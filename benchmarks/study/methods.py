"""The methods of the study: each a clip or a guard, with its optimizer and its one hyperparameter.

A method is built from that hyperparameter and a learning rate, both traced, so that one compiled
program trains a whole grid of them.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx
from gradclip_jax import thresholds

HUNDREDFOLD = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)
PERCENTILES = (10.0, 50.0, 75.0, 90.0, 99.0)
MICRO_BATCHES = 4
Unit = Literal["", "norm", "leaf norm", "example norm", "rms"]


class Setting(NamedTuple):
    """What a method is built from."""

    optimizer: Callable[[Any], optax.GradientTransformation]  # the problem's, of a learning rate
    learning_rate: Any  # a schedule
    value: Any  # of the hyperparameter
    recorded_norms: Callable[[], jax.Array]  # of the first 100 steps without clipping
    is_head: Any  # tree of bool: the last layer


class Method(NamedTuple):
    """A way to train, and where its hyperparameter is looked for."""

    name: str
    hyperparameter: str
    default: float
    grid: tuple[float, ...]
    build: Callable[[Setting], optax.GradientTransformation]
    unit: Unit = ""  # the grid is in units of the problem's usual norms
    optimizers: tuple[str, ...] = ("sgd", "adam")
    clips_each: Literal["batch", "micro-batch", "example"] = "batch"

    def values(self, usual: dict[str, float]) -> list[float]:
        return [value * usual.get(self.unit, 1.0) for value in self.grid]


def in_front(clip: Callable[[Any], optax.GradientTransformation]) -> Any:
    """Builds the chain of a clip and the problem's optimizer."""

    def build(at: Setting) -> optax.GradientTransformation:
        return optax.chain(clip(at.value), at.optimizer(at.learning_rate))

    return build


def around(guard: Callable[[Any, Any], optax.GradientTransformation]) -> Any:
    """Builds a guard around the problem's optimizer."""
    return lambda at: guard(at.optimizer(at.learning_rate), at.value)


def without_clipping(at: Setting) -> optax.GradientTransformation:
    """Its hyperparameter multiplies the learning rate, for nine rates over four decades."""
    return at.optimizer(lambda step: at.value * at.learning_rate(step))


def at_recorded_percentile(at: Setting) -> optax.GradientTransformation:
    """A fixed threshold, as `suggest_max_norm` finds it (which cannot be traced)."""
    norms = at.recorded_norms()
    found = jnp.nanpercentile(jnp.where(jnp.isfinite(norms), norms, jnp.nan), at.value)
    return in_front(gcx.clip_by_global_norm)(at._replace(value=found))


def running_median(factor: Any) -> optax.GradientTransformation:
    """A candidate of our own: a multiple of the median of the last 100 norms."""
    median = thresholds.percentile(50.0, 100)

    def update(norm: Any, state: Any, param_norm: Any):
        threshold, state = median.update(norm, state, param_norm)
        return factor * threshold, state

    return gcx.clip_by_global_norm(thresholds.Rule(median.init, update))


def agc(at: Setting) -> optax.GradientTransformation:
    """Without the last layer, as in the paper."""
    but_the_head = jax.tree.map(lambda is_head: not is_head, at.is_head)
    return in_front(lambda value: optax.masked(gcx.adaptive_grad_clip(value), but_the_head))(at)


def times(default: float) -> tuple[float, ...]:
    return tuple(default * factor for factor in HUNDREDFOLD)


METHODS = (
    Method("none", "learning rate, times", 1.0, HUNDREDFOLD, without_clipping),
    Method("fixed", "max_norm", 1.0, HUNDREDFOLD, in_front(gcx.clip_by_global_norm), "norm"),
    Method("recorded", "percentile", 90.0, PERCENTILES, at_recorded_percentile),
    Method("running median", "factor", 1.0, HUNDREDFOLD, in_front(running_median)),
    Method("leaf norm", "max_norm", 1.0, HUNDREDFOLD, in_front(gcx.clip_by_leaf_norm), "leaf norm"),
    Method("value", "max_value", 1.0, times(3.0), in_front(gcx.clip_by_value), "rms"),
    Method("block RMS", "threshold", 1.0, HUNDREDFOLD, in_front(gcx.clip_by_block_rms), "rms"),
    Method("AGC", "clipping", 0.01, times(0.01), agc, optimizers=("sgd",)),
    Method("AutoClip", "percentile", 10.0, PERCENTILES, in_front(gcx.autoclip)),
    Method(
        "quantile", "target", 0.5, (0.1, 0.5, 0.75, 0.9, 0.99),
        in_front(lambda target: gcx.clip_by_global_norm(thresholds.quantile(target))),
    ),
    Method(
        "ZClip", "z_threshold", 2.5, times(2.5),
        in_front(lambda z: gcx.zclip(z, max_norm=None)),
    ),
    Method("ZClip, cap 1", "z_threshold", 2.5, times(2.5), in_front(gcx.zclip)),
    Method("AdaGC", "relative", 1.05, tuple(1 + x for x in times(0.05)), in_front(gcx.adagc)),
    Method(
        "AdaGC, no cap", "relative", 1.05, tuple(1 + x for x in times(0.05)),
        in_front(lambda relative: gcx.adagc(relative, absolute=jnp.inf)),
    ),
    Method(
        "StableAdamW", "clipping", 1.0, HUNDREDFOLD,
        lambda at: gcx.stable_adamw(at.learning_rate, clipping=at.value),
        optimizers=("adam",),
    ),
    Method(
        "skip on norm", "z_threshold", 6.0, times(6.0),
        around(lambda inner, z: gcx.skip_spikes(inner, norm=thresholds.zscore(z))),
    ),
    Method(
        "skip on loss", "z_threshold", 6.0, times(6.0),
        around(lambda inner, z: gcx.skip_spikes(inner, loss=thresholds.mean_std(z))),
    ),
    Method(
        "micro-batches", "max_norm", 1.0, HUNDREDFOLD,
        lambda at: at.optimizer(at.learning_rate), "norm", clips_each="micro-batch",
    ),
    Method(
        "per example", "max_norm", 1.0, HUNDREDFOLD,
        lambda at: at.optimizer(at.learning_rate), "example norm", clips_each="example",
    ),
)  # fmt: skip
