"""Rows: the measurements of one step, as `watch` writes them and as the host reads them.

`Row` lists the columns on the device, and `Rows` those on the host.
"""

import enum
import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from .._checks import refuse_traced
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
        width = 1 + len(names.units)
        return cls(
            *(np.zeros(size, np.int64) for _ in range(4)),
            loss=np.zeros(size),
            limits=np.zeros((size, 2)),
            norms=np.zeros((size, len(KINDS), width)),
            nonfinite=np.zeros((size, width)),
            factors=np.zeros((size, len(names.clips))),
            taps=np.zeros((size, len(names.taps), 2, len(STATISTICS))),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Rows"]) -> "Rows":
        """Join rows with the same names."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def has(self, flags: int) -> HostArray:
        """Return bool[steps], whether any of the flags is set."""
        return self.outcome & int(flags) != 0

    def take(self, index: Any) -> "Rows":
        """Return the rows that a slice, a mask or an array of indices selects."""
        return Rows(*(column[index] for column in self))


class Row(NamedTuple):
    """The last row of `watch` as arrays, an output of `lax.scan`; see `last_row`.

    Attributes:
        ints: int32[4], the first four columns of `Rows`.
        floats: float32[columns], the loss, two thresholds, the values of the tree and of each unit,
            and the sums of the taps.
        factors: Smallest factor of each clip by its key in `metrics`.
        checksum: uint32[], `Names.checksum`.
    """

    ints: Array
    floats: Array
    factors: dict[str, Array]
    checksum: Scalar


RowSource: TypeAlias = Row
"""A row, or a stack of rows from `lax.scan`."""


def read_stack(row: Row, names: Names) -> tuple[Rows, Names]:
    """Convert the row of one step, or a stack of them, to `Rows`.

    Raises:
        TypeError: If called inside jit.
        ValueError: If the row belongs to other parameters, or to several runs.
    """
    for x in row[:2]:
        refuse_traced("rows", x)
    ints, floats, factors, checksum = jax.device_get(row)
    ints, floats = np.atleast_2d(ints), np.atleast_2d(floats)
    if ints.ndim > 2:
        hint = "Select run i: `jax.tree.map(lambda x: x[i], rows)`."
        raise value_error("state", "the rows of one run", f"rows of {len(ints)} runs", hint)
    names = names._replace(clips=tuple(sorted(factors)))
    check_names(names, np.ravel(checksum)[0], floats.shape[1])
    columns = [np.atleast_1d(factors[key]) for key in names.clips]
    table = np.stack(columns, 1) if columns else np.zeros((len(ints), 0))
    return unpack(ints, floats, table, names), names


def check_names(names: Names, checksum: Any, num_columns: int) -> None:
    """Raise if a row was measured for other units or taps."""
    expected = TREE + WIDTH * (1 + len(names.units)) + len(names.taps) * np.prod(TAP_SHAPE)
    if int(checksum) != names.checksum or num_columns != expected:
        rule = f"the state of `watch` for parameters with {len(names.units)} units"
        hint = (
            "Pass the parameters, and the `granularity`, `mask` and `taps` with which `watch` was "
            "made."
        )
        raise value_error("state", rule, "a state for other names", hint)


def unpack(ints: HostArray, floats: HostArray, factors: HostArray, names: Names) -> Rows:
    """Split the columns that `watch` writes, in the order of `Row`."""
    step, batch_id, outcome, device = np.asarray(ints, np.int64).T
    floats = np.asarray(floats, np.float64)
    end = TREE + WIDTH * (1 + len(names.units))
    table = floats[:, TREE:end].reshape(len(step), 1 + len(names.units), WIDTH)
    sums = floats[:, end:].reshape(len(step), len(names.taps), *TAP_SHAPE)
    has_taps = outcome & Outcome.HAS_TAPS != 0
    taps = np.where(has_taps[:, None, None, None], statistics(sums), 0)
    return Rows(
        step=step,
        batch_id=batch_id,
        outcome=outcome,
        device=device,
        loss=floats[:, 0],
        limits=floats[:, 1:TREE],
        norms=np.moveaxis(table[..., :-1], 1, 2),
        nonfinite=table[..., -1],
        factors=np.asarray(factors, np.float64),
        taps=taps,
    )
