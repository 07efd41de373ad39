"""Interleaved timing, and what a compiled program needs."""

import concurrent.futures
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
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
    """Seconds of the repetitions, scratch and peak memory, and the text of the compiled program."""

    seconds: np.ndarray[Any, Any]
    scratch_bytes: int
    peak_bytes: int
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

    def of(self, chosen: Any) -> "Timing":
        """The same with the chosen repetitions only."""
        return Timing(self.seconds[chosen], self.scratch_bytes, self.peak_bytes, self.text)


def compiled_together(cases: dict[Any, Case]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The jitted steps, and their programs, which are compiled in parallel."""
    steps = {name: jax.jit(case.step, donate_argnums=0) for name, case in cases.items()}
    lowered = [steps[k].lower(jax.eval_shape(x.carry), *x.args) for k, x in cases.items()]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
        programs = pool.map(lambda x: x.compile(), lowered)
        return steps, dict(zip(cases, programs, strict=True))


def interleaved(
    cases: dict[str, Case],
    repetitions: int,
    group: int = 1,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times all cases in turn, A B C A B C, in one process; `group` steps make a repetition."""
    steps, compiled = compiled_together(cases)
    carries = {name: case.carry() for name, case in cases.items()}

    def run(name: str, times: int) -> Any:
        # Called as users call it: a compiled program called by hand takes its arguments in Python.
        for _ in range(times):
            carries[name] = steps[name](carries[name], *cases[name].args)
        return carries[name]

    for name in cases:
        jax.block_until_ready(run(name, warmup))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    for _ in range(repetitions):
        for name, found in seconds.items():
            start = clock()
            jax.block_until_ready(run(name, group))
            found.append(clock() - start)
    return {
        name: Timing(np.asarray(seconds[name]), *_memory(x), x.as_text())
        for name, x in compiled.items()
    }


def _memory(compiled: Any) -> tuple[int, int]:
    """Bytes of scratch memory, and of everything that exists while the program runs."""
    found = compiled.memory_analysis()
    if found is None:
        return 0, 0
    scratch = int(found.temp_size_in_bytes)
    inputs, outputs = found.argument_size_in_bytes, found.output_size_in_bytes
    return scratch, int(scratch + inputs + outputs - found.alias_size_in_bytes)
