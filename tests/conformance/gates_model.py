"""The documented semantics of guards and accumulations in NumPy and float64, call by call.

Written from the documentation alone. `watch` changes nothing and has no counterpart. Each
transformation has `update(grads, **extra_args)` and `flush()`, which return the update or None, and
`has_updated`, which is None without a gate.
"""

import copy

import numpy as np

OVERFLOW = 1.8446743e19  # the norm whose square overflows in float32


def norm(tree):
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(sum(np.sum(np.square(x)) for x in tree.values())))


def is_finite(tree):
    return all(np.isfinite(x).all() for x in tree.values())


def scaled(tree, factor):
    with np.errstate(over="ignore", invalid="ignore"):
        return {name: factor * x for name, x in tree.items()}


def clipped(tree, limit):
    """A clip by global norm, which makes every leaf NaN if the float32 norm is not finite."""
    return scaled(tree, limit / max(norm(tree), limit) if norm(tree) <= OVERFLOW else np.nan)


def zeros(tree):
    return {name: np.zeros_like(x) for name, x in tree.items()}


class Leaf:
    """SGD with a schedule, the same where x[0] > 1.5 gives NaN ("toxic"), or a clip and Adam."""

    has_updated, gates = None, ()

    def __init__(self, kind):
        self.kind, self.count, self.m, self.v = kind, 0, None, None

    def update(self, grads, **extra):
        if self.kind == "toxic" and grads["x"][0] > 1.5:
            grads = scaled(grads, np.nan)
        self.count += 1
        if self.kind != "adam":
            return scaled(grads, -0.1 / self.count)
        grads = clipped(grads, 1.0)
        m, v = self.m or zeros(grads), self.v or zeros(grads)
        self.m = {k: 0.1 * g + 0.9 * m[k] for k, g in grads.items()}
        self.v = {k: 0.001 * g**2 + 0.999 * v[k] for k, g in grads.items()}
        mean, square = (
            scaled(x, 1 / (1 - b**self.count)) for x, b in ((self.m, 0.9), (self.v, 0.999))
        )
        return {k: -0.1 * x / (np.sqrt(square[k]) + 1e-8) for k, x in mean.items()}

    def flush(self):
        return None  # no window


class Partition:
    """`optax.partition` by leaves."""

    def __init__(self, parts):
        self.parts, self.gates = parts, [gate for part in parts.values() for gate in part.gates]

    def update(self, grads, **extra):
        return {k: part.update({k: grads[k]}, **extra)[k] for k, part in self.parts.items()}

    def flush(self):
        updates = {}
        for part in self.parts.values():
            updates |= part.flush() or {}
        return updates or None

    has_updated = property(lambda self: any(part.has_updated for part in self.parts.values()))


class Chain:
    """`optax.chain` of a clip whose threshold grows, a transformation, and `scale(0.5)`."""

    def __init__(self, inner):
        self.inner, self.gates, self.count = inner, inner.gates, 0

    def update(self, grads, **extra):
        self.count += 1
        grads = clipped(grads, 0.75 + 0.25 * self.count)
        return scaled(self.inner.update(grads, **extra), 0.5)

    def flush(self):
        updates = self.inner.flush()
        return updates and scaled(updates, 0.5)

    has_updated = property(lambda self: self.inner.has_updated)


class Guard:
    def __init__(self, kind="spikes", check="gradient", mask=None, norm=np.inf, loss=np.inf):
        self.kind, self.check, self.mask, self.norm, self.loss = kind, check, mask, norm, loss
        self.skips = {"nonfinite": 0, "large_norm": 0, "large_loss": 0, "other": 0}
        self.scale, self.good, self.has_failed = 8.0, 0, False  # of a loss scale

    def receive(self, grads):
        grads = scaled(grads, 1 / self.scale) if self.kind == "scale" else grads
        return grads | zeros({k: x for k, x in grads.items() if self.mask and not self.mask[k]})

    def cause(self, grads, value, weight=1.0):
        """The cause of a skip, or None."""
        if self.kind == "if":  # a function of the norm
            return "other" if norm(grads) > self.norm else None
        scalars = [] if self.kind == "spikes" else [weight]
        if value is not None and (self.kind != "spikes" or self.loss < np.inf):
            scalars.append(value)
        overflows = self.check == "gradient" and norm(grads) > OVERFLOW
        if not is_finite(grads) or overflows or not np.isfinite(scalars).all():
            return "nonfinite"
        if norm(grads) > self.norm:
            return "large_norm"
        return "large_loss" if value is not None and value > self.loss else None

    def cause_of_window(self, grads):
        """The cause for which a guard around the accumulation rejects a window, or None."""
        is_checked = self.check == "gradient" and self.kind != "spikes"
        return self.cause(grads, None) if is_checked else None

    def skip(self, cause):
        self.skips[cause] += 1
        if self.kind == "scale":
            self.has_failed |= self.scale == 1.0
            self.scale, self.good = max(self.scale / 2, 1.0), 0

    def accept(self):
        self.good += 1
        if self.kind == "scale" and self.good == 3:  # `growth_interval`
            self.scale, self.good = min(self.scale * 2, 2.0**24), 0


class Accumulation:
    def __init__(self, every, reduction):
        self.every, self.reduction, self.gradient_step, self.empty = every, reduction, 0, 0
        self.reset()

    def reset(self):
        self.mini_step, self.sum, self.weight, self.value = 0, None, 0.0, 0.0

    def add(self, grads, value, weight):
        self.mini_step += 1
        self.sum = self.sum or zeros(grads)
        if weight != 0:  # a micro-batch of weight 0 may be NaN
            with np.errstate(over="ignore", invalid="ignore"):
                self.sum = {k: s + weight * grads[k] for k, s in self.sum.items()}
            self.weight += weight
            self.value = None if value is None else self.value + weight * value

    def window(self):
        """The gradient and the mean loss of the window, or None if it has no weight."""
        if self.weight == 0:
            return None, None
        grads = self.sum if self.reduction == "sum" else scaled(self.sum, 1 / self.weight)
        return grads, self.value and self.value / self.weight

    @property
    def is_complete(self):
        every = self.every(self.gradient_step) if callable(self.every) else self.every
        return self.mini_step >= every


class Stack:
    """Guards, an accumulation or None, guards inside it, and the inner transformation.

    At each check, the outermost guard that rejects counts the skip. If it rejects a micro-batch and
    the window that closes in the same call, it counts one skip. `skips_in_a_row` counts calls
    that neither applied a step nor accumulated a gradient. All guards have the same limit.
    `grad_norm` is the norm of the gradient that the outermost guard received.
    """

    skips_in_a_row, has_failed, grad_norm = 0, False, None

    def __init__(self, outer, accumulation, within, inner):
        self.outer, self.accumulation, self.within, self.inner = outer, accumulation, within, inner
        gates = [self, *outer, accumulation, *within, *inner.gates]
        self.gates = [gate for gate in gates if gate]
        self.has_updated = False if self.gates[1:] else inner.has_updated

    def update(self, grads, value=None, weight=1.0, flush=False):
        acc, is_refused, updates, is_held, counted = self.accumulation, False, None, False, None
        is_ignored = acc is not None and weight == 0 and not is_finite(grads)
        for guard in self.outer:
            grads = guard.receive(grads)
            self.grad_norm = norm(grads) if guard is self.outer[0] else self.grad_norm
            cause = guard.cause(grads, value, weight)
            if cause and not is_ignored:
                guard.skip(cause)
                is_refused, counted = True, (guard, cause)
                break
        if acc is None:
            extra = {"value": value, "weight": weight, "flush": flush}
            updates = None if is_refused else self._step(grads, self.outer, **extra)
        else:
            if not is_refused and not (flush and weight == 0):  # that is `flush`
                acc.add(grads, value, weight)
            closes = acc.mini_step > 0 and (acc.is_complete or flush)
            updates = self._close(counted) if closes else None
            is_held = not closes and not is_refused
        if not is_refused and not is_ignored and (is_held or updates is not None):
            for guard in self.outer:
                guard.accept()
        if not is_held:
            self._count(updates is not None)
        self.has_updated = updates is not None and self.inner.has_updated in (None, True)
        return zeros(grads) if updates is None else updates

    def flush(self):
        """The function `flush`: closes the window like a call that passes no gradient."""
        acc = self.accumulation
        if acc is None:
            updates = self.inner.flush()
            self.has_updated = False if self.gates[1:] and not updates else self.inner.has_updated
            return updates
        nothing, updates = zeros(acc.sum or {}), None
        if acc.mini_step > 0:
            updates = self._close()
            self._count(updates is not None)
        self.has_updated = updates is not None
        return nothing if updates is None else updates

    def _close(self, counted=None):
        """The update of the window, or None if it is empty or dropped; a skip that counts already."""
        acc, updates = self.accumulation, None
        grads, value = acc.window()
        acc.reset()
        if grads is None:
            acc.empty += 1
            return None
        for guard in self.outer:
            if cause := guard.cause_of_window(grads):
                if (guard, cause) != counted:
                    guard.skip(cause)
                return None
        for guard in self.within:
            grads = guard.receive(grads)
            if cause := guard.cause(grads, value):
                guard.skip(cause)
                break
        else:
            updates = self._step(grads, [*self.outer, *self.within], value=value)
        if updates is not None:
            for guard in self.within:
                guard.accept()
        acc.gradient_step += updates is not None
        return updates

    def _step(self, grads, guards, **extra):
        """The step of the inner transformation, or None if a guard rejects it."""
        before = copy.deepcopy(self.inner.__dict__)
        updates = self.inner.update(grads, **extra)
        checking = [guard for guard in guards if guard.check == "step"]
        if checking and not is_finite(updates):
            checking[0].skip("nonfinite")
            self.inner.__dict__.update(before)
            return None
        return updates

    def _count(self, is_applied):
        self.skips_in_a_row = 0 if is_applied else self.skips_in_a_row + 1
        self.has_failed |= self.skips_in_a_row >= 5
