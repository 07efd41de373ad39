"""Rows that set cases side by side, and the steps that are compared."""

from collections.abc import Callable
from typing import Any

import optax
from _measure import Case, Timing, fresh, interleaved
from _report import Rows

import gradclip_jax as gcx

Tree = Any
REPETITIONS = 15


def row(what: str, timing: Timing, ours: Timing, **more: Any) -> dict[str, Any]:
    """One line: time, spread, and how much longer it takes than ours."""
    return {
        "what": what,
        "ms": round(timing.median * 1e3, 3),
        "spread": f"{timing.spread:.0%}",
        "ratio to ours": round(timing.median / ours.median, 2),
        **more,
    }


def compare(
    title: str, cases: dict[str, Case], floor: float | None = None, group: int = 1, unit: float = 1
) -> Rows:
    """Interleaves the cases; the first is ours. `floor` in seconds, `unit` bytes for scratch."""
    timings = interleaved(cases, REPETITIONS, group)
    ours = next(iter(timings.values()))
    rows: Rows = []
    for name, timing in timings.items():
        more: dict[str, Any] = {
            "scratch/N": round(timing.scratch_bytes / unit, 3),
            "moved/N": round(timing.moved_bytes / unit, 2),
        }
        if floor is not None:
            more["time/floor"] = round(timing.median / floor, 2)
        rows.append(row(f"{title}: {name}", timing, ours, **more))
    return rows


def train(tx: Any) -> Callable[..., Any]:
    def step(carry: Any, grads: Tree) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def fast(tx: Any) -> Callable[..., Any]:
    def step(carry: Any, grads: Tree) -> Any:
        params, state = carry
        return gcx.apply_gradients(tx, grads, state, params)

    return step


def start(tx: Any, params: Tree) -> Callable[[], Any]:
    return lambda: fresh((params, tx.init(params)))()
