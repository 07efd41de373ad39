"""Scratch and FLOPs of per-example clipping beside the ordinary gradient, for an H100 or TPU v5e.

    python -m benchmarks.per_example.compiled 32x256 8x1024      # examples x tokens
    python -m benchmarks.per_example.compiled 32x256 --layers 2 --programs "ordinary,materialized"

GPT-2 (124M with 12 layers, vocabulary 50,257, tied head, float32), compiled without the device, in
an environment of `make bench-compiled`. The full model takes two to ten minutes for each program.
Rows go to results/per-example-compiled.json and .md.
"""

import argparse
import json
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _report
from benchmarks.compiled import _devices
from benchmarks.per_example import _gpt2

DEVICES = {"cpu": "CPU", "cuda": "H100", "tpu": "TPU v5e"}
KEYS = ("device", "layers", "examples x tokens", "program")
PATH = _report.RESULTS / "per-example-compiled.json"


def compiled(platform: str, program: str, examples: int, tokens: int, **shape: int) -> Any:
    """One program for GPT-2, or for a smaller one by `layers`, `width` and `vocabulary`."""
    params = _gpt2.gpt_shapes(**shape, tokens=tokens)
    batch = jax.ShapeDtypeStruct((examples, tokens), jnp.int32)
    args = _devices.placed((params, batch), _devices.one_device(platform))
    return _devices.compile_for(platform, _gpt2.PROGRAMS[program], *args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="+", metavar="EXAMPLESxTOKENS")
    parser.add_argument("--programs", default="ordinary,ours", help=", ".join(_gpt2.PROGRAMS))
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    platform = _devices.available() or "cpu"
    for size in options.sizes:
        examples, tokens = map(int, size.split("x"))
        for program in options.programs.split(","):
            found = compiled(platform, program, examples, tokens, layers=options.layers)
            row = {
                "device": DEVICES[platform],
                "layers": options.layers,
                "examples x tokens": size.replace("x", " x "),
                "program": program,
                "scratch GB": round(found.scratch / 1e9, 2),
                "TFLOP": round(found.flops / 1e12, 2),
                "compile s": round(found.compile_seconds),
                "jax": jax.__version__,
                **({"libtpu": metadata.version("libtpu")} if platform == "tpu" else {}),
            }
            print(json.dumps(row), flush=True)
            write(row)


def write(row: dict[str, Any]) -> None:
    """Merges a row into the JSON file and generates the table."""
    old = json.loads(PATH.read_text()) if PATH.exists() else []
    rows = {tuple(x[k] for k in KEYS): x for x in [*old, row]}
    PATH.write_text(json.dumps([rows[key] for key in sorted(rows)], indent=1) + "\n")
    write_table()


def write_table() -> None:
    """Generates results/per-example-compiled.md."""
    rows = {tuple(x[k] for k in KEYS): x for x in json.loads(PATH.read_text())}
    _report.write_page("per-example-compiled", table(rows))


def table(rows: dict[Any, dict[str, Any]]) -> str:
    """Each row with its ratio to the ordinary gradient of the same device and size."""
    shown: _report.Rows = []
    for key in sorted(rows):
        row, base = rows[key], rows.get((*key[:-1], "ordinary"))
        cells = {name: row[name] for name in KEYS}
        for name in ("scratch GB", "TFLOP"):
            ratio = f" ({row[name] / base[name]:.2f} x)" if base and base is not row else ""
            cells[name] = f"{row[name]:.2f}{ratio}"
        shown.append(cells | {"compile s": row["compile s"]})
    return _report.table(shown)


if __name__ == "__main__":
    main()
