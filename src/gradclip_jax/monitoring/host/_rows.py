"""The rows of a run on the host, as NumPy arrays and as the lines of a log.

| type | contents |
| --- | --- |
| `Rows` | NumPy arrays, with the names of their columns in `Names` |
| `Line` | a dictionary for one step, in a log |
| `Columns` | all values of each key in a log |

`unpack_rows` converts the rows that `watch` wrote to `Rows`. `_lines` converts `Rows` to lines of a
log, and `Columns` to `Rows`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ..._checks import check_concrete
from ..._errors import value_error
from ..._types import HostArray
from .._layout import INTEGERS, MEASURED, Names, Outcome, PackedRows, layout
from .._taps import STATISTICS, statistics

Line: TypeAlias = Mapping[str, Any]
"""A line of a log, with the keys that docs/rows.md describes."""

Columns: TypeAlias = dict[str, dict[int, Any]]
"""The values of each key in a log, by the index of their line."""


class Rows(NamedTuple):
    """Measurements of consecutive steps as NumPy arrays, oldest first; see docs/rows.md.

    Values that were not measured are 0. The flags in `outcome` indicate which values were measured.

    Attributes:
        step: int64[steps], index of the call of `watch`.
        batch_id: int64[steps].
        outcome: int64[steps], flags of `Outcome`.
        device: int64[steps], index of the device whose parameters differ from the others.
        loss: float64[steps].
        limits: float64[steps, 2], smallest thresholds of guards for the gradient norm and the loss;
            0 without such a guard, and in rows that were read from a log.
        norms: float64[steps, 3, 1 + units], norms of gradient, update and parameters, for the whole
            tree and then for each unit.
        nonfinite: float64[steps, 1 + units], number of non-finite elements of the gradient.
        factors: float64[steps, clips], smallest factor of each clip.
        taps: float64[steps, taps, 2, 3], mean, RMS and share of non-finite elements of the
            activation and of its cotangent.
    """

    step: HostArray
    batch_id: HostArray
    outcome: HostArray
    device: HostArray
    loss: HostArray
    limits: HostArray
    norms: HostArray
    nonfinite: HostArray
    factors: HostArray
    taps: HostArray

    @classmethod
    def zeros(cls, size: int, names: Names) -> "Rows":
        """Return rows in which nothing was measured."""
        width, shape_of_taps = 1 + len(names.units), (len(names.taps), 2, len(STATISTICS))
        shapes = (), (2,), (len(MEASURED), width), (width,), (len(names.clips),), shape_of_taps
        return cls(*np.zeros((4, size), np.int64), *(np.zeros((size, *x)) for x in shapes))

    @classmethod
    def concatenate(cls, parts: Sequence["Rows"]) -> "Rows":
        """Join rows with the same names."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @property
    def end(self) -> int:
        """The index of the next row."""
        return int(self.step[-1]) + 1 if len(self.step) else 0

    def has(self, flags: int) -> HostArray:
        """Return bool[steps], whether any of the flags is set."""
        return self.outcome & int(flags) != 0

    @property
    def closes_window(self) -> HostArray:
        """Whether a row is the last one of its window; True without an accumulation."""
        return ~self.has(Outcome.ACCUMULATED)

    @property
    def has_clip_factor(self) -> HostArray:
        """Whether a row was applied with a finite norm, so that its clip factors are meaningful."""
        return self.has(Outcome.APPLIED) & np.isfinite(self.norms[:, 0, 0])

    def take(self, index: Any) -> "Rows":
        """Return the rows that a slice, a mask or an array of indices selects."""
        return Rows(*(column[index] for column in self))


def unpack_rows(row: PackedRows, names: Names) -> tuple[Rows, Names]:
    """Convert the rows that `watch` wrote to `Rows`, and add the names of clips.

    Raises:
        TypeError: If called inside jit.
        ValueError: If the rows were measured for different parameters, or belong to several runs,
            as with `vmap` over seeds.
    """
    check_concrete("state", row, "Return the state from `jit`, and read it on the host.")
    values, clips, checksum = jax.device_get(row)
    if np.any(np.asarray(checksum) != names.checksum):
        rule = f"the state of `watch` for parameters with {len(names.units)} units"
        hint = "Pass `params`, `granularity`, `trainable` and `taps` as to `watch`."
        raise value_error("state", rule, "a state for other names", hint)
    # A state has one checksum. An output of `lax.scan` has one checksum per row.
    num_runs = np.size(checksum) if values.ndim == np.ndim(checksum) + 2 else 1
    steps = values[..., 0]
    values = values.reshape(-1, values.shape[-1])  # of nested scans
    # Remove rows that were never written, sort by step, and remove the duplicates that `last_row`
    # returns while an accumulation around `watch` is open.
    written = np.unique(values[values[:, 2] != 0], axis=0)
    if num_runs > 1 or np.any(np.diff(written[:, 0]) == 0):
        # Find the axis of the runs, along which the steps are equal. After a scan over `vmap`, it
        # is not the first axis.
        axes = (i for i, n in enumerate(steps.shape) if n > 1 and not np.ptp(steps, i).any())
        one_run = f"jax.tree.map(lambda x: x[{':, ' * next(axes, 0)}i], state)"
        hint = f"Read run i with `monitors[i].read({one_run})`."
        raise value_error("state", "the rows of one run", "the rows of several runs", hint)
    fields = dict[str, HostArray]()
    for name, (columns, shape) in layout(names._replace(clips=tuple(clips))).items():
        numbers = np.ascontiguousarray(written[:, columns])
        # Floating-point numbers are stored as their bits.
        is_integer = name in INTEGERS
        numbers = numbers.astype(int) if is_integer else numbers.view(np.float32).astype(float)
        fields[name] = numbers.reshape(len(written), *shape)
    nonfinite, *norms = np.moveaxis(fields["norms"], 2, 0)
    rows = Rows(
        step=fields["step"],
        batch_id=fields["batch_id"],
        outcome=fields["outcome"],
        device=fields["device"],
        loss=fields["loss"],
        limits=np.column_stack([fields["norm_limit"], fields["loss_limit"]]),
        norms=np.stack(norms, axis=1),
        nonfinite=nonfinite,
        factors=fields["clip_factors"],
        taps=statistics(fields["taps"]),
    )
    _complete(rows)
    return rows, names._replace(clips=tuple(sorted(clips)))


def _complete(rows: Rows) -> None:
    """Set values that were not measured to 0, and derive flags from the other columns of a row.

    `watch` stores the flags that its inner transformation reports. Whether an update is nonzero and
    whether a clip factor is below 1 follows from the norms and factors in the same row. These parts
    of `APPLIED`, `CLIPPED` and `ACCUMULATED` are derived here, on the host, so that the training
    step does not have to compute them on the device.
    """
    rows.taps[~rows.has(Outcome.HAS_TAPS)] = 0
    rows.norms[~rows.has(Outcome.HAS_GRADIENT), 0] = 0
    rows.nonfinite[~rows.has(Outcome.HAS_GRADIENT)] = 0
    # If the step was not applied, the update is zero, even for a non-finite parameter.
    has_run, update = rows.has(Outcome.APPLIED), rows.norms[:, 1]
    update[~has_run[:, None] & ~np.isfinite(update)] = 0
    # With `optax.partition`, some parameters may change although the updates of others are skipped.
    is_applied = has_run | (update[:, 0] != 0)
    rows.outcome[is_applied] |= int(Outcome.APPLIED)
    rows.outcome[is_applied] &= ~int(Outcome.ACCUMULATED)
    rows.outcome[is_applied & np.any(rows.factors < 1, axis=1)] |= int(Outcome.CLIPPED)
    rows.outcome[~rows.has(Outcome.APPLIED | Outcome.SKIPPED)] |= int(Outcome.ACCUMULATED)
