"""The columns of a packed row: the measurements of one call of `watch`, written on the device.

| type | contents |
| --- | --- |
| `RowValues` | the numbers of one call, as arrays on the device |
| `PackedRows` | the same numbers of many calls in one array of integers, in the state of `watch` |
| `Field` | the columns of one of these numbers; see `layout` |
| `Names` | the names of units, clips and taps, which determine the number of columns |

On the host, `host._rows` converts `PackedRows` to `Rows`.
"""

import enum
import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._types import Array, Scalar, Tree
from ..norms._granularity import group_names
from ..norms._mask import Mask, check_mask, mask_leaves
from ..wrappers._state import CallOutcome
from ._taps import SHAPE, tap_names


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

    A call that skips a micro-batch has the flags `SKIPPED` and `ACCUMULATED` if other micro-batches
    wait in an open window, and `SKIPPED` and `APPLIED` if the call closes the window.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> tx = gcx.watch(gcx.skip_nonfinite(optax.sgd(0.1)))
        >>> params = {"w": jnp.ones(2)}
        >>> _, state = jax.jit(tx.update)({"w": jnp.array([jnp.nan, 1.0])}, tx.init(params), params)
        >>> rows = gcx.Monitor(params).read(state).rows
        >>> rows.has(gcx.diagnostics.Outcome.SKIPPED).tolist()
        [True]
    """

    # The bits 0x80, 0x100, 0x1000, and 0x200000 and above are free.
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
        """The checksum of unit and tap names that the state of `watch` contains.

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


class RowValues(NamedTuple):
    """The numbers of one row on the device, in the order of the columns of a packed row.

    Attributes:
        step: Number of calls before this one, int32[].
        batch_id: int32[].
        outcome: Flags of `Outcome`, int32[].
        device: Index of the device whose parameters differ from others, int32[].
        loss: float32[].
        norm_limit: Smallest gradient-norm threshold of the guards, float32[].
        loss_limit: Smallest loss threshold of the guards, float32[].
        norms: Four numbers for the whole tree and for each unit, float32[1 + units, 4]; see
            `norm_table`.
        taps: Sums of the taps, float32[taps, 2, 4].
        clip_factors: Smallest factor of each clip, float32[].
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
        ints = jnp.array(self[: len(INTEGERS)], jnp.int32)
        floats = jax.tree.leaves(self[len(INTEGERS) :])
        numbers = jnp.concatenate([jnp.ravel(jnp.asarray(x, jnp.float32)) for x in floats])
        return jnp.concatenate([ints, lax.bitcast_convert_type(numbers, jnp.int32)])


INTEGERS = RowValues._fields[: RowValues._fields.index("loss")]
"""The fields of `RowValues` that are integers; the others are float32."""


class Field(NamedTuple):
    """The place of a field of `RowValues` in a packed row.

    Attributes:
        columns: Columns of the packed row that contain the field.
        shape: Shape of the field.
    """

    columns: slice
    shape: tuple[int, ...]


def layout(names: Names) -> dict[str, Field]:
    """Return the place of each field of `RowValues` in a packed row."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(RowValues._fields, ())
    shapes["norms"] = 1 + len(names.units), len(MEASURES)
    shapes["taps"] = len(names.taps), *SHAPE
    shapes["clip_factors"] = (len(names.clips),)
    stops = itertools.accumulate(map(math.prod, shapes.values()))
    fields = zip(shapes.items(), stops, strict=True)
    return {
        name: Field(slice(stop - math.prod(shape), stop), shape) for (name, shape), stop in fields
    }


def num_columns(names: Names) -> int:
    """Return the number of columns of a packed row."""
    return sum(math.prod(field.shape) for field in layout(names).values())


class PackedRows(NamedTuple):
    """Rows of `watch`, in its state or as an output of `lax.scan`; see `last_row`.

    Attributes:
        values: int32[..., columns], rows that `RowValues.packed` returned.
        clips: Dictionary that maps each name in `Names.clips` to None.
        checksum: uint32[], `Names.checksum`, which a monitor compares with its own.
    """

    values: Array
    clips: dict[str, None]
    checksum: Scalar
