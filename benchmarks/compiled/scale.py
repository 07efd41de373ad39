"""Sharded training steps of a GPT of 7 B parameters, and how they grow with layers and devices.

    python -m benchmarks.compiled.scale            # everything that is not in the results yet
    python -m benchmarks.compiled.scale --only "scan, 4"

Only compiled, for H100s or TPUs v5p, in the environments of `make bench-compiled`. `ours` clips,
guards, accumulates 8 micro-batches and watches gradient, update and parameters of each layer.
Optax's step does the same without watching. An all-reduce is small if it has at most 16 bytes for
each layer and leaf of a layer. Two values are those of a held and of an emitting micro-step. N are
the bytes of the parameters on a device. XLA chooses how activations are sharded, except that they
are sharded as the batch with FSDP alone.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks._models import Model, gpt
from benchmarks._rows import ACCUMULATED, NOTHING, OPTAX, Maker, applied, watched
from benchmarks.compiled import _devices, _sharded
from benchmarks.compiled.steps import compile_step

Setting = tuple[str, tuple[str, tuple[int, int]], Callable[[], Model]]
STEPS: dict[str, Maker] = {
    NOTHING: OPTAX[NOTHING],
    "Optax": OPTAX["MultiSteps(apply_if_finite(clip), skip_not_finite)"],
    "ours": watched(gcx.skip_nonfinite(ACCUMULATED), applied),
}
TOPOLOGIES = {
    "cuda": {n: f"1x8x{n // 8}" for n in (8, 64, 256)},
    "tpu": {8: "v5p:2x2x2", 64: "v5p:4x4x4", 256: "v5p:8x8x4"},
}


def settings(platform: str) -> Iterator[Setting]:
    """Title of the table, devices, and model: the large ones, more layers, more devices."""
    count = 64 if platform == "cuda" else 256

    def large(layers: int, width: int, **options: Any) -> Model:
        return gpt(layers, width, 51200, count, 1024, scan=True, **options)

    def fsdp() -> Model:
        # Without this, XLA computes the logits of the whole batch on each device.
        mesh = _sharded.mesh(platform, (TOPOLOGIES[platform][count], (count, 1)))
        return large(32, 4096, activations=NamedSharding(mesh, PartitionSpec("data")))

    def small(layers: int, batch: int, *, scan: bool) -> Model:
        return gpt(layers, 256, 8192, batch, 128, scan=scan)

    layouts = {
        "FSDP": ((count, 1), fsdp),
        "FSDP and tensor parallel": ((count // 8, 8), lambda: large(32, 4096)),
        "FSDP and 8 experts": ((count // 8, 8), lambda: large(24, 2048, experts=8)),
    }
    for title, (shape, make) in layouts.items():
        yield f"7 B, {count} devices, {title}", (TOPOLOGIES[platform][count], shape), make
    for scan in (True, False):
        for layers in (2, 4, 8):
            title = f"small, {'scan' if scan else 'unrolled'}, {layers} layers, 8 devices"
            devices = TOPOLOGIES[platform][8], (4, 2)
            yield title, devices, lambda n=layers, s=scan: small(n, 8, scan=s)
    for n in (64, 256):
        devices = TOPOLOGIES[platform][n], (n // 2, 2)
        yield f"small, scan, 4 layers, {n} devices", devices, lambda n=n: small(4, n, scan=True)


def row(name: str, setting: Setting, platform: str) -> dict[str, Any]:
    """The columns of one step."""
    _, devices, make = setting
    model, mesh = make(), _sharded.mesh(platform, devices)
    found, size = compile_step(STEPS[name](model), model, platform, mesh)
    program = found.program
    phases = [program.held, program.emitted] if name == "ours" else [program.all]
    blocks = model.params["blocks"]
    layers = len(blocks) if isinstance(blocks, list) else blocks["qkv"].shape[0]
    small = 16 * layers * len(jax.tree.leaves(blocks if isinstance(blocks, dict) else blocks[0]))
    sums = [counts.collectives.get("all-reduce", []) for counts in phases]

    def cell(values: Any) -> str:
        return " / ".join(f"{x:.5g}" for x in values)

    return {
        "what": name,
        "bytes, N": cell(x.moved / size for x in phases),
        "launches": cell(x.launches for x in phases),
        "scratch, N": round(found.scratch / size, 2),
        "all-reduces": cell(map(len, sums)),
        "small": cell(sum(x <= small for x in sizes) for sizes in sums),
        "their bytes": cell(sum(x for x in sizes if x <= small) for sizes in sums),
        "other collectives": cell(
            sum(len(x) for kind, x in counts.collectives.items() if kind != "all-reduce")
            for counts in phases
        ),
        "trace, s": round(found.trace_seconds, 1),
        "compile, s": round(found.compile_seconds, 1),
    }


def main() -> None:
    """Compiles what is chosen and not known yet, and writes results and tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the title of a table")
    options = parser.parse_args()
    platform = _devices.available() or parser.error("no compiler for an H100 or a TPU")
    device = {"cuda": "H100s", "tpu": "TPUs v5p"}[platform]
    facts = {"device": f"{device}, compiled only", "cores": "-", "devices": "see below"}
    facts["commit"] = _report.commit()
    path = _report.write({}, "scale", **facts)
    for setting in settings(platform):
        known = json.loads(path.read_text())["sections"].get(setting[0], [])
        for name in STEPS:
            if options.only in setting[0] and name not in [x["what"] for x in known]:
                found = row(name, setting, platform)
                print(setting[0], found, flush=True)
                _report.write({setting[0]: [found]}, "scale", **facts)


if __name__ == "__main__":
    main()
