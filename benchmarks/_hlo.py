"""What a compiled program does, counted in the text of its ENTRY computation.

Operands and results of each fusion, copy and custom call are what a device reads and writes; their
number is the kernels it launches. Loops and conditionals are counted by themselves, with what is
inside: a step may not run it at all.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "token": 0}
_SIZES |= {"f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# No kernel. What is copied or sliced ahead of its use (TPU) is read again by the fusion.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"}
_FREE |= {"partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"}
_FREE |= {"copy-start", "slice-start", "async-start"}

_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSIDE = re.compile(r"(?:body|condition|(?:true|false)_computation)=%?([\w.\-]+)")


@dataclass
class Counts:
    """What a computation does.

    Attributes:
        moved: bytes read and written.
        kinds: how many instructions there are of each kind that costs a launch.
        collectives: for each kind, the bytes of each result.
    """

    moved: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    collectives: dict[str, list[int]] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Kernels launched; on a TPU the scalar operations between them cost next to nothing."""
        return sum(self.kinds.values())


@dataclass
class Program:
    """A compiled program: what always runs, and what is inside loops and conditionals.

    `in_branches` is what the conditionals move of that.
    """

    always: Counts = field(default_factory=Counts)
    inside: Counts = field(default_factory=Counts)
    branches: int = 0
    loops: int = 0
    in_branches: int = 0


def analyse(text: str, platform: str) -> Program:
    """Counts what the text of a compiled program for `tpu`, `cuda` or `cpu` does."""
    computations, program = _computations(text), Program()
    _walk(computations, "ENTRY", program, program.always, platform)
    return program


def product_flops(text: str) -> int:
    """Counts multiplications and additions of the matrix products; those of a loop count once."""
    total = 0
    for lines in _computations(text).values():
        shapes: dict[str, list[int]] = {}
        for found in filter(None, map(_INSTRUCTION.match, lines)):
            _, made, shape, kind, rest = found.groups()
            dimensions = re.match(r"\w+\[([\d,]*)\]", shape)
            if dimensions:
                shapes[made] = [int(n) for n in dimensions[1].split(",") if n]
            if kind == "dot":
                left = shapes[re.findall(r"%([\w.\-]+)", rest)[0]]
                summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
                axes = [int(n) for n in summed[1].split(",") if n] if summed else []
                total += 2 * math.prod(shapes[made]) * math.prod(left[i] for i in axes)
    return total


def describe_collectives(counts: Counts) -> str:
    """Each kind with its number and the bytes of all its results."""
    found = counts.collectives.items()
    return "; ".join(f"{len(b)} {kind} of {_bytes(sum(b))}" for kind, b in found) or "none"


def _bytes(size: int) -> str:
    return f"{size / 2**20:.3g} MiB" if size >= 2**17 else f"{size} B"


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name = "ENTRY" if header[1] else header[2]
            found[name] = []
        elif name and line.startswith("  "):
            found[name].append(line)
        elif line.startswith("}"):
            name = None
    return found


def _walk(
    computations: dict[str, list[str]], name: str, program: Program, counts: Counts, platform: str
) -> None:
    sizes: dict[str, int] = {}
    for line in computations[name]:
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        _, made, shape, kind, rest = found.groups()
        operands, attributes = _split(rest)
        sizes[made] = _size(shape)
        if kind == "call":
            called = re.search(r"to_apply=%?([\w.\-]+)", attributes)
            _walk(computations, called[1] if called else "", program, counts, platform)
        elif kind in ("while", "conditional"):
            program.loops += kind == "while"
            program.branches += kind == "conditional"
            listed = re.search(r"branch_computations=\{([^}]*)\}", attributes)
            names = _INSIDE.findall(attributes)
            names += [n.strip().lstrip("%") for n in listed[1].split(",")] if listed else []
            before, rare = program.inside.moved, program.in_branches
            for inner in names:
                _walk(computations, inner, program, program.inside, platform)
            if kind == "conditional":
                program.in_branches = rare + program.inside.moved - before
        elif kind not in _FREE and not kind.endswith("-done"):
            given = [sizes.get(x, 0) for x in re.findall(r"%([\w.\-]+)", operands)]
            _count(counts, kind, sizes[made], given, platform)
            body = _fused(computations, attributes) if kind == "fusion" else []
            for fused in body:  # a TPU fuses a reduce-scatter with what slices it
                if fused[4] in _COLLECTIVES:
                    counts.collectives.setdefault(fused[4], []).append(sizes[made])
            if any(fused[1] and fused[4] == "dynamic-update-slice" for fused in body):
                # The buffer is neither read nor written but for the part that is replaced.
                counts.moved -= 2 * sizes[made] - (sum(given) - sizes[made])


def _count(counts: Counts, kind: str, made: int, given: list[int], platform: str) -> None:
    base = kind.removesuffix("-start")
    if base in _COLLECTIVES:
        # An asynchronous one returns its operand beside its result.
        result = made - sum(given) if kind != base and base != "all-reduce" else made
        counts.collectives.setdefault(base, []).append(result)
        return
    if platform == "tpu" and kind not in ("fusion", "copy", "concatenate"):
        return  # scalar operations, and custom calls that allocate or join prefetched slices
    counts.kinds[kind] += 1
    counts.moved += made + sum(given)


def _fused(computations: dict[str, list[str]], attributes: str) -> list[re.Match[str]]:
    called = re.search(r"calls=%?([\w.\-]+)", attributes)
    lines = computations.get(called[1], []) if called else []
    return [found for line in lines if (found := _INSTRUCTION.match(line))]


def _split(rest: str) -> tuple[str, str]:
    """The operands of an instruction, and its attributes."""
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return rest[:place], rest[place:]
    return rest, ""


def _size(shape: str) -> int:
    return sum(
        (1 if kind.startswith("f8") else _SIZES.get(kind, 4))
        * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    )
