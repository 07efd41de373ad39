"""What the tests of accumulation share: small parameters, gradients, and runs of micro-batches."""

import jax
import numpy as np
import optax

import gradclip_jax as gcx
import hlo
import trees

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(text, **where):
    """How many collectives of each kind a compiled program has, of those that it has."""
    return {c: n for c in COLLECTIVES if (n := hlo.count(text, c, **where))}


def params_like(dtype="float32"):
    return {"w": trees.normal((3, 2), dtype, seed=100), "b": [None, trees.normal((), dtype)]}


def gradients(seed, params):
    return jax.tree.map(lambda p: trees.normal(p.shape, p.dtype, seed=seed), params)


def run(tx, params, grads, extra_args=None, state=None):
    """The updates and the state after each micro-batch; one compiled program, traced once."""
    tx = optax.with_extra_args_support(tx)
    traces = []

    @jax.jit
    def update(grads, state, extra_args):
        traces.append(1)
        return tx.update(grads, state, params, **extra_args)

    state = tx.init(params) if state is None else state
    updates, states = [], []
    for i, g in enumerate(grads):
        out, state = update(g, state, extra_args[i] if extra_args else {})
        updates.append(out)
        states.append(state)
    assert len(traces) == 1
    return updates, states


def emissions(states):
    return [bool(gcx.has_updated(s)) for s in states]


def is_zero(tree):
    return not any(np.any(x) for x in jax.tree.leaves(tree))


def taken(tx, grads, state, params, *, fast, **extra_args):
    """The next parameters and state, by either function."""
    if fast:
        return gcx.apply_gradients(tx, grads, state, params, **extra_args)
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state
