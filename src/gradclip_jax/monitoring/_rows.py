"""The measurements of consecutive steps, on the device and on the host.

| type | place |
| --- | --- |
| `RowValues` | arrays on the device with the numbers of one step |
| `PackedRows` | the same numbers of many steps in one array of integers, in the state of `watch` |
| `Rows` | NumPy arrays on the host, with the names of their columns in `Names` |
| `Line` | a dictionary for one step, in a log |
| `Columns` | all values of each key in a log |

`unpack_rows` converts `PackedRows` to `Rows`. `_lines` converts `Rows` to lines of a log, and
`Columns` to `Rows`.
"""

import enum
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_concrete
from .._errors import value_error
from .._types import Array, HostArray, Scalar, Tree
from ..norms._granularity import group_names
from ..norms._mask import Mask, check_mask, mask_leaves
from ..wrappers._state import CallOutcome
from ._taps import SHAPE, STATISTICS, statistics, tap_names

NUM_INTS, FIRST_NORM = 4, 7
"""Number of integers at the start of a packed row, and index of the numbers of the tree; see
`RowValues`."""


class Outcome(enum.IntFlag):
    """Flags that describe one call of `watch`, stored in the column `outcome` of `Rows`.

    | flag | meaning |
    | --- | --- |
    | `HAS_GRADIENT`, `HAS_UPDATE`, `HAS_PARAMETER` | has these norms; a `flush` has no gradient |
    | `HAS_UNITS` | has norms of leaves or layers; in a log, only some rows do |
    | `HAS_LOSS`, `HAS_BATCH_ID`, `HAS_TAPS` | these arguments were passed to `update` |
    | `APPLIED` | the optimizer ran, or the update is nonzero |
    | `CLIPPED` | applied, and a clip factor is below 1 |
    | `SKIPPED` | a guard skipped the step or the micro-batch |
    | `SKIPPED_NONFINITE`, `SKIPPED_LARGE_NORM`, `SKIPPED_LARGE_LOSS`, `SKIPPED_OTHER` | its cause |
    | `ACCUMULATED` | the window of an accumulation stays open |
    | `EMPTY_WINDOW` | an accumulation dropped a window whose weight is zero |
    | `GUARD_FAILED` | a guard has failed |
    | `REPLICA_DIFFERS` | the parameters of one replica differ |

    A call that skips a micro-batch is `SKIPPED` and `ACCUMULATED` if other micro-batches wait in an
    open window, and `SKIPPED` and `APPLIED` if it closes the window.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"w": jnp.ones(2)}
        >>> _, state = jax.jit(tx.update)({"w": jnp.array([jnp.nan, 1.0])}, tx.init(params), params)
        >>> rows = gcx.Monitor(params).read(state).rows
        >>> rows.has(gcx.diagnostics.Outcome.SKIPPED).tolist()
        [True]
    """

    HAS_GRADIENT = 0x1
    HAS_UPDATE = 0x2
    HAS_PARAMETER = 0x4
    HAS_UNITS = 0x8
    HAS_LOSS = 0x10
    HAS_BATCH_ID = 0x20
    HAS_TAPS = 0x40
    APPLIED = CallOutcome.APPLIED
    CLIPPED = 0x400
    ACCUMULATED = CallOutcome.ACCUMULATED
    SKIPPED = CallOutcome.SKIPPED
    SKIPPED_NONFINITE = CallOutcome.SKIPPED_NONFINITE
    SKIPPED_LARGE_NORM = CallOutcome.SKIPPED_LARGE_NORM
    SKIPPED_LARGE_LOSS = CallOutcome.SKIPPED_LARGE_LOSS
    GUARD_FAILED = 0x20000
    EMPTY_WINDOW = CallOutcome.EMPTY_WINDOW
    REPLICA_DIFFERS = 0x80000
    SKIPPED_OTHER = CallOutcome.SKIPPED_OTHER


MEASURED = {x: Outcome[f"HAS_{x.upper()}"] for x in ("gradient", "update", "parameter")}
"""The trees whose norms are in `Rows.norms`, and the flags of rows that contain these norms."""

MEASURES = "nonfinite_elements", *(f"{name}_norm" for name in MEASURED)
"""The keys of the four numbers for the tree and for each unit, in the order in which `watch` writes
them."""

Line: TypeAlias = Mapping[str, Any]
"""A line of a log, with the keys that docs/rows.md describes."""

Columns: TypeAlias = dict[str, dict[int, Any]]
"""The values of each key in a log, by the index of their line."""


class Names(NamedTuple):
    """Names of the columns of `Rows`.

    Attributes:
        units: Leaves, layers or groups whose norms are measured; empty if only the tree is
            measured.
        clips: Keys of `metrics` with the factors of the clips inside `watch`.
        taps: Taps, in the order of the forward pass.
    """

    units: tuple[str, ...] = ()
    clips: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()

    @property
    def checksum(self) -> int:
        """The checksum of the names of units and taps, which the state of `watch` contains.

        The number 1 is the version of the row layout.
        """
        return zlib.crc32(repr((1, self.units, self.taps)).encode())


def names_of(
    params: Tree, granularity: Any = "leaf", trainable: Mask = None, taps: Any = None
) -> Names:
    """Return the names of the units and taps that `watch` measures."""
    check_mask(trainable)
    units = group_names(granularity, mask_leaves(trainable, params, params))
    return Names(units=tuple(units), taps=tuple(tap_names("taps", taps)))


class Rows(NamedTuple):
    """Measurements of consecutive steps as NumPy arrays, oldest first; see docs/rows.md.

    Values that were not measured are 0. The flags in `outcome` state which values were measured.

    Attributes:
        step: int64[steps], index of the call of `watch`.
        batch_id: int64[steps].
        outcome: int64[steps], flags of `Outcome`.
        device: int64[steps], index of the device whose parameters differ.
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
        """Whether a row was applied with a finite norm, so that its clip factors have a meaning."""
        return self.has(Outcome.APPLIED) & np.isfinite(self.norms[:, 0, 0])

    def take(self, index: Any) -> "Rows":
        """Return the rows that a slice, a mask or an array of indices selects."""
        return Rows(*(column[index] for column in self))


class RowValues(NamedTuple):
    """The numbers of one row on the device, in the order in which they are packed.

    Attributes:
        step: Number of calls before this one, int32[].
        batch_id: int32[].
        outcome: Flags of `Outcome`, int32[].
        device: Index of the device whose parameters differ, int32[].
        loss: float32[].
        norm_limit: Smallest threshold of the guards for the gradient norm, float32[].
        loss_limit: Smallest threshold of the guards for the loss, float32[].
        norms: Four numbers for the whole tree and for each unit, float32[1 + units, 4]; see
            `norm_table`.
        taps: Sums of the taps.
        clip_factors: Smallest factor of each clip.
    """

    step: Scalar
    batch_id: Any
    outcome: Scalar
    device: Scalar
    loss: Any
    norm_limit: Any
    loss_limit: Any
    norms: Array
    taps: Array
    clip_factors: Sequence[Array]

    def packed(self) -> Array:
        """Return the row as int32[columns]; floating-point numbers are stored as their bits."""
        ints = jnp.array([self.step, self.batch_id, self.outcome, self.device], jnp.int32)
        numbers = [self.loss, self.norm_limit, self.loss_limit, self.norms, self.taps]
        columns = [jnp.ravel(jnp.asarray(x, jnp.float32)) for x in (*numbers, *self.clip_factors)]
        bits = lax.bitcast_convert_type(jnp.concatenate(columns), jnp.int32)
        return jnp.concatenate([ints, bits])


class PackedRows(NamedTuple):
    """Rows of `watch`, in its state or as an output of `lax.scan`; see `last_row`.

    Attributes:
        values: int32[..., columns], the integers and the bits of the float32 numbers of
            `RowValues`.
        clips: Dictionary whose keys are `Names.clips`, and whose values are None.
        checksum: uint32[], `Names.checksum`, which a monitor compares with its own.
    """

    values: Array
    clips: dict[str, None]
    checksum: Scalar


def num_columns(names: Names) -> int:
    """Return the number of columns of `PackedRows`."""
    num_norms, num_sums = 4 * (1 + len(names.units)), math.prod(SHAPE) * len(names.taps)
    return FIRST_NORM + num_norms + num_sums + len(names.clips)


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
        # Find the axis of the runs: all runs have the same steps. After a scan over `vmap`, it is
        # not the first axis.
        axes = (i for i, n in enumerate(steps.shape) if n > 1 and not np.ptp(steps, i).any())
        one_run = f"jax.tree.map(lambda x: x[{':, ' * next(axes, 0)}i], state)"
        hint = f"Read run i with `monitors[i].read({one_run})`."
        raise value_error("state", "the rows of one run", "the rows of several runs", hint)
    floats = np.ascontiguousarray(written[:, NUM_INTS:]).view(np.float32).astype(np.float64)
    sizes = 1, 2, 4 * (1 + len(names.units)), len(names.taps) * math.prod(SHAPE)
    loss, limits, table, sums, factors = np.split(floats, np.cumsum(sizes), axis=1)
    table = np.moveaxis(table.reshape(len(table), 1 + len(names.units), 4), 1, 2)
    taps = statistics(sums.reshape(len(sums), len(names.taps), *SHAPE))
    ints = written[:, :NUM_INTS].T.astype(np.int64)
    rows = Rows._make([*ints, loss[:, 0], limits, table[:, 1:], table[:, 0], factors, taps])
    _complete(rows)
    return rows, names._replace(clips=tuple(sorted(clips)))


def _complete(rows: Rows) -> None:
    """Set values that were not measured to 0, and derive `APPLIED`, `CLIPPED` and `ACCUMULATED`."""
    rows.taps[~rows.has(Outcome.HAS_TAPS)] = 0
    rows.norms[~rows.has(Outcome.HAS_GRADIENT), 0] = 0
    rows.nonfinite[~rows.has(Outcome.HAS_GRADIENT)] = 0
    # If the step was not applied, the update is zero, even of a non-finite parameter.
    has_run, update = rows.has(Outcome.APPLIED), rows.norms[:, 1]
    update[~has_run[:, None] & ~np.isfinite(update)] = 0
    # With `optax.partition`, some parameters may change although the updates of others are skipped.
    is_applied = has_run | (update[:, 0] != 0)
    rows.outcome[is_applied] |= int(Outcome.APPLIED)
    rows.outcome[is_applied] &= ~int(Outcome.ACCUMULATED)
    rows.outcome[is_applied & np.any(rows.factors < 1, axis=1)] |= int(Outcome.CLIPPED)
    rows.outcome[~rows.has(Outcome.APPLIED | Outcome.SKIPPED)] |= int(Outcome.ACCUMULATED)
