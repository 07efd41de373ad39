"""What the tests of guards share: guards, rules, and small runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import gradclip_jax as gcx

INT_MAX = np.iinfo(np.int32).max
SHARDS, WHOLE = PartitionSpec("data"), PartitionSpec()


GUARDS = {
    "skip_nonfinite": gcx.skip_nonfinite,
    "check of steps": functools.partial(gcx.skip_nonfinite, check="step"),
    "skip_spikes": functools.partial(gcx.skip_spikes, norm=1e4),
    "both": lambda inner, **kwargs: gcx.skip_nonfinite(
        gcx.skip_spikes(inner, norm=1e4, **kwargs), **kwargs
    ),
}


RULES = {
    "percentile": gcx.thresholds.percentile(90.0, window=50),
    "mean_std": gcx.thresholds.mean_std(6.0, window=50, warmup_steps=10),
    "zscore": gcx.thresholds.zscore(),
    "ema": gcx.thresholds.ema(2.0, warmup_steps=10, warmup_max=jnp.inf),
    "quantile": gcx.thresholds.quantile(0.9),
}


each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def feed(tx, norms, losses=None):
    """Runs a guard on gradients of the given norms; the skips of each step, and the last state.

    Several streams of norms, one a row, are fed by one program.
    """

    def step(state, now):
        norm, *loss = now
        extra_args = {"value": loss[0]} if loss else {}
        _, state = tx.update(jnp.stack([norm * 0.6, norm * 0.8]), state, **extra_args)
        return state, ~gcx.has_updated(state)

    def run(*stream):
        return jax.lax.scan(step, tx.init(jnp.zeros(2)), stream)

    given = [norms] if losses is None else [norms, losses]
    stream = [jnp.asarray(np.asarray(x), jnp.float32) for x in given]
    state, skipped = jax.jit(run if stream[0].ndim == 1 else jax.vmap(run))(*stream)
    return np.asarray(skipped), jax.tree.map(np.asarray, state)


@functools.cache
def compiled_call(tx):
    return jax.jit(functools.partial(gcx.apply_gradients, tx))


def calls(tx, stream):
    """The parameter, the state, and whether a step was taken, for gradients of one number each.

    A gradient may come with extra arguments.
    """
    params, rows = jnp.zeros(1), []
    state, call = tx.init(params), compiled_call(tx)
    for item in stream:
        grad, extra_args = item if isinstance(item, tuple) else (item, {})
        before = params
        params, state = call(jnp.float32([grad]), state, params, **extra_args)
        rows.append(int(gcx.has_updated(state)))
        assert rows[-1] == bool(params != before)
    return params.item(), state, rows


def sharded(in_specs, out_specs, **options):
    """A decorator that compiles a function for shards on all devices, over the axis "data"."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return lambda function: jax.jit(jax.shard_map(function, **specs, **options))


def on_shards(tx, check_vma=True):
    """One step on a sharded and a replicated leaf; what each device decided, and the updates."""
    specs = {"s": SHARDS, "w": WHOLE}

    @sharded((specs, specs), (specs, SHARDS, SHARDS), check_vma=check_vma)
    def step(grads, params):
        params, state = gcx.apply_gradients(tx, grads, tx.init(params), params)
        mine = jnp.zeros(1, jnp.int32) + (jax.lax.axis_index("data") * 0).astype(jnp.int32)
        skipped = gcx.metrics(state)["skipped_nonfinite"]
        return params, mine + skipped, mine + state.consecutive_skips

    return step


def saturated(state):
    """The state after 2^31 steps: every counter has its largest value."""

    def last(x):
        is_count = x.dtype == jnp.int32 and x.ndim == 0
        return jnp.full_like(x, INT_MAX) if is_count else x

    return jax.tree.map(last, state)
