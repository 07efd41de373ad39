"""Nests of clip, guard and accumulation in plain Python: lists of floats, no JAX in here.

The rule that everything follows: a micro-batch that is not finite is left out; a window whose step
is not finite is dropped. A guard runs what is inside it on a copy, and keeps the copy only if the
step was good.
"""

import copy
import dataclasses
import math
from typing import Any

BAD_ABOVE = 45.0  # `fragile` makes an infinite update of a larger gradient


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
    """An optimizer at the end of a nest."""

    def windows(self) -> list[Any]:
        return []


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


class Around:
    """Something around another transformation."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def windows(self) -> list[Any]:
        return self.inner.windows()


class Clip(Around):
    MAX_NORM = 2.3

    def update(self, grad: list[float], call: Call) -> list[float]:
        total = norm(grad)
        factor = min(1.0, self.MAX_NORM / total) if total else 1.0
        factor = math.nan if math.isnan(total) else factor
        return self.inner.update([x * factor for x in grad], call)


class Guard(Around):
    """`is_good` says what comes in; with `checks_step` the update that comes out is looked at."""

    checks_step = False

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.skips = 0

    def update(self, grad: list[float], call: Call) -> list[float]:
        if not self.is_good(grad, call):
            self.skips += 1
            for window in self.windows():
                window.has_updated = False
            return [0.0, 0.0]
        after = copy.deepcopy(self.inner)
        update = after.update(grad, call)
        if self.checks_step and not is_finite(*update):
            self.skips += 1
            for window in self.windows():
                window.discard()
            return [0.0, 0.0]
        self.inner = after
        return update

    def is_good(self, grad: list[float], call: Call) -> bool:
        raise NotImplementedError


class SkipNonfinite(Guard):
    checks_step = True

    def is_good(self, grad: list[float], call: Call) -> bool:
        return is_finite(*grad, call.value)


class SkipLargeNorm(Guard):
    MAX_NORM = 57.0

    def is_good(self, grad: list[float], call: Call) -> bool:
        return norm(grad) <= self.MAX_NORM  # False for NaN


class LossScale(SkipNonfinite):
    """Halves its scale at a skip, and doubles it after three calls in a row without one."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.scale, self.good = 4.0, 0

    def update(self, grad: list[float], call: Call) -> list[float]:
        before = self.skips
        update = super().update([x / self.scale for x in grad], call)
        self.good = self.good + 1 if self.skips == before else 0
        if self.skips > before:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good == 3:
            self.scale, self.good = min(self.scale * 2, 8.0), 0
        return update


class Accumulate(Around):
    """The weighted mean of a window of micro-batches; 0 * NaN counts as 0."""

    def __init__(self, inner: Any, every: int) -> None:
        super().__init__(inner)
        self.every, self.gradient_step = every, 0
        self.has_updated = False
        self.discard()

    def windows(self) -> list[Any]:
        return [self]

    def discard(self) -> None:
        self.mini_step, self.weight, self.total = 0, 0.0, [0.0, 0.0]
        self.has_updated = False

    def update(self, grad: list[float], call: Call) -> list[float]:
        if call.flush_only and self.mini_step == 0:
            return [0.0, 0.0]
        if not call.flush_only:
            if self.mini_step == 0:
                self.discard()
            self.mini_step += 1
            self.weight += call.weight
            if call.weight > 0:
                pairs = zip(self.total, grad, strict=True)
                self.total = [t + call.weight * x for t, x in pairs]
        self.has_updated = False
        if self.mini_step < self.every and not call.flush:
            return [0.0, 0.0]
        total, weight = self.total, self.weight
        self.discard()
        if weight == 0:
            return [0.0, 0.0]
        self.has_updated = True
        self.gradient_step += 1
        return self.inner.update(
            [t / weight for t in total], dataclasses.replace(call, flush=False)
        )
