"""What a compiled program does, counted in the text of its ENTRY computation.

Operands and results of each instruction are what a device reads and writes; their number is what
it launches. The body of a loop with a counter, such as a scan over layers, counts once. Loops of
zero or one trip are counted apart, and so is what the larger branch of a conditional does more.
"""

import math
import re
from collections.abc import Iterable
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
_BRANCHES = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
# What a TPU's compiler puts in place of no work.
_NO_WORK = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast|Assume\w+)"')


@dataclass
class Counts:
    """What a computation does.

    Attributes:
        moved: bytes read and written.
        launches: instructions that do something; on a TPU many are of scalars, next to free.
        stops: loops of zero or one trip; a GPU's host waits for their predicate.
        flops: multiplications and additions of matrix products.
        collectives: for each kind, the bytes of each result.
    """

    moved: int = 0
    launches: int = 0
    stops: int = 0
    flops: int = 0
    collectives: dict[str, list[int]] = field(default_factory=dict)

    def add(self, other: "Counts") -> None:
        """Adds what another computation does."""
        self.moved += other.moved
        self.launches += other.launches
        self.stops += other.stops
        self.flops += other.flops
        for kind, sizes in other.collectives.items():
            self.collectives.setdefault(kind, []).extend(sizes)

    def beyond(self, other: "Counts") -> "Counts":
        """What this computation does more than another."""
        numbers = vars(self).keys() - {"collectives"}
        more = {name: getattr(self, name) - getattr(other, name) for name in numbers}
        return Counts(**more, collectives=self.collectives)


@dataclass
class Program:
    """A compiled program: what always runs, and the loops of zero or one trip.

    Attributes:
        always: what runs at every step; the stops are those of the whole program.
        optional: what each loop of zero or one trip does, and each larger branch beyond the other.
    """

    always: Counts = field(default_factory=Counts)
    optional: list[Counts] = field(default_factory=list)

    def with_loops(self, loops: Iterable[Counts]) -> Counts:
        """What runs in a step that takes these of the optional loops."""
        total = Counts()
        for counts in (self.always, *loops):
            total.add(counts)
        return total

    @property
    def stops(self) -> int:
        """Loops of zero or one trip, for whose predicate the host of a GPU waits."""
        return self.always.stops + sum(loop.stops for loop in self.optional)

    @property
    def all(self) -> Counts:
        """What runs in a step that takes all loops."""
        return self.with_loops(self.optional)

    @property
    def held(self) -> Counts:
        """What runs in a step that an accumulation holds: without the largest loop."""
        return self.with_loops(sorted(self.optional, key=lambda c: c.moved)[:-1])

    @property
    def emitted(self) -> Counts:
        """What runs in a step in which it emits: of the loops the largest alone."""
        return self.with_loops(sorted(self.optional, key=lambda c: c.moved)[-1:])


def analyse(text: str) -> Program:
    """Counts what the text of a compiled program does."""
    program = Program()
    program.always = _count_computation(computations(text), "ENTRY", program.optional)
    return program


def _product_flops(lines: Iterable[str]) -> int:
    """Counts multiplications and additions of the matrix products of one computation."""
    total = 0
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


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation."""
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


def _count_computation(
    computations: dict[str, list[str]], name: str, optional: list[Counts]
) -> Counts:
    sizes: dict[str, int] = {}
    counts = Counts(flops=_product_flops(computations.get(name, [])))

    def called(pattern: str, attributes: str) -> Counts:
        found = re.search(pattern, attributes)
        return _count_computation(computations, found[1] if found else "", optional)

    for line in computations.get(name, []):
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        _, made, shape, kind, rest = found.groups()
        operands, attributes = _split(rest)
        sizes[made] = _size(shape)
        if kind == "call":
            counts.add(called(r"to_apply=%?([\w.\-]+)", attributes))
        elif kind == "while":
            body = called(r"body=%?([\w.\-]+)", attributes)
            if has_counter(computations, attributes):
                counts.add(body)
            else:
                counts.stops += 1
                optional.append(body)
        elif kind == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", attributes)
            names = _BRANCHES.findall(attributes)
            names += [n.strip().lstrip("%") for n in listed[1].split(",")] if listed else []
            branches = [_count_computation(computations, inner, optional) for inner in names]
            less, *_, more = sorted(branches, key=lambda branch: branch.moved)
            counts.add(less)
            optional.append(more.beyond(less))
        elif kind not in _FREE and not kind.endswith("-done") and not _NO_WORK.search(rest):
            given = [sizes.get(x, 0) for x in re.findall(r"%([\w.\-]+)", operands)]
            _count(counts, kind, sizes[made], given)
            lines = _called_lines(computations, attributes) if kind == "fusion" else []
            counts.flops += _product_flops(lines)
            body = list(filter(None, map(_INSTRUCTION.match, lines)))
            for fused in body:  # a TPU fuses a reduce-scatter with what slices it
                if fused[4] in _COLLECTIVES:
                    counts.collectives.setdefault(fused[4], []).append(sizes[made])
            if any(fused[1] and fused[4] == "dynamic-update-slice" for fused in body):
                # The buffer is neither read nor written but for the part that is replaced.
                counts.moved -= 2 * sizes[made] - (sum(given) - sizes[made])
    return counts


def has_counter(computations: dict[str, list[str]], attributes: str) -> bool:
    """Whether a loop counts its trips; one of zero or one trip tests a flag that it carries."""
    condition = re.search(r"condition=%?([\w.\-]+)", attributes)
    lines = computations.get(condition[1], []) if condition else []
    return "known_trip_count" in attributes or any(" compare(" in line for line in lines)


def _count(counts: Counts, kind: str, made: int, given: list[int]) -> None:
    base = kind.removesuffix("-start")
    if base in _COLLECTIVES:
        # An asynchronous one returns its operand beside its result.
        result = made - sum(given) if kind != base and base != "all-reduce" else made
        counts.collectives.setdefault(base, []).append(result)
        return
    counts.launches += 1
    counts.moved += made + sum(given)


def _called_lines(computations: dict[str, list[str]], attributes: str) -> list[str]:
    """The lines of the computation that a fusion calls."""
    called = re.search(r"calls=%?([\w.\-]+)", attributes)
    return computations.get(called[1], []) if called else []


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
