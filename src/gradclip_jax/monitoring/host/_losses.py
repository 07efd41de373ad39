"""Find losses that have risen permanently or have never fallen."""

import math
from typing import NamedTuple

import numpy as np

from ..._types import HostArray
from ._outliers import BLOCK, PERIOD, RATIO, LastingRises

UNLEARNED = 5 * BLOCK
"""A run does not learn if the last `UNLEARNED - 2 * BLOCK` of its first `UNLEARNED` losses are
above its first BLOCK losses. If consecutive losses are noise with a correlation of 0.9, this
happens in 1 of 100 runs."""


class LossRise(NamedTuple):
    """A loss that has risen permanently, or has not fallen since the start.

    Attributes:
        text: Description of the rise, with the losses that are compared and their values.
        threshold: Losses above this value belong to the rise.
        has_exploded: Whether the loss fell at first, and is now far above its recent values.
        is_flat: Whether the loss has hardly changed since the start, unlike a value loss.
    """

    text: str
    threshold: float
    has_exploded: bool = False
    is_flat: bool = False


class Losses:
    """Compare the losses of a run with its first losses and its best losses.

    Attributes:
        rises: Rule for lasting rises of the logarithm of the loss.
        start: The first losses, at most UNLEARNED.
        count: Number of losses so far.
        first: The first finite loss; infinity before it.
        best: The highest of the best BLOCK losses; infinity before them.
        is_positive: Whether no loss was negative.
    """

    def __init__(self):
        self.rises, self.start, self.count = LastingRises(np.log([RATIO["loss"]])), np.zeros(0), 0
        self.first, self.best, self.is_positive = math.inf, math.inf, True

    def compare(
        self, losses: HostArray, levels: HostArray
    ) -> tuple[dict[int, LossRise], HostArray]:
        """Compare the next losses; `levels` contains the median of the losses before each.

        Returns:
            A dict from indices of losses to the rises that they complete, and a bool for each loss:
            whether it may be a value loss, which grows with the return of a policy. Value losses
            have not fallen since the start, or are sometimes negative.
        """
        ratio, losses = RATIO["loss"], np.where(np.isfinite(losses), losses, np.inf)
        if math.isinf(self.first):
            self.first = next(iter(losses[np.isfinite(losses)]), math.inf)
        is_positive = self.is_positive & np.logical_and.accumulate(losses >= 0)
        log_losses = np.log(losses, where=losses > 0, out=np.full(len(losses), np.nan))
        has_risen, *bounds = self.rises.compare(log_losses[:, None])
        lowest, best = np.exp(bounds)[..., 0]
        best_so_far = np.fmin.accumulate(np.append(self.best, best))[1:]
        # True if BLOCK consecutive losses were clearly below the first loss.
        have_fallen = best_so_far * ratio < self.first
        is_early = self.count + np.arange(len(losses)) < PERIOD - 1
        may_grow = ~have_fallen & (is_early | (levels > ratio * self.first))
        found = self._unlearned(losses)
        for i in np.flatnonzero(has_risen[:, 0] & is_positive).tolist():
            text = (
                f"the lowest of the last {BLOCK} losses, {lowest[i]:.3g}, is above {ratio} times "
                f"the highest of the best {BLOCK}, {best[i]:.3g}"
            )
            has_exploded = bool(have_fallen[i] and lowest[i] > RATIO["tree"] * levels[i])
            found[i] = LossRise(text, ratio * float(best[i]), has_exploded)
        if len(losses):
            self.best, self.is_positive = best_so_far[-1], is_positive[-1]
        self.count += len(losses)
        return found, ~is_positive | may_grow

    def _unlearned(self, losses: HostArray) -> dict[int, LossRise]:
        """Report a run whose first UNLEARNED losses have not fallen.

        The second BLOCK losses are not compared, because a loss may rise during warm-up.
        """
        last = UNLEARNED - 1 - len(self.start)
        is_complete = 0 <= last < len(losses)
        self.start = np.append(self.start, losses)[:UNLEARNED]
        highest, rest = self.start[:BLOCK].max(initial=0), self.start[2 * BLOCK :]
        if not is_complete or rest.min() <= highest:
            return {}
        text = f"the last {UNLEARNED - 2 * BLOCK} losses are above the highest of the first {BLOCK}"
        # A value loss of reinforcement learning is not flat: its first values are arbitrary, and it
        # is as noisy as the return.
        is_flat = bool(self.start.max() < RATIO["loss"] * self.start.min())
        return {last: LossRise(f"{text}, {highest:.3g}", float(highest), is_flat=is_flat)}
