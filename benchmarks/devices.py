"""How a clip grows with the devices: time and collectives, ours and Optax's, side by side.

`1 all-reduce (+2)` is one at every step, and two in the branches that rescale a norm whose squares
overflow or underflow.

Runs on the devices there are; on a machine with one CPU, on eight virtual ones. These share its
cores, so the times there tell only what the collectives cost beside each other.
"""

import argparse
import os
import re
from collections.abc import Callable
from typing import Any

# Has no effect on a GPU or TPU. JAX reads it at its first use.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import _report
import jax
import numpy as np
import optax
from _measure import in_turn
from _models import Model, gpt
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx

Tree = Any
REPETITIONS = 15
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(compiled: Any) -> str:
    """How many of each kind run at every step, and how many more in branches seldom taken."""
    branches, _, always = compiled.as_text().partition("\nENTRY")
    parts: list[str] = []
    for kind in KINDS:
        found = [len(re.findall(rf" {kind}(?:-start)?\(", text)) for text in (always, branches)]
        if any(found):
            parts.append(f"{found[0]} {kind}" + (f" (+{found[1]})" if found[1] else ""))
    return ", ".join(parts) or "none"


def clips(mesh: Any, specs: Tree) -> dict[str, Callable[[Tree], Tree]]:
    """A clip by global norm under jit and inside shard_map."""
    ours = gcx.clip_by_global_norm(1.0).update
    theirs = optax.clip_by_global_norm(1.0).update
    inside = jax.shard_map(
        lambda tree: ours(tree, None)[0], mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    return {
        "gcx, jit": lambda tree: ours(tree, None)[0],
        "optax, jit": lambda tree: theirs(tree, optax.EmptyState())[0],
        # Optax clips by a norm of each device's own in there.
        "gcx, shard_map": inside,
    }


def on_devices(count: int, model: Model) -> _report.Rows:
    """The rows of one number of devices: matrices sharded by columns, vectors replicated."""
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    specs = jax.tree.map(lambda x: P(None, "data") if x.ndim > 1 else P(), model.params)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    tree = jax.device_put(model.arrays()[0], places)
    compiled = {
        name: jax.jit(clip).lower(tree).compile() for name, clip in clips(mesh, specs).items()
    }

    def call(program: Any) -> Callable[[], Tree]:
        return lambda: program(tree)

    for program in compiled.values():
        jax.block_until_ready(program(tree))
    seconds = in_turn({name: call(program) for name, program in compiled.items()}, REPETITIONS)
    ours = np.median(seconds["gcx, jit"])
    return [
        {
            "what": f"{count} devices: {name}",
            "ms": round(float(np.median(times)) * 1e3, 3),
            "ratio to ours": round(float(np.median(times) / ours), 2),
            "collectives": collectives(compiled[name]),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    """Runs 1, 2, 4, ... devices and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small tree, printed only")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    model = gpt(2, 128, 1024, 1, 64, scan=False)
    if not options.quick:
        model = gpt(4, 768, 50304, 1, 1024, scan=False)
    counts = [2**i for i in range(len(jax.devices()).bit_length())]
    rows = [line for count in counts for line in on_devices(count, model)]
    leaves = len(jax.tree.leaves(model.params))
    title = f"Clip of {model.size // 4:,} elements in {leaves} leaves"
    print(f"{title}\n{_report.table(rows)}", flush=True)
    if not (options.no_write or options.quick):
        print(f"\nwritten to {_report.write({title: rows}, 'devices')}")


if __name__ == "__main__":
    main()
