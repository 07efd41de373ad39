"""One of several processes of tests/test_processes.py: trains by every layout, writes what it saw.

Run by hand: `XLA_FLAGS=--xla_force_host_platform_device_count=8 python process_worker.py 0 1 12345
seen.json`.
"""

import functools
import inspect
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx
from gradclip_jax.diagnostics import Incident
from gradclip_jax.monitoring._layout import Names, Outcome
from gradclip_jax.monitoring.host._policy import Policy, of_all_processes
from gradclip_jax.monitoring.host._rows import Rows

DEVICES = 8  # of all processes together
CALLS, BATCH, BAD_CALL = 6, 16, 2
SHAPES = {"w": (16, 8), "b": (8,), "v": (8, 8)}


def values(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {name: values(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}
XS, YS = values((CALLS, BATCH, 16), 7), values((CALLS, BATCH, 8), 8)
XS[BAD_CALL, -1, 0] = np.nan  # one number, on the last device, so on the last process


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


LOSS_AND_GRAD = jax.value_and_grad(loss_fn)
OPTIMIZER = optax.chain(gcx.clip_by_global_norm(0.5), optax.adam(1e-2))
# The whole batch is lost, or the whole window: guard outside or inside.
GUARDED_CALLS = gcx.skip_nonfinite(gcx.accumulate_gradients(OPTIMIZER, 2))
# A guard inside a chain has counts of its own, so the reference has the same chain.
INSIDE = optax.chain(optax.identity(), gcx.skip_nonfinite(OPTIMIZER))
GUARDED_WINDOWS = gcx.accumulate_gradients(INSIDE, 2)
MEAN = optax.stateless(lambda grads, _: lax.pmean(grads, "data"))
LOCAL_WINDOWS = gcx.accumulate_gradients(optax.chain(MEAN, gcx.skip_nonfinite(OPTIMIZER)), 2)

AXES = {"data": 4, "model": 2}
SPECS = {"w": P("data", "model"), "b": P("model"), "v": P("model", "data")}


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
    return jax.tree.map_with_path(lambda path, _: specs.get(getattr(path[-1], "key", 0), P()), tree)


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


def distributed(step, mesh, specs, state, state_specs):
    """The same training on a mesh: parameters, state and batches are spread over it."""
    params, state = spread((PARAMS, state), mesh, (specs, state_specs))
    batches = [spread(pair, mesh, (P("data"), P("data"))) for pair in zip(XS, YS, strict=True)]
    return train(step, params, state, batches)


def by_jit():
    state, step = GUARDED_CALLS.init(PARAMS), make_step(GUARDED_CALLS)
    return distributed(step, make_mesh(AXES), SPECS, state, specs_like(state, SPECS))


def with_total(state, total):
    """A state whose accumulator is replaced."""
    window = state.accumulation
    gradient = window.gradient._replace(total=total)
    return state._replace(accumulation=window._replace(gradient=gradient))


def shard_map_window():
    """Micro-gradients stay on their device; one mean over devices where a window closes."""
    mesh, batch = make_mesh({"data": DEVICES}), P("data")

    def local_value_and_grad(params, x, y):
        loss, grads = LOSS_AND_GRAD(compat.vary(params, "data"), x, y)
        return lax.pmean(loss, "data"), grads

    # The accumulators of all devices, one after the other along the first axis.
    state = LOCAL_WINDOWS.init(PARAMS)
    total = state.accumulation.gradient.total
    stacked = jax.tree.map(lambda x: np.concatenate([x] * DEVICES), total)
    specs, state_specs = jax.tree.map(lambda _: P(), (PARAMS, state))
    state = with_total(state, stacked)
    state_specs = with_total(state_specs, jax.tree.map(lambda _: P("data"), stacked))
    step = jax.shard_map(
        make_step(LOCAL_WINDOWS, local_value_and_grad),
        mesh=mesh,
        in_specs=(specs, state_specs, batch, batch),
        out_specs=(specs, state_specs, P()),
    )
    return distributed(step, mesh, specs, state, state_specs)


def decision():
    """Only process 0 has seen a checkpoint and bad rows, and reads a log."""
    rows, is_first = Rows.zeros(100, Names()), jax.process_index() == 0
    rows.step[:] = rows.batch_id[:] = np.arange(100)
    rows.outcome[:] = int(Outcome.APPLIED | Outcome.HAS_LOSS | Outcome.HAS_BATCH_ID)
    bad = [Incident(step, ("loss",)) for step in (50, 51, 52)]
    found = Policy().update(rows, bad if is_first else [], saved=[0] if is_first else [])
    assert not is_first or gcx.diagnostics.read_log([{"loss": 1.0}]).incidents == []
    return of_all_processes(found)[0]


def one_monitor(folder):
    """Only process 0 builds a monitor, which does not wait for the others."""
    if jax.process_index() == 0:
        gcx.Monitor(PARAMS, log=folder / "alone.jsonl", resume=True)
    return True


def different_logs(folder):
    """Process 0 alone has the log of a run that went on, so that both raise."""
    log = folder / f"log-{jax.process_index()}.jsonl"
    if jax.process_index() == 0:
        log.write_text('{"step": 7, "loss": 1.0}\n')
    tx = gcx.watch(optax.sgd(0.1))
    try:
        gcx.Monitor(PARAMS, log=log, resume=True).read(tx.init(PARAMS))
    except ValueError as error:
        return str(error)


def failing_write(folder):
    """A write that fails in process 0 raises in both, so that both can repeat the call."""
    monitor = gcx.Monitor(PARAMS, log=folder / "failing.jsonl", resume=True)
    state, append = gcx.watch(optax.sgd(0.1)).init(PARAMS), monitor._writer.append

    def fail_with(kind, lines):
        raise kind("the disk is full, or a line cannot be written as JSON")

    failures = 0
    for kind in (OSError, TypeError):
        if jax.process_index() == 0:
            monitor._writer.append = functools.partial(fail_with, kind)
        try:
            monitor.read(state)
        except (OSError, TypeError):
            failures += 1
    monitor._writer.append = append
    return monitor.read(state).action if failures == 2 else failures


def main():
    process, processes, port, out = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeouts = {"initialization_timeout": 60}
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        timeouts["shutdown_timeout_seconds"] = 60  # JAX 0.8 and later
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process), **timeouts)
    assert jax.process_count() == int(processes) and len(jax.devices()) == DEVICES
    seen = {f.__name__: f() for f in (by_jit, shard_map_window, decision)}
    seen |= {f.__name__: f(Path(out).parent) for f in (one_monitor, different_logs, failing_write)}
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
