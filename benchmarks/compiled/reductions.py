"""How many gradients' worth of elements a window of micro-batches sums over devices.

Counted in programs compiled for devices that are not there, in the environments of `make
bench-compiled` and, for another JAX, in one with `jax[tpu]` of that version:
`JAX_PLATFORMS=cpu .venv-tpu/bin/python -m benchmarks.compiled.reductions`.
"""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks.compiled import _devices, _hlo

Tree = Any
EVERY, BATCH = 4, 1024
SHAPES = {"embed": (8192, 256), "up": (256, 1024), "down": (1024, 256)}
N = sum(map(math.prod, SHAPES.values()))
DEVICES = {"tpu": {"16 v5e": "v5e:4x4", "64 v5p": "v5p:4x4x4"}, "cuda": {"8 H100": "1x8x1"}}
INNER = optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-4))
TX = gcx.accumulate_gradients(INNER, EVERY)
MEAN = optax.stateless(lambda grads, _: lax.pmean(grads, "data"))
TX_LOCAL = gcx.accumulate_gradients(optax.chain(MEAN, INNER), EVERY)


def loss(params: Tree, ids: Any) -> Any:
    """A lookup and two products."""
    return _error(params, params["embed"][ids])


def loss_of_types(params: Tree, ids: Any) -> Any:
    """The same under explicit axes."""
    return _error(params, params["embed"].at[ids].get(out_sharding=P("data")))


def _error(params: Tree, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)


def call(params: Tree, state: Tree, ids: Any) -> Any:
    """A call of a step with `accumulate_gradients`."""
    return gcx.apply_gradients(TX, jax.grad(loss)(params, ids), state, params)


def scanned(params: Tree, state: Tree, ids: Any) -> Any:
    """A scan over such calls."""
    batches = ids.reshape(-1, EVERY).T  # each device splits what it holds
    return lax.scan(lambda c, part: (call(*c, part), None), (params, state), batches)[0]


def once(params: Tree, ids: Any) -> Any:
    """One call of `microbatched_value_and_grad`."""
    return gcx.microbatched_value_and_grad(loss, EVERY)(params, ids)[1]


def once_of_types(params: Tree, ids: Any) -> Any:
    """The same under explicit axes."""
    return gcx.microbatched_value_and_grad(loss_of_types, EVERY)(params, ids)[1]


def weighted(params: Tree, ids: Any) -> Any:
    """The same, with a weight."""
    fun = lambda params, ids: (loss(params, ids), jnp.sum(ids > 0).astype(jnp.float32))  # noqa: E731
    return gcx.microbatched_value_and_grad(fun, EVERY, has_weight=True)(params, ids)[1]


def local(params: Tree) -> Tree:
    """Typed as varying."""
    return jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)


def call_local(params: Tree, state: Tree, ids: Any) -> Any:
    """A call inside `shard_map`."""
    grads = jax.grad(loss)(local(params), ids)
    return gcx.apply_gradients(TX_LOCAL, grads, state, params)


def reduced(text: str, *, calls: int) -> float:
    """Sums of a gradient over devices in a window."""
    parts = _hlo.computations(text)

    def elements(name: str, trips: int) -> float:
        total = 0.0
        for line in parts.get(name, []):
            made = re.search(r"= (.*?[ )}])(all-reduce|reduce-scatter)(?:-start)?\(", line)
            if made and made[2] == "all-reduce":
                # From JAX 0.12 on an asynchronous one returns its operands, then its results.
                result = made[1].split("), ")[-1] if made[1].startswith("((") else made[1]
                shapes = re.findall(r"\w+\[([\d,]*)\]", result)
                total += trips * sum(math.prod(int(n) for n in s.split(",") if n) for s in shapes)
            elif made:
                raise SystemExit(f"a reduce-scatter, which is not counted: {line[:200]}")
            for inner in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line):
                total += elements(inner, trips)
            if " conditional(" in line:  # taken once in a window
                listed = re.findall(
                    r"(?:branch|true|false)_computations?=\{?([^},]*(?:, %[^},]*)*)", line
                )
                for branch in re.findall(r"[\w.\-]+", " ".join(listed)):
                    total += elements(branch, 1)
            body = re.search(r" while\(.*body=%?([\w.\-]+)", line)
            if body:
                counted = _hlo.has_counter(parts, line)
                known = re.search(r'known_trip_count":\{"n":"(\d+)', line)  # fewer, where unrolled
                inside = int(known[1]) if known else EVERY
                total += elements(body[1], inside * trips if counted else 1)  # or once in a window
        return total

    return elements("ENTRY", calls) / N


def programs(devices: list[Any]) -> dict[str, Callable[[], float]]:
    """What counts the reductions of each way."""
    rules = {}

    def counted(function: Callable[..., Any], kind: Any, tx: Any = None, calls: int = 1) -> float:
        mesh = Mesh(np.array(devices), ("data",), axis_types=(kind,))
        everywhere = NamedSharding(mesh, P())

        def shape(size: Any, dtype: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

        params = {k: shape(s, jnp.float32, everywhere) for k, s in SHAPES.items()}
        args = [params]
        with jax.set_mesh(mesh):
            if tx is not None:
                state = jax.eval_shape(tx.init, params)
                args.append(jax.tree.map(lambda x: shape(x.shape, x.dtype, everywhere), state))
            args.append(shape((BATCH * EVERY,), jnp.int32, NamedSharding(mesh, P("data"))))
            if tx is TX_LOCAL:
                specs = jax.tree.map(lambda _: P(), args[1])._replace(acc_grads=P("data"))
                big = jax.tree.map(
                    lambda x: shape(
                        (x.shape[0] * len(devices), *x.shape[1:]),
                        x.dtype,
                        NamedSharding(mesh, P("data")),
                    ),
                    args[1].acc_grads,
                )
                args[1] = args[1]._replace(acc_grads=big)
                function = jax.shard_map(
                    function, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
                )
            out = everywhere if kind == AxisType.Auto and tx is not TX_LOCAL else None
            platform = _devices.available()
            text = _devices.compile_for(platform, function, *args, out_shardings=out).text
        return reduced(text, calls=calls)

    auto, explicit = AxisType.Auto, AxisType.Explicit

    def inside_shard_map(params: Tree, ids: Any) -> Any:
        mesh = Mesh(np.array(devices), ("data",), axis_types=(auto,))
        return jax.shard_map(once, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(params, ids)

    rules["plain `jit`, k calls of `accumulate_gradients`"] = lambda: counted(call, auto, TX, EVERY)
    rules["plain `jit`, one scan over `accumulate_gradients`"] = lambda: counted(scanned, auto, TX)
    rules["plain `jit`, `microbatched_value_and_grad`"] = lambda: counted(once, auto)
    rules["the same with `has_weight`"] = lambda: counted(weighted, auto)
    rules["explicit axes, `microbatched_value_and_grad`"] = lambda: counted(once_of_types, explicit)
    rules["`shard_map`, k calls"] = lambda: counted(call_local, auto, TX_LOCAL, EVERY)
    rules["`shard_map`, `microbatched_value_and_grad`"] = lambda: counted(inside_shard_map, auto)
    return rules


def main() -> None:
    """Prints the table of this environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a part of a device or a way")
    only = parser.parse_args().only
    platform = _devices.available() or "cpu"
    rows: dict[str, dict[str, Any]] = {}
    for title, topology in DEVICES[platform].items():
        for name, count in programs(_devices.devices(platform, topology)).items():
            column = f"{title}, JAX {jax.__version__}"
            if not all(part in f"{column}: {name}" for part in only):
                continue
            try:
                found: Any = f"{count():.2f}"
            except Exception as error:
                found = f"{type(error).__name__}: {str(error)[:300]}"
            print(column, name, found, flush=True)
            rows.setdefault(name, {"way": name})[column] = found
    print(_report.table(list(rows.values())))


if __name__ == "__main__":
    main()
