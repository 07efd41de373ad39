"""What XLA made of a function: its instructions, with those behind a branch told apart."""

import math
import re

import jax
from benchmarks.compiled import _hlo

_CALLED = re.compile(r"(?:to_apply|calls)=%?([\w.\-]+)")
_LOOPED = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")
_BRANCH_LIST = re.compile(r"branch_computations=\{([^}]*)\}")


def compiled(fun, *args, **kwargs) -> str:
    """The optimised HLO of a function."""
    return jax.jit(fun).lower(*args, **kwargs).compile().as_text()


def instructions(text: str, *, branches: bool = False, loops: bool = True) -> list[str]:
    """The instructions that always run, or with `branches` also those of conditionals.

    Without `loops` those of loops are left out: a loop may make no trip at all.
    """
    computations = _hlo.computations(text)
    found: list[str] = []
    waiting, seen = ["ENTRY"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in map(str.strip, computations[name]):
            found.append(line)
            waiting += _CALLED.findall(line)
            if loops:
                waiting += _LOOPED.findall(line)
            if branches:
                waiting += _BRANCHES.findall(line)
                for names in _BRANCH_LIST.findall(line):
                    waiting += [n.strip().lstrip("%") for n in names.split(",")]
    return found


def _elements(shape: str) -> int:
    """How many elements an array of a shape such as `16,8` has."""
    return math.prod(int(n) for n in shape.split(",") if n)


def count(text: str, operation: str, *, branches: bool = False, loops: bool = True) -> int:
    """How many instructions of a kind there are; an asynchronous pair counts once."""
    pattern = re.compile(rf"[ )}}]{operation}(-start)?\(")
    lines = instructions(text, branches=branches, loops=loops)
    return sum(bool(pattern.search(line)) for line in lines)


def all_reduced(text: str, *, branches: bool = False, loops: bool = True) -> list[int]:
    """How many elements each all-reduce adds up over devices."""
    sizes: list[int] = []
    for line in instructions(text, branches=branches, loops=loops):
        made = re.search(r" = (.*?[ )}])all-reduce(?:-start)?\(", line)
        if made:
            sizes.append(sum(map(_elements, re.findall(r"\w+\[([\d,]*)\]", made.group(1)))))
    return sizes


def reductions_of(text: str, elements: int, *, branches: bool = False) -> int:
    """How many reductions read an array of at least that many elements."""
    sizes: dict[str, int] = {}
    lines = instructions(text, branches=branches)
    for line in lines:
        made = re.match(r"(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]", line)
        if made:
            sizes[made.group(1)] = _elements(made.group(2))
    found = 0
    for line in lines:
        called = re.search(r"[ )}](?:reduce|reduce-window)\((.*)", line)
        if called:
            operands = re.findall(r"%([\w.\-]+)", called.group(1).split("), ")[0])
            found += any(sizes.get(name, 0) >= elements for name in operands)
    return found
