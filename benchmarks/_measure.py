"""Interleaved timing, and what a compiled program needs."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        step: `carry -> carry`, jitted here with the carry donated.
        carry: makes the first carry.
    """

    step: Callable[..., Any]
    carry: Callable[[], Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Timing:
    """Seconds of the repetitions, scratch memory, and the text of the compiled program."""

    seconds: np.ndarray[Any, Any]
    scratch_bytes: int
    text: str

    @property
    def median(self) -> float:
        """Seconds of the middle repetition."""
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float((high - low) / 2 / self.median)


def interleaved(cases: dict[str, Case], repetitions: int, group: int = 1) -> dict[str, Timing]:
    """Times all cases in turn, A B C A B C, in one process; `group` steps make a repetition."""
    programs: dict[str, Any] = {}
    scratch: dict[str, int] = {}
    texts: dict[str, str] = {}
    for name, case in cases.items():
        carry = case.carry()
        # Called as users call it: a compiled program called by hand takes its arguments in Python.
        step = jax.jit(case.step, donate_argnums=0)
        compiled = step.lower(carry, *case.args).compile()
        memory, texts[name] = compiled.memory_analysis(), compiled.as_text()
        scratch[name] = 0 if memory is None else int(memory.temp_size_in_bytes)
        programs[name] = (step, jax.block_until_ready(step(carry, *case.args)))

    def call(name: str) -> Callable[[], Any]:
        def repetition() -> Any:
            step, carry = programs[name]
            for _ in range(group):
                carry = step(carry, *cases[name].args)
            programs[name] = (step, carry)
            return carry

        return repetition

    seconds = in_turn({name: call(name) for name in cases}, repetitions)
    return {name: Timing(seconds[name], scratch[name], texts[name]) for name in cases}


def in_turn(
    calls: dict[str, Callable[[], Any]], repetitions: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of each call, A B C A B C; what it returns is waited for."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.asarray(found) for name, found in seconds.items()}


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def fresh(tree: Any) -> Callable[[], Any]:
    """A maker of copies, for carries that are donated."""
    return lambda: jax.tree.map(jnp.copy, tree)
