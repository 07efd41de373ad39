"""What XLA makes of our programs and of Optax's on an H100 and on TPUs, none of which is needed.

`make bench-compiled` runs it in one environment for each. Columns: bytes that a step moves and
scratch, in units of N, the bytes of the parameters (on one chip); kernels that it launches;
branches and loops, with the bytes inside; and the CPU seconds of tracing and of compiling.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import _costs
import _devices
import _report
import _sharded
import _trees as trees
import jax
import jax.numpy as jnp
from _hlo import describe_collectives
from _programs import PROGRAMS

Tree = Any
NAMES = {"cuda": "NVIDIA H100 (compiled only)", "tpu": "TPU v5e (compiled only)"}


def shapes_of(shapes: trees.Shapes, dtype: Any = "float32") -> Tree:
    """A tree of shapes; `mixed` takes bfloat16 for matrices and float32 for the rest."""

    def kind(shape: tuple[int, ...]) -> Any:
        return ("bfloat16" if len(shape) > 1 else "float32") if dtype == "mixed" else dtype

    return {k: jax.ShapeDtypeStruct(s, jnp.dtype(kind(s))) for k, s in shapes.items()}


def models(quick: bool) -> dict[str, Tree]:
    """The trees, small ones with `quick`."""
    if quick:
        return {
            "2 x 256 x 256": shapes_of(trees.few_large(2, 256)),
            "20 x 64": shapes_of(equal(20, 64)),
        }
    return {
        "8 x 2048 x 2048": shapes_of(trees.few_large()),
        "8 x 2048 x 2048, bfloat16": shapes_of(trees.few_large(), "bfloat16"),
        "GPT-2 124M": shapes_of(trees.gpt2()),
        "GPT-2 124M, mixed": shapes_of(trees.gpt2(), "mixed"),
        "200 x 768 x 768": shapes_of(trees.few_large(200, 768)),
        "200 x 512": shapes_of(equal(200, 512)),
        "1,000 x 64": shapes_of(equal(1000, 64)),
        "2,000 x 64": shapes_of(equal(2000, 64)),
    }


def equal(leaves: int, size: int) -> trees.Shapes:
    """Vectors of one size."""
    return {f"leaf{i}": (size,) for i in range(leaves)}


def size_of(tree: Tree) -> int:
    """Bytes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def facts(compiled: _devices.Compiled, size: int) -> dict[str, Any]:
    """The columns of one program."""
    program = compiled.program
    return {
        "moved/N": round(program.always.moved / size, 2),
        "launches": program.always.launches,
        "branches": program.branches,
        "loops": program.loops,
        "inside/N": round(program.inside.moved / size, 2),
        "scratch/N": round(compiled.scratch / size, 2),
        "trace s": round(compiled.trace_seconds, 2),
        "compile s": round(compiled.compile_seconds, 2),
    }


def on_one_device(
    platform: str, models: dict[str, Tree], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The section and the row of each tree and program."""
    for model, tree in models.items():
        for title, pair in PROGRAMS.items():
            if not wanted(f"{model}: {title}"):
                continue
            for who, make in pair.makers().items():
                compiled = make().compile_for(platform, tree)
                yield model, {"what": f"{title}: {who}", **facts(compiled, size_of(tree))}


def on_many_chips(
    platform: str, quick: bool, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sharded section: scratch of a chip, and collectives."""
    for title, row in _sharded.cases(platform, quick, wanted):
        compiled, size = row
        scratch = {"scratch/N": round(compiled.scratch / size, 2)}
        always, inside = compiled.program.always, compiled.program.inside
        yield (
            title[0],
            {
                "what": title[1],
                **scratch,
                "collectives": describe_collectives(always),
                "inside loops and branches": describe_collectives(inside),
                "compile s": round(compiled.compile_seconds, 1),
            },
        )


def main() -> None:
    """Compiles what is chosen, prints each row, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small trees, printed only")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument(
        "--only", action="append", default=[], help="words in `tree: program`; all must be there"
    )
    parser.add_argument("--sharded", choices=["with", "without", "alone"], default="with")
    parser.add_argument("--costs", action="store_true", help="the table of costs; also of a CPU")
    options = parser.parse_args()
    platform = _devices.available()

    def wanted(title: str) -> bool:
        return all(word in title for word in options.only)

    if options.costs:
        return _write_costs(platform or "cpu", options.quick, options.no_write, wanted)
    if platform is None:
        parser.error("no libtpu and no CUDA plugin here: run `make bench-compiled`")

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        if options.sharded != "alone":
            yield from on_one_device(platform, models(options.quick), wanted)
        if options.sharded != "without":
            yield from on_many_chips(platform, options.quick, wanted)

    sections: dict[str, _report.Rows] = {}
    for section, row in rows():
        sections.setdefault(section, []).append(row)
        print(f"{section} | " + " | ".join(f"{k} {v}" for k, v in row.items()), flush=True)
        if not (options.quick or options.no_write):
            _report.write(sections, device=NAMES[platform], **_versions(platform))


def _write_costs(platform: str, quick: bool, no_write: bool, wanted: Callable[[str], bool]) -> None:
    tree = next(iter(models(quick).values()))
    versions = f"jax {jax.__version__}, optax {metadata.version('optax')}"
    found: dict[str, str] = {}
    for name, cell in _costs.cells(platform, tree, wanted):
        found[name] = cell
        print(f"{name} | {cell}", flush=True)
    if not (quick or no_write):
        _costs.write(platform, found, versions)


def _versions(platform: str) -> dict[str, str]:
    packages = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}
    return {packages[platform]: metadata.version(packages[platform])}


if __name__ == "__main__":
    main()
