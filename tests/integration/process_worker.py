"""One of several processes of tests/test_processes.py: trains by every layout, writes what it saw.

Run by hand: `XLA_FLAGS=--xla_force_host_platform_device_count=8 python process_worker.py train
--process 0 --of 1 --port 12345 --out seen.json`.
"""

import argparse
import inspect
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx
from gradclip_jax.diagnostics import Incident
from gradclip_jax.monitoring._policy import Policy
from gradclip_jax.monitoring._rows import Names, Outcome, Rows

DEVICES = 8  # of all processes together
CALLS, BATCH, BAD_CALL, DEATH = 6, 16, 2, 3
SHAPES = {"w": (16, 8), "b": (8,), "v": (8, 8)}


def values(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {name: values(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}
XS, YS = values((CALLS, BATCH, 16), 7), values((CALLS, BATCH, 8), 8)
XS[BAD_CALL, -1, 0] = np.nan  # one number, on the last device, so on the last process
HUGE = values((16, 4), 9)
HUGE[-1] *= 1e20  # overflows a plain sum of squares, on the last process alone


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


LOSS_AND_GRAD = jax.value_and_grad(loss_fn)
OPTIMIZER = optax.chain(gcx.clip_by_global_norm(0.5), optax.adam(1e-2))
# The whole batch is lost, or the whole window: guard outside or inside.
GUARDED_CALLS = gcx.skip_nonfinite(gcx.accumulate_gradients(OPTIMIZER, 2))
GUARDED_WINDOWS = gcx.accumulate_gradients(gcx.skip_nonfinite(OPTIMIZER), 2)
MEAN = optax.stateless(lambda grads, _: lax.pmean(grads, "data"))
LOCAL_WINDOWS = gcx.accumulate_gradients(optax.chain(MEAN, gcx.skip_nonfinite(OPTIMIZER)), 2)

LAYOUTS = {  # mesh axes, where the parameters are, where the batch is
    "data_parallel": ({"data": 8}, {"w": P(), "b": P(), "v": P()}, P("data")),
    "fsdp": ({"data": 8}, {"w": P("data"), "b": P("data"), "v": P(None, "data")}, P("data")),
    "tensor_parallel": (
        {"model": 8},
        {"w": P(None, "model"), "b": P("model"), "v": P("model")},
        P(),
    ),
    "mixed": (
        {"data": 4, "model": 2},
        {"w": P("data", "model"), "b": P("model"), "v": P("model", "data")},
        P("data"),
    ),
}


def make_mesh(axes):
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def spread(tree, mesh, specs):
    """Host values as global arrays: each process gives the shards that it holds."""

    def put(x, spec):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])

    return jax.tree.map(put, tree, specs)


def specs_like(tree, specs):
    """The spec of each leaf of a state: that of the parameter it belongs to, or none."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: specs.get(getattr(path[-1], "key", None), P()), tree
    )


def whole(tree):
    """The values of global arrays as lists, on every process."""
    leaves, structure = jax.tree.flatten(tree)
    if isinstance(leaves[0].sharding, NamedSharding):
        everywhere = NamedSharding(leaves[0].sharding.mesh, P())
        leaves = jax.jit(lambda *xs: xs, out_shardings=everywhere)(*leaves)
    return jax.tree.unflatten(structure, [np.asarray(x).tolist() for x in leaves])


def make_step(tx, value_and_grad=LOSS_AND_GRAD):
    def step(params, state, x, y):
        loss, grads = value_and_grad(params, x, y)
        params, state = gcx.apply_gradients(tx, grads, state, params)
        return params, state, loss

    return step


def train(step, params, state, batches):
    """Losses, all metrics of every call, and the last parameters."""
    step, losses, told = jax.jit(step), [], []
    for x, y in batches:
        params, state, loss = step(params, state, x, y)
        losses.append(float(loss))
        told.append({name: float(value) for name, value in gcx.metrics(state).items()})
    return {"loss": losses, "metrics": told, "params": whole(params)}


def reference(tx):
    """The same training on one device."""
    return train(make_step(tx), PARAMS, tx.init(PARAMS), zip(XS, YS, strict=True))


def distributed(step, mesh, specs, state, state_specs, batch):
    """The same training on a mesh: parameters, state and batches are spread over it."""
    params, state = spread((PARAMS, state), mesh, (specs, state_specs))
    batches = [spread(pair, mesh, (batch, batch)) for pair in zip(XS, YS, strict=True)]
    return train(step, params, state, batches)


def by_jit(layout):
    axes, specs, batch = LAYOUTS[layout]
    state = GUARDED_CALLS.init(PARAMS)
    step = make_step(GUARDED_CALLS)
    return distributed(step, make_mesh(axes), specs, state, specs_like(state, specs), batch)


def shard_map_window():
    """Micro-gradients stay on their device; one mean over devices where a window closes."""
    mesh, batch = make_mesh({"data": DEVICES}), P("data")

    def local_value_and_grad(params, x, y):
        loss, grads = LOSS_AND_GRAD(compat.vary(params, "data"), x, y)
        return lax.pmean(loss, "data"), grads

    # The accumulators of all devices, one after the other along the first axis.
    state = LOCAL_WINDOWS.init(PARAMS)
    stacked = jax.tree.map(lambda x: np.concatenate([x] * DEVICES), state.acc_grads)
    state = state._replace(acc_grads=stacked)
    specs, state_specs = jax.tree.map(lambda _: P(), (PARAMS, state))
    state_specs = state_specs._replace(acc_grads=jax.tree.map(lambda _: P("data"), stacked))
    step = jax.shard_map(
        make_step(LOCAL_WINDOWS, local_value_and_grad),
        mesh=mesh,
        in_specs=(specs, state_specs, batch, batch),
        out_specs=(specs, state_specs, P()),
    )
    return distributed(step, mesh, specs, state, state_specs, batch)


def huge_norm():
    """Only one process has numbers whose plain squares overflow."""
    mesh = make_mesh({"data": DEVICES})
    tree = spread(HUGE, mesh, P("data"))
    inside = jax.shard_map(gcx.global_norm, mesh=mesh, in_specs=P("data"), out_specs=P())
    return {"norm": [float(jax.jit(gcx.global_norm)(tree)), float(jax.jit(inside)(tree))]}


def pipeline_stages():
    """Each process has stages of its own, in a program of its own; only norms are exchanged."""
    stages = values((4, 6, 3), 11)
    own = stages[jax.process_index() :: jax.process_count()]
    norm = jax.jit(gcx.global_norm)(own)
    norms = multihost_utils.process_allgather(norm)
    whole = gcx.combine_norms(norms.ravel())
    clipped, _ = gcx.clip_grad_norm(own, 1.0, norm=whole)
    after = multihost_utils.process_allgather(gcx.global_norm(clipped))
    return {"norm": [float(whole)], "after": float(gcx.combine_norms(after.ravel()))}


def decision():
    """Only process 0 has seen a checkpoint and bad rows."""
    rows, is_first = Rows.zeros(100, Names()), jax.process_index() == 0
    rows.step[:] = rows.batch_id[:] = np.arange(100)
    rows.outcome[:] = int(Outcome.APPLIED | Outcome.HAS_LOSS | Outcome.HAS_BATCH_ID)
    bad = [Incident(step, ("loss",), 1.0) for step in (50, 51, 52)]
    return Policy().update(rows, bad if is_first else [], [0] if is_first else [])


CASES = {
    **{layout: lambda layout=layout: by_jit(layout) for layout in LAYOUTS},
    "shard_map_window": shard_map_window,
    "huge_norm": huge_norm,
    "pipeline_stages": pipeline_stages,
    "decision": decision,
}


def die(who, process):
    """Clips in step with the others until one process is gone; the others must not hang."""
    mesh = make_mesh({"data": DEVICES})
    clip = jax.jit(lambda g: gcx.clip_grad_norm(g, 1.0))
    grads = spread(values((DEVICES, 4), 0), mesh, P("data"))
    for call in range(2 * DEATH):
        if call == DEATH and process == who:
            os._exit(7)
        grads, norm = clip(grads)
        print(call, float(norm), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "die"])
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--of", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--who", type=int, default=0, help="the process that dies")
    parser.add_argument("--heartbeat", type=int, default=100, help="seconds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeouts = {"initialization_timeout": 60, "heartbeat_timeout_seconds": args.heartbeat}
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        timeouts["shutdown_timeout_seconds"] = 60  # JAX 0.8 and later
    jax.distributed.initialize(f"127.0.0.1:{args.port}", args.of, args.process, **timeouts)
    assert jax.process_count() == args.of and len(jax.devices()) == DEVICES
    if args.what == "die":
        die(args.who, args.process)
    else:
        args.out.write_text(json.dumps({name: case() for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
