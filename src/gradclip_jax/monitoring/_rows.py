"""Rows: the measurements of one step, as `watch` writes them and as the host reads them.

`Row` lists the columns on the device, and `Rows` those on the host.
"""

import enum
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import value_error
from .._types import Array, HostArray, Scalar
from ._taps import SHAPE as TAP_SHAPE
from ._taps import STATISTICS, statistics

KINDS = ("gradient", "update", "parameter")
"""The norms that `watch` measures, in the order of `Rows.norms`."""

TREE = 3
"""Index of the norms of the whole tree in a row of floats, after the loss and two thresholds."""

WIDTH = len(KINDS) + 1
"""Number of values for the whole tree and for each unit: the norms and the non-finite elements."""


class Outcome(enum.IntFlag):
    """What is known about a step; the bits of the column `outcome` of the rows of `watch`.

    | flag | meaning |
    | --- | --- |
    | `HAS_GRADIENT`, `HAS_UPDATE`, `HAS_PARAMETER` | measured norms; a `flush` has no gradient |
    | `HAS_UNITS` | norms of units; in a log, only some rows have them |
    | `HAS_LOSS`, `HAS_BATCH_ID`, `HAS_TAPS` | these arguments were passed to `update` |
    | `HAS_NORM_LIMIT`, `HAS_LOSS_LIMIT` | a guard inside has this threshold |
    | `APPLIED` | the optimizer ran, or the update is nonzero |
    | `CLIPPED` | applied, and a factor is below 1 |
    | `SKIPPED` | a guard inside skipped the step |
    | `SKIPPED_NONFINITE`, `SKIPPED_LARGE_NORM`, `SKIPPED_LARGE_LOSS` | its cause |
    | `HELD` | an accumulation inside only added the micro-batch |
    | `UNCHANGED` | the optimizer ran; the update is zero although the gradient is not |
    | `EMPTY_WINDOW` | an accumulation inside dropped a window whose weight is zero |
    | `GUARD_FAILED` | a guard inside has failed |
    | `REPLICAS_CHECKED`, `REPLICA_DIFFERS` | replicas were compared; one differs |

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"w": jnp.ones(2)}
        >>> _, state = tx.update({"w": jnp.array([jnp.nan, 1.0])}, tx.init(params), params)
        >>> rows = gcx.Monitor(params).read(state).rows
        >>> rows.has(gcx.diagnostics.Outcome.SKIPPED).tolist()
        [True]
    """

    HAS_GRADIENT = enum.auto()
    HAS_UPDATE = enum.auto()
    HAS_PARAMETER = enum.auto()
    HAS_UNITS = enum.auto()
    HAS_LOSS = enum.auto()
    HAS_BATCH_ID = enum.auto()
    HAS_TAPS = enum.auto()
    HAS_NORM_LIMIT = enum.auto()
    HAS_LOSS_LIMIT = enum.auto()
    APPLIED = enum.auto()
    CLIPPED = enum.auto()
    SKIPPED = enum.auto()
    HELD = enum.auto()
    UNCHANGED = enum.auto()
    SKIPPED_NONFINITE = enum.auto()
    SKIPPED_LARGE_NORM = enum.auto()
    SKIPPED_LARGE_LOSS = enum.auto()
    GUARD_FAILED = enum.auto()
    EMPTY_WINDOW = enum.auto()
    REPLICAS_CHECKED = enum.auto()
    REPLICA_DIFFERS = enum.auto()


MEASURED = Outcome.HAS_GRADIENT, Outcome.HAS_UPDATE, Outcome.HAS_PARAMETER
"""The flags of `KINDS`."""


class Names(NamedTuple):
    """Names of the columns of `Rows`.

    Attributes:
        units: Leaves, layers or groups whose norms are measured; empty for the whole tree only.
        clips: Keys of `metrics` with the factors of the clips inside `watch`.
        taps: Taps, in the order of the forward pass.
    """

    units: tuple[str, ...] = ()
    clips: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Number of floats of a row on the device: loss, limits, norms, taps and clips."""
        num_taps = len(self.taps) * math.prod(TAP_SHAPE)
        return 1, TREE - 1, WIDTH * (1 + len(self.units)), num_taps, len(self.clips)

    @property
    def checksum(self) -> int:
        """A number that differs for other units and taps; `watch` keeps it in its state."""
        return zlib.crc32(json.dumps([self.units, self.taps]).encode())


class Rows(NamedTuple):
    """Measurements of consecutive steps as NumPy arrays, oldest first; see docs/rows.md.

    Values that were not measured are 0; the flags in `outcome` say which were.

    Attributes:
        step: int64[steps], index of the call of `watch`.
        batch_id: int64[steps].
        outcome: int64[steps], flags of `Outcome`.
        device: int64[steps], index of the device whose parameters differ.
        loss: float64[steps].
        limits: float64[steps, 2], thresholds of a guard for the gradient norm and the loss.
        norms: float64[steps, 3, 1 + units], norms of gradient, update and parameters; of the whole
            tree, then of each unit.
        nonfinite: float64[steps, 1 + units], number of non-finite elements of the gradient.
        factors: float64[steps, clips], smallest factor of each clip.
        taps: float64[steps, taps, 2, 4], mean, RMS, kurtosis and share of non-finite elements of
            the activation and of its cotangent.
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
        shapes = (), (2,), (len(KINDS), width), (width,), (len(names.clips),), shape_of_taps
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

    def take(self, index: Any) -> "Rows":
        """Return the rows that a slice, a mask or an array of indices selects."""
        return Rows(*(column[index] for column in self))

    def of_tree(self) -> "Rows":
        """Return a copy without units and taps."""
        norms, nonfinite, taps = self.norms[..., :1], self.nonfinite[:, :1], self.taps[:, :0]
        return self._replace(norms=norms.copy(), nonfinite=nonfinite.copy(), taps=taps.copy())


class Row(NamedTuple):
    """The last row of `watch` as arrays, an output of `lax.scan`; see `last_row`.

    Attributes:
        ints: int32[4], the first four columns of `Rows`.
        floats: float32[columns], the loss, two thresholds, 4 values of the tree and of each unit,
            the sums of the taps, and the smallest factor of each clip.
        clips: Dictionary whose keys are `Names.clips`, and whose values are None.
        checksum: uint32[], `Names.checksum`.
    """

    ints: Array
    floats: Array
    clips: dict[str, None]
    checksum: Scalar


def read_stack(row: Row, names: Names) -> tuple[Rows, Names]:
    """Convert the row of one step, or a stack of them, to `Rows`.

    Raises:
        TypeError: If called inside jit.
        ValueError: If the row belongs to other parameters, or to several runs.
    """
    ints, floats, clips, checksum = jax.device_get(row)
    if ints.ndim > 2:
        hint = "Select run i: `jax.tree.map(lambda x: x[i], rows)`."
        raise value_error("state", "the rows of one run", f"rows of {len(ints)} runs", hint)
    ints, floats = np.atleast_2d(ints).astype(np.int64), np.atleast_2d(floats).astype(np.float64)
    names = names._replace(clips=tuple(sorted(clips)))
    if np.any(checksum != names.checksum) or floats.shape[1] != sum(names.sizes):
        rule = f"the state of `watch` for parameters with {len(names.units)} units"
        hint = "Pass the parameters, and `granularity`, `mask` and `taps` as to `watch`."
        raise value_error("state", rule, "a state for other names", hint)
    loss, limits, table, sums, factors = np.split(floats, np.cumsum(names.sizes)[:-1], axis=1)
    table = table.reshape(len(table), 1 + len(names.units), WIDTH)
    sums = sums.reshape(len(sums), len(names.taps), *TAP_SHAPE)
    step, batch_id, outcome, device = ints.T
    has_taps = outcome & Outcome.HAS_TAPS != 0
    taps = np.where(has_taps[:, None, None, None], statistics(sums), 0)
    norms, nonfinite, loss = np.moveaxis(table[..., :-1], 1, 2), table[..., -1], loss[:, 0]
    of_step = step, batch_id, outcome, device, loss, limits
    return Rows(*of_step, norms, nonfinite, factors, taps), names
