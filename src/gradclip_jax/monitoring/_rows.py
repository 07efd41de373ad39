"""The measurements of consecutive steps: on the device, on the host, and in a log.

| type | place |
| --- | --- |
| `Row` | the integers that `watch` writes on the device, one for each number of a step |
| `Rows` | NumPy arrays on the host, with the names of their columns in `Names` |
| `Line` | a dictionary for one step, in a log |

`read_stack` converts a `Row` to `Rows`, `to_lines` converts `Rows` to lines, and `to_rows` lines to
`Rows`.
"""

import bisect
import functools
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from .._checks import is_traced
from .._errors import type_error, value_error
from .._types import Array, HostArray, Scalar, Tree
from ..norms._granularity import group_names
from ..norms._mask import Mask, check_mask, mask_leaves
from ..wrappers._state import Outcome
from ._taps import SHAPE, STATISTICS, statistics, tap_names

NUM_INTS, TREE = 4, 7
"""Number of integers in a row of `watch`, and index of the numbers of the whole tree; see `Row`."""


MEASURED = {x: Outcome[f"HAS_{x.upper()}"] for x in ("gradient", "update", "parameter")}
"""The trees whose norms are in `Rows.norms`, and the flags of rows that have them."""

MEASURES = "nonfinite_elements", *(f"{name}_norm" for name in MEASURED)
"""The keys of the four numbers for the tree and for each unit, in the order in which `watch` writes
them."""

WORDS = {str(x.name).lower(): int(x) for x in Outcome if not str(x.name).startswith("HAS_")}
"""The words of the key `outcome`."""

_ROW = {"loss", "gradient_norm", "outcome", "rewind_to"}
"""A line with one of these keys is a row, or marks a rewind."""

_LATE = 8
"""Maximum number of rows by which a line may be late in a log that is not in order."""

_MAX_STEP = 2.0**53
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")

Line: TypeAlias = Mapping[str, Any]
"""A line of a log, with the keys that docs/rows.md describes."""


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
        """A number that differs for other units and taps; `watch` keeps it in its state.

        The number 1 is the version of the layout of a row.
        """
        return zlib.crc32(repr((1, self.units, self.taps)).encode())


def names_of(params: Tree, granularity: Any = "leaf", mask: Mask = None, taps: Any = None) -> Names:
    """Return the names of the units and taps that `watch` measures."""
    check_mask(mask)
    units = group_names(granularity, mask_leaves(mask, params, params))
    return Names(units=tuple(units), taps=tuple(tap_names("taps", taps)))


class Rows(NamedTuple):
    """Measurements of consecutive steps as NumPy arrays, oldest first; see docs/rows.md.

    Values that were not measured are 0; the flags in `outcome` say which were.

    Attributes:
        step: int64[steps], index of the call of `watch`.
        batch_id: int64[steps].
        outcome: int64[steps], flags of `Outcome`.
        device: int64[steps], index of the device whose parameters differ.
        loss: float64[steps].
        limits: float64[steps, 2], smallest thresholds of guards for the gradient norm and the loss;
            0 without such a guard, and in rows of a log.
        norms: float64[steps, 3, 1 + units], norms of gradient, update and parameters; of the whole
            tree, then of each unit.
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

    def take(self, index: Any) -> "Rows":
        """Return the rows that a slice, a mask or an array of indices selects."""
        return Rows(*(column[index] for column in self))


class Row(NamedTuple):
    """Rows of `watch`, in its state or as an output of `lax.scan`; see `last_row`.

    Attributes:
        values: int32[..., columns]: step, batch id, outcome, the device that differs, and the bits
            of float32 numbers: the loss, two limits, 4 numbers for the tree and for each unit (its
            non-finite elements, norms of gradient, update and parameters), the sums of the taps,
            and the smallest factor of each clip.
        clips: Dictionary whose keys are `Names.clips`, and whose values are None.
        checksum: uint32[], `Names.checksum`, by which a monitor recognizes other parameters.
    """

    values: Array
    clips: dict[str, None]
    checksum: Scalar


def read_stack(row: Row, names: Names) -> tuple[Rows, Names]:
    """Convert the rows that `watch` wrote to `Rows`, and add the names of clips.

    Raises:
        TypeError: If called inside jit.
        ValueError: If the rows belong to other parameters, or to several runs, as with `vmap` over
            seeds.
    """
    if any(map(is_traced, jax.tree.leaves(row))):
        hint = "Return the state from `jit`, and read it on the host."
        raise type_error("state", "read outside `jit`", "a traced array", hint)
    values, clips, checksum = jax.device_get(row)
    if np.any(np.asarray(checksum) != names.checksum):
        rule = f"the state of `watch` for parameters with {len(names.units)} units"
        hint = "Pass the parameters, and `granularity`, `trainable` and `taps` as to `watch`."
        raise value_error("state", rule, "a state for other names", hint)
    # A state has a checksum for all rows, and an output of `lax.scan` one for each row.
    num_runs = np.size(checksum) if values.ndim == np.ndim(checksum) + 2 else 1
    values = values.reshape(-1, values.shape[-1])  # of nested scans
    # Other rows were never written. `unique` sorts the rows by step; `last_row` repeats a row while
    # an accumulation around `watch` is open.
    written = np.unique(values[values[:, 2] != 0], axis=0)
    if num_runs > 1 or np.any(np.diff(written[:, 0]) == 0):
        hint = "Read run i with `monitors[i].read(jax.tree.map(lambda x: x[i], state))`."
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
    # An update of zero does not change a non-finite parameter.
    has_run, update = rows.has(Outcome.APPLIED), rows.norms[:, 1]
    update[~has_run[:, None] & ~np.isfinite(update)] = 0
    # With `optax.partition`, some parameters may change although others are not applied.
    is_applied = has_run | (update[:, 0] != 0)
    rows.outcome[is_applied] |= int(Outcome.APPLIED)
    rows.outcome[is_applied] &= ~int(Outcome.ACCUMULATED)
    rows.outcome[is_applied & np.any(rows.factors < 1, axis=1)] |= int(Outcome.CLIPPED)
    rows.outcome[~rows.has(Outcome.APPLIED | Outcome.SKIPPED)] |= int(Outcome.ACCUMULATED)


def to_rows(lines: Iterable[Line], names: Names | None = None) -> tuple[Rows, Names, str]:
    """Convert lines to rows without taps, with the units of `names`, or with all if it is None.

    Returns:
        The rows, their names, and a sentence about the lines that are not in the rows, or "".
    """
    table, remark = _join_steps(lines)
    # The lines in which a key occurs, and its values there.
    places, values = defaultdict[str, list[int]](list), defaultdict[str, list[Any]](list)
    for i, line in enumerate(table.values()):
        for key, value in line.items():
            places[key].append(i)
            values[key].append(value)
    patterns = "gradient_norm/(.*)", "(clip_factor.*)"
    units, clips = (tuple(y[1] for x in places if (y := re.fullmatch(p, x))) for p in patterns)
    names = names._replace(clips=clips) if names else Names(units, clips)
    rows = Rows.zeros(len(table), names)
    rows.step[:], rows.factors[:] = list(table), 1  # a clip that is not in a line has not clipped
    rows.outcome[:] = int(Outcome.APPLIED)
    bits_of = functools.cache(_outcome_bits)
    rows.outcome[places["outcome"]] = [bits_of(str(text)) for text in values["outcome"]]
    for key, column, flags in _columns(rows, names):
        if key in places and key != "step":
            numbers = list(map(_number, values[key]))
            is_known = np.array([x is not None for x in numbers])
            at = np.array(places[key])[is_known]
            column[at] = [x for x in numbers if x is not None]
            rows.outcome[at] |= int(flags)
    return rows, names, remark


def units_in(lines: Iterable[Line]) -> set[str]:
    """Return the names of the units whose gradient norms are in a log."""
    start = "gradient_norm/"
    return {key.removeprefix(start) for x in lines for key in x if key.startswith(start)}


def to_lines(rows: Rows, names: Names, with_units: HostArray) -> list[dict[str, Any]]:
    """Convert rows to the lines of a log; those of `with_units` include units."""
    columns = [(key, column.tolist(), int(x)) for key, column, x in _columns(rows, names)]
    outcome = np.where(with_units, rows.outcome, rows.outcome & ~int(Outcome.HAS_UNITS)).tolist()
    return [
        {key: column[i] for key, column, flags in columns if flags & bits == flags}
        | {"outcome": " ".join(word for word, flag in WORDS.items() if flag & bits)}
        for i, bits in enumerate(outcome)
    ]


def _columns(rows: Rows, names: Names) -> Iterator[tuple[str, HostArray, Outcome]]:
    """Yield the key of each number in a line, its column, and the flags of rows that have it."""
    yield "step", rows.step, Outcome(0)
    yield "batch_id", rows.batch_id, Outcome.HAS_BATCH_ID
    yield "device", rows.device, Outcome.REPLICA_DIFFERS
    yield "loss", rows.loss, Outcome.HAS_LOSS
    for i, clip in enumerate(names.clips):
        yield clip, rows.factors[:, i], Outcome(0)
    tables = rows.nonfinite, *np.moveaxis(rows.norms, 1, 0)
    flags = Outcome.HAS_GRADIENT, *MEASURED.values()
    for name, table, flag in zip(MEASURES, tables, flags, strict=True):
        yield name, table[:, 0], flag
        for i, unit in enumerate(names.units, 1):
            yield f"{name}/{unit}", table[:, i], flag | Outcome.HAS_UNITS


def _outcome_bits(text: str) -> int:
    """Return the flags of the key `outcome`; a text of another trainer means "applied"."""
    flags = [WORDS[word] for word in text.split() if word in WORDS]
    return sum(flags) if flags or not text else int(Outcome.APPLIED)


def _number(value: Any) -> float | None:
    """Convert a value in a log to a number; return None if it is not a number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        # A transfer guard allows `device_get`.
        is_plain = isinstance(value, (str, int, float)) or not hasattr(value, "dtype")
        return float(value if is_plain else jax.device_get(value))
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        is_text = isinstance(value, str) and _THOUSANDS.fullmatch(value.strip())
        return float(value.replace(",", "")) if is_text else None


def _join_steps(lines: Iterable[Line]) -> tuple[dict[int, Line], str]:
    """Return the line of each step, in order, and a remark on lines that are not included.

    | line | effect |
    | --- | --- |
    | without a loss, a norm and an outcome | it is not a row |
    | without a step | it has the next step |
    | the step of an earlier line, without its numbers | both lines become one |
    | the step of the last line, with the same numbers | it replaces the last line |
    | an earlier step, with the same numbers or more than `_LATE` rows back | the run was resumed: \
      it replaces all rows from this step on |
    | an earlier step that is new, at most `_LATE` rows back | it is late, and is sorted in |
    """
    table, steps, last = dict[int, Line](), list[int](), -1  # `steps` are the keys, sorted
    num_lines = num_replaced = num_resumed = num_unknown = 0
    for line in lines:
        if _ROW.isdisjoint(line):
            continue
        number = last + 1 if line.get("step") in (None, "") else _number(line["step"])
        if number is None or not abs(number) < _MAX_STEP:
            num_unknown += 1
            continue
        step, is_rewind = int(number), "rewind_to" in line
        earlier, place = table.get(step), bisect.bisect_left(steps, step)
        is_repeated = earlier is not None and not _ROW.isdisjoint(earlier.keys() & line.keys())
        is_far = earlier is None and len(steps) - place > _LATE
        if is_rewind or is_far or (is_repeated and step < last):
            for replaced in steps[place:]:
                del table[replaced]
            num_resumed, num_replaced = num_resumed + 1, num_replaced + len(steps) - place
            del steps[place:]
            earlier = None
        else:
            num_replaced += is_repeated
        if is_rewind:
            last = step - 1
            continue
        if earlier is None:
            steps.insert(place, step)
        table[step] = {**earlier, **line} if earlier else line
        last, num_lines = step, num_lines + 1
    remarks = list[str]()
    if num_replaced:
        remarks.append(f"{num_replaced:,} of {num_lines:,} rows were replaced by later rows")
    if num_resumed:
        remarks.append(f"the steps go back {num_resumed} time{'s' * (num_resumed > 1)}")
    if num_unknown:
        remarks.append(f"rows without a number as their step, which are left out: {num_unknown:,}")
    return {step: table[step] for step in steps}, "; ".join(remarks)
