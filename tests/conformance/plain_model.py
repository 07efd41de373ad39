"""Nests of clip, guard and accumulation in plain Python: lists of floats, no JAX in here.

What `docs/guarding.md` says, in its words: a micro-batch that is not finite is left out; a window
whose step is not finite is dropped. Gates directly in one another make one `Stack`, which asks
them in turn; one guard counts a refusal, and a step is tried on a copy.
"""

import copy
import dataclasses
import math
from typing import Any

BAD_ABOVE = 45.0  # `fragile` makes an infinite update of a larger gradient
NOTHING = [0.0, 0.0]


@dataclasses.dataclass
class Call:
    """What comes with a gradient; `flush_only` is a flush that brings no micro-batch."""

    value: float = 0.0
    weight: float = 1.0
    flush: bool = False

    @property
    def flush_only(self) -> bool:
        return self.flush and self.weight == 0


def norm(vector: list[float]) -> float:
    return math.hypot(*vector) if all(map(math.isfinite, vector)) else math.nan


def is_finite(*numbers: float) -> bool:
    return all(map(math.isfinite, numbers))


class Leaf:
    """An optimizer at the end of a nest, whose every call is a step."""

    def windows(self) -> list[Any]:
        return []

    def skips(self) -> int:
        return 0

    def has_stepped(self) -> bool:
        return True


class Momentum(Leaf):
    def __init__(self) -> None:
        self.trace = [0.0, 0.0]

    def update(self, grad: list[float], call: Call) -> list[float]:
        self.trace = [0.5 * t + x for t, x in zip(self.trace, grad, strict=True)]
        return [-0.5 * t for t in self.trace]


class Fragile(Leaf):
    """Its update is infinite where a gradient is large: a step that is not finite."""

    def update(self, grad: list[float], call: Call) -> list[float]:
        return [-math.copysign(math.inf, x) if abs(x) > BAD_ABOVE else -x for x in grad]


class Clip(Leaf):
    """A clip in a chain: what is inside it is no longer directly in what is around."""

    MAX_NORM = 2.3

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def windows(self) -> list[Any]:
        return self.inner.windows()

    def skips(self) -> int:
        return self.inner.skips()

    def has_stepped(self) -> bool:
        return self.inner.has_stepped()

    def update(self, grad: list[float], call: Call) -> list[float]:
        total = norm(grad)
        factor = min(1.0, self.MAX_NORM / total) if total else 1.0
        factor = math.nan if math.isnan(total) else factor
        return self.inner.update([x * factor for x in grad], call)


class Guard:
    """A guard judges what it is given; `checks_step` judges the computed step as well."""

    checks_step = False
    checks_window = False

    def __init__(self) -> None:
        self.skips = 0

    def passed_on(self, grad: list[float]) -> list[float]:
        return grad

    def note(self, *, refused: bool) -> None:
        self.skips += refused


class SkipNonfinite(Guard):
    checks_window = True

    def is_good(self, grad: list[float], call: Call) -> bool:
        return is_finite(*grad, call.value)


class SkipNonfiniteStep(SkipNonfinite):
    checks_step, checks_window = True, False


class SkipLargeNorm(Guard):
    MAX_NORM = 57.0

    def is_good(self, grad: list[float], call: Call) -> bool:
        return norm(grad) <= self.MAX_NORM  # False for NaN


class LossScale(SkipNonfiniteStep):
    """Halves its scale at a skip, and doubles it after three calls in a row without one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.good = 4.0, 0

    def passed_on(self, grad: list[float]) -> list[float]:
        return [x / self.scale for x in grad]

    def note(self, *, refused: bool) -> None:
        super().note(refused=refused)
        self.good = 0 if refused else self.good + 1
        if refused:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good == 3:
            self.scale, self.good = min(self.scale * 2, 8.0), 0


class Accumulate:
    """The weighted mean of a window of micro-batches; 0 * NaN counts as 0."""

    def __init__(self, every: int) -> None:
        self.every, self.gradient_step = every, 0
        self.discard()

    def discard(self) -> None:
        self.mini_step, self.weight, self.total = 0, 0.0, NOTHING

    def add(self, grad: list[float], weight: float) -> None:
        self.mini_step += 1
        self.weight += weight
        if weight > 0:
            self.total = [t + weight * x for t, x in zip(self.total, grad, strict=True)]

    def mean_if_closed(self, accepted: bool, call: Call) -> list[float] | None:
        """The gradient of the window, which starts anew, or None if no step is due."""
        is_due = call.flush or (accepted and self.mini_step >= self.every)
        weight, total = self.weight, self.total
        if is_due:
            self.discard()
        return [t / weight for t in total] if is_due and weight else None


class Stack:
    """Gates directly in one another, from the outermost on, around one transformation."""

    def __init__(self, gates: list[Any], inner: Any) -> None:
        self.gates, self.inner, self.stepped = gates, inner, False

    def windows(self) -> list[Any]:
        own = [gate for gate in self.gates if isinstance(gate, Accumulate)]
        return own or self.inner.windows()

    def skips(self) -> int:
        own = [gate.skips for gate in self.gates if isinstance(gate, Guard)]
        return sum(own) + self.inner.skips()

    def has_stepped(self) -> bool:
        return self.stepped and self.inner.has_stepped()

    def update(self, grad: list[float], call: Call) -> list[float]:
        window = next((gate for gate in self.gates if isinstance(gate, Accumulate)), None)
        place = self.gates.index(window) if window else 0
        outside, inside = self.gates[:place], self.gates[place + bool(window) :]
        if window and call.flush_only and not window.mini_step:
            # Nothing to emit: only what is around the window looks at the call.
            grad, refuses = self._judged(outside, grad, call)
            self._note(outside, refuses)
            self.stepped = self.stepped and refuses is None
            return NOTHING
        grad, refuses = self._judged(outside, grad, call)
        self.stepped, is_due = False, refuses is None
        if window:
            if refuses is None and not call.flush_only:
                window.add(grad, call.weight)
            grad = window.mean_if_closed(refuses is None, call)
            is_due, call = grad is not None, dataclasses.replace(call, weight=1.0, flush=False)
        if not is_due:
            self._note(outside, refuses)
            return NOTHING
        grad, refuses_step = self._judged(inside, grad, call)
        after = copy.deepcopy(self.inner)
        if refuses_step is None:
            checks = [gate for gate in outside if gate.checks_window]
            if checks and not is_finite(*grad):
                refuses_step = checks[-1]
        if refuses_step is None:
            update = after.update(grad, call)
            checks = [gate for gate in (*outside, *inside) if gate.checks_step]
            if checks and not is_finite(*update):
                refuses_step = checks[-1]
                for open_window in self.inner.windows():
                    open_window.discard()
        if window and refuses_step not in outside:  # a guard inside refuses what was emitted
            window.gradient_step += 1
        self._note(inside, refuses_step)
        if refuses_step is None:
            self._note(outside, refuses)
            self.inner, self.stepped = after, True
            return update
        self._note(outside, refuses or refuses_step)
        return NOTHING

    def _judged(self, guards: list[Guard], grad: list[float], call: Call) -> Any:
        """The gradient as the guards pass it on, and the first that refuses it."""
        for guard in guards:
            grad = guard.passed_on(grad)
            if not guard.is_good(grad, call):
                return grad, guard
        return grad, None

    def _note(self, guards: list[Guard], refuses: Guard | None) -> None:
        """The guard that refuses counts, and the others stay as they were; or all note a step."""
        for guard in guards:
            if refuses is None or guard is refuses:
                guard.note(refused=refuses is not None)


def stacked(parts: list[Any]) -> Any:
    """The nest of these gates, clips and a leaf, from the outermost on."""
    first, *others = parts
    if isinstance(first, Leaf):
        return first
    if first is Clip:
        return Clip(stacked(others))
    gates = [first]
    while not isinstance(others[0], Leaf) and others[0] is not Clip:
        gates.append(others.pop(0))
    return Stack(gates, stacked(others))
