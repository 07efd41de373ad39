"""The state of one optimizer as the state of another: changing over in the middle of a run.

Both states are walked together. Nodes of one kind are copied. The fields of a transformation of
Optax are translated to those of its counterpart here, or back. A part of this package that only one
of the two has starts anew or is dropped. All else is refused, with its path.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_choice, describe, error_message, is_traced, leaf_path, shortened
from ._rounding import RoundingState
from ._states import find_states, plain_arrays, replace_states, with_structure_of
from ._types import Scalar, Tree
from .accumulation._reduction import reductions_of_init
from .accumulation._state import AccumulationState
from .clipping._clip import ClipState
from .guarding._loss_scale import LossScaleState
from .guarding._skip_nonfinite import SkipNonfiniteState
from .guarding._skip_spikes import SkipSpikesState
from .monitoring._record import NormRecordState
from .monitoring._watch import WatchState

_NAME = "convert_state"
_LEAF = jax.tree.structure(0)
_WRAPPERS: Final[dict[type, str]] = {  # what is around another state, and where that is
    AccumulationState: "inner_opt_state",
    optax.MultiStepsState: "inner_opt_state",
    optax.ApplyIfFiniteState: "inner_state",
    LossScaleState: "inner_state",
    SkipNonfiniteState: "inner_state",
    SkipSpikesState: "inner_state",
    WatchState: "inner_state",
}
_COUNTERPARTS: Final[dict[type, type]] = {
    optax.MultiStepsState: AccumulationState,
    optax.ApplyIfFiniteState: SkipNonfiniteState,
}
_FRESH = (ClipState, NormRecordState, RoundingState, optax.EmptyState)
_HINT = (
    "Leave the rest of the chain as it was; restore a checkpoint into the `init(params)` of the "
    "transformation that wrote it before it is converted."
)


def convert_state(
    tx: optax.GradientTransformation, state: Any, params: Tree, *, reduction: str | None = None
) -> Any:
    """The state of `tx` that continues a run from the state of the optimizer it replaces.

    For a run that was started with Optax and goes on with this package, or the other way round,
    and for a run that gets a guard, an accumulation or a clip on its way, or loses one. The two
    optimizers must be alike but for the parts in this table, wherever they stand: inside `chain`,
    `named_chain`, `masked`, `partition`, `inject_hyperparams`, or one another.

    | before | after | what is carried over |
    | --- | --- | --- |
    | `MultiSteps` | `accumulate_gradients` | the open window, the counts, the inner state |
    | `apply_if_finite` | `skip_nonfinite` | the counts of skips, the inner state |
    | a clip of Optax | a clip | nothing: Optax's have no state. Rules and schedules start anew |
    | nothing | a guard, an accumulation, a `watch` | it starts anew around what is there |
    | an accumulator | one of another dtype | the open window, rounded to nearest |
    | nothing | a clip, `record_norms` | it starts anew, and so do the others in its chain |
    | nothing | `round_stochastically` | the same |

    Each row may be read backwards. A window that would be lost is refused while it is open.

    Args:
        tx: the optimizer that goes on: a transformation, or an `optax.MultiSteps`.
        state: the state of the optimizer it replaces; that of an `nnx.Optimizer` as it is.
        params: the parameters.
        reduction: "mean" or "sum": whether the accumulation of the two optimizers averages. None
            asks `tx`, for an `optax.MultiSteps` by one call of its `update`.

    Returns:
        A state for `tx.update`. `accumulation_stats` counts past micro-batches as if all windows
        had been as long as the first; a `skip_state` of `MultiSteps` starts anew.

    Raises:
        TypeError: a part of `state` has no counterpart in that of `tx`, or other shapes or
            dtypes; the message names its path.
        ValueError: an open window has weights other than 1 and goes to `MultiSteps`, which has
            none, or goes to an optimizer that has no room for it; `reduction` is another word,
            or is not that of `tx`.

    Examples:
        >>> import jax.numpy as jnp, optax, gradclip_jax as gcx
        >>> params = jnp.array([0.0])
        >>> old = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
        >>> _, state = old.update(jnp.array([2.0]), old.init(params), params)
        >>> new = gcx.accumulate_gradients(optax.sgd(1.0), every=2)
        >>> state = gcx.convert_state(new, state, params)
        >>> updates, state = new.update(jnp.array([6.0]), state, params)
        >>> updates.tolist()
        [-4.0]
    """
    if not callable(getattr(tx, "init", None)):
        rule, hint = "an optimizer", "Pass an Optax transformation, or an `optax.MultiSteps`."
        raise TypeError(error_message(_NAME, "tx", rule, shortened(tx), hint))
    check_choice(_NAME, "reduction", reduction, (None, "mean", "sum"))
    with reductions_of_init() as reductions:
        like = tx.init(params)
    if reduction is None:
        averages = _averages(tx, like, params, reductions)
    elif any(own in ("mean", "sum") and own != reduction for own in reductions):
        rule = f"that of `tx`, {reductions[0]!r}"
        raise ValueError(
            error_message(_NAME, "reduction", rule, repr(reduction), "Leave it out: `tx` is asked.")
        )
    else:
        averages = reduction == "mean"
    arrays = plain_arrays(like), plain_arrays(state)
    return with_structure_of(like, _Conversion(averages).translated(*arrays, ()))


def _averages(tx: Any, like: Any, params: Tree, reductions: list[Any]) -> Any:
    """Whether the accumulation of `tx` averages: bool, bool[] inside jit, or None if unknown."""
    if reductions:
        first = reductions[0]
        is_known = first in ("mean", "sum") and all(other == first for other in reductions)
        return first == "mean" if is_known else None
    if not find_states(like, optax.MultiStepsState):
        return None

    def with_large_sum(state: Any) -> Any:
        return state._replace(acc_grads=jax.tree.map(lambda x: x + 2.0**15, state.acc_grads))

    # No field of `MultiSteps` says it, but its mean of one gradient forgets what it held before.
    state = replace_states(like, optax.MultiStepsState, with_large_sum)
    _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    windows = [window.acc_grads for _, window in find_states(state, optax.MultiStepsState)]
    sums = [jnp.any(jnp.real(x) > 2.0**14) for x in jax.tree.leaves(windows)]
    return ~jnp.stack(sums).any() if sums else True


@dataclasses.dataclass(frozen=True)
class _Conversion:
    averages: Any  # whether the accumulations do: bool, bool[], or None if that is not known
    factor: Any = None  # what the leaves of an accumulator are multiplied by

    def translated(self, like: Any, given: Any, path: Any) -> Any:
        """What `given` says, in the structure of `like`, a fresh state."""
        if type(like) is type(given) and "incidents" in getattr(like, "_fields", ()):
            logs = like.incidents, given.incidents
            if jax.tree.structure(logs[0]) != jax.tree.structure(logs[1]) or not _is_shaped_as(
                *logs
            ):
                given = given._replace(incidents=like.incidents)  # one starts anew, or is dropped
        match like, given:
            case AccumulationState(), optax.MultiStepsState():
                return self._to_window(like, given, path)
            case optax.MultiStepsState(), AccumulationState():
                return self._to_multi_steps(like, given, path)
            case AccumulationState(), AccumulationState():
                if not _has_sum(like) and _has_sum(given):
                    _check_closed(given, path)
                is_alike = _has_sum(like) == _has_sum(given)
                acc = _in_dtypes(like, given) if is_alike else like.acc_grads
                return self._alike(like, given._replace(acc_grads=acc), path)
            case SkipNonfiniteState(), optax.ApplyIfFiniteState():
                return like._replace(
                    skipped_nonfinite=_count(given.total_notfinite),
                    consecutive_skips=_count(given.notfinite_count),
                    inner_state=self._field("inner_state", like, given, path),
                )
            case optax.ApplyIfFiniteState(), SkipNonfiniteState():
                return optax.ApplyIfFiniteState(
                    notfinite_count=_count(given.consecutive_skips),
                    last_finite=jnp.asarray(given.consecutive_skips) == 0,
                    total_notfinite=_count(given.skipped_nonfinite),
                    inner_state=self._field("inner_state", like, given, path),
                )
            case (LossScaleState(), SkipNonfiniteState()) | (
                SkipNonfiniteState(),
                LossScaleState(),
            ):
                return like._replace(
                    skipped_nonfinite=given.skipped_nonfinite,
                    consecutive_skips=given.consecutive_skips,
                    guard_failed=given.guard_failed,
                    inner_state=self._field("inner_state", like, given, path),
                )
            case _ if _is_fresh(like) and _is_fresh(given):
                return self._alike(like, given, path) if _is_shaped_as(like, given) else like
            case _ if type(like) is type(given) is not tuple:
                return self._alike(like, given, path)
            case _ if type(like) in _WRAPPERS or type(given) in _WRAPPERS:
                return self._wrapped(like, given, path)
            case _:
                return self._in_chain(like, given, path)

    def _wrapped(self, like: Any, given: Any, path: Any) -> Any:
        """Two nodes of which one at least is a guard or an accumulation that the other is not."""
        outer, inner = _WRAPPERS.get(type(like)), _WRAPPERS.get(type(given))
        in_like, in_given = _occurs(given, like), _occurs(like, given)
        if outer and (not in_given or (inner and in_like)):
            return like._replace(**{outer: self.translated(getattr(like, outer), given, path)})
        if inner and not in_like:
            _check_closed(given, path)
            place = (*path, jax.tree_util.GetAttrKey(inner))
            return self.translated(like, getattr(given, inner), place)
        return self._in_chain(like, given, path)

    def _in_chain(self, like: Any, given: Any, path: Any) -> Any:
        """Chains, of which one may have clips that the other has not, or a chain and its part."""
        parts, others = _lasting(like), _lasting(given)
        chain, other_chain = type(like) is tuple, type(given) is tuple
        is_both = chain and other_chain and len(parts) == len(others)
        if is_both and (len(parts) != 1 or _may_match(like[parts[0]], given[others[0]])):
            pairs = list(zip(parts, others, strict=True))
            fresh, other_fresh = (
                [i for i, x in enumerate(node) if isinstance(x, _FRESH)] for node in (like, given)
            )
            if len(fresh) == len(other_fresh):
                pairs += zip(fresh, other_fresh, strict=True)
        elif chain and len(parts) == 1 and _may_match(like[parts[0]], given):
            return _with(like, {parts[0]: self.translated(like[parts[0]], given, path)})
        elif other_chain and len(others) == 1 and _may_match(like, given[others[0]]):
            (i,) = others
            return self.translated(like, given[i], (*path, jax.tree_util.SequenceKey(i)))
        else:
            return self._alike(like, given, path)
        key = jax.tree_util.SequenceKey
        return _with(
            like, {i: self.translated(like[i], given[j], (*path, key(j))) for i, j in pairs}
        )

    def _alike(self, like: Any, given: Any, path: Any) -> Any:
        """Nodes of one kind, child by child."""
        if isinstance(like, dict) and isinstance(given, dict):
            given = _by_name(like, given)
        children, structure = _children(like)
        others, other_structure = _children(given)
        if structure != other_structure:
            raise TypeError(_mismatch(_kind(like), _kind(given), path))
        if structure == _LEAF:
            return self._leaf(like, given, path)
        pairs = zip(children, others, strict=True)
        converted = [self.translated(x, y, (*path, *key)) for (key, x), (_, y) in pairs]
        return jax.tree.unflatten(structure, converted)

    def _field(self, name: str, like: Any, given: Any, path: Any) -> Any:
        key = jax.tree_util.GetAttrKey(name)
        return self.translated(getattr(like, name), getattr(given, name), (*path, key))

    def _to_window(self, like: AccumulationState, given: Any, path: Any) -> AccumulationState:
        held, steps = _count(given.mini_step), _count(given.gradient_step)
        count = self._where_averaged(held, jnp.minimum(held, 1), path)
        return like._replace(
            mini_step=held,
            gradient_step=steps,
            inner_opt_state=self._field("inner_opt_state", like, given, path),
            acc_grads=self._accumulators(like, given, count.astype(jnp.float32), path),
            total_weight=held.astype(jnp.float32),
            micro_batch_count=steps * like.accumulation_steps + held,
            emitted=((held == 0) & (steps > 0)).astype(jnp.int32),
        )

    def _to_multi_steps(self, like: Any, given: AccumulationState, path: Any) -> Any:
        held, weight = _count(given.mini_step), given.total_weight
        if _is_open(given) and not is_traced(weight) and weight != held:
            place = leaf_path("state", path) + ".total_weight"
            rule, hint = "a window of weights 1", "`flush` the window first."
            got = f"a weight of {float(weight):g} in {int(held)} micro-batches at {place}"
            raise ValueError(error_message(_NAME, "state", rule, got, hint))
        # Zero for an empty window: ours still holds the sum of the last one, Optax adds to it.
        factor = (held > 0) / jnp.float32(self._where_averaged(jnp.maximum(held, 1), 1, path))
        return like._replace(
            mini_step=held,
            gradient_step=_count(given.gradient_step),
            inner_opt_state=self._field("inner_opt_state", like, given, path),
            acc_grads=self._accumulators(like, given, factor, path),
        )

    def _where_averaged(self, mean: Any, total: Any, path: Any) -> Any:
        if self.averages is None:
            rule = 'given, "mean" or "sum", where `tx` does not say it of all its leaves'
            hint = f"A window at {leaf_path('state', path)} is one or the other."
            raise ValueError(error_message(_NAME, "reduction", rule, "None", hint))
        return jnp.where(self.averages, mean, total)

    def _accumulators(self, like: Any, given: Any, factor: Any, path: Any) -> Tree:
        """The accumulators of `given` times a factor, in the dtypes of those of `like`."""
        if _has_sum(like) and _has_sum(given):
            conversion = dataclasses.replace(self, factor=factor)
            return conversion._field("acc_grads", like, given, path)
        if not _has_sum(like):
            _check_closed(given, path)
        return like.acc_grads

    def _leaf(self, like: Any, given: Any, path: Any) -> Any:
        is_sum = self.factor is not None  # the two may accumulate in different dtypes
        same_dtype = is_sum or jnp.result_type(like) == jnp.result_type(given)
        if np.shape(like) != np.shape(given) or not same_dtype:
            raise TypeError(_mismatch(describe(like), describe(given), path))
        if not is_sum:
            return given if isinstance(given, jax.Array) else jnp.asarray(given)
        # Selected, not multiplied: an empty window may hold anything.
        total = jnp.where(self.factor > 0, given * self.factor, jnp.zeros_like(given))
        return total.astype(jnp.result_type(like))


def _is_fresh(node: Any) -> bool:
    """Whether a state may start anew, or be left behind: that of clips, records, or nothing."""
    parts = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, _FRESH))
    return bool(parts) and all(isinstance(x, _FRESH) for x in parts)


def _lasting(node: Any) -> list[int]:
    """The places in a chain of what has to have a counterpart."""
    return [i for i, x in enumerate(node) if not _is_fresh(x)] if type(node) is tuple else []


def _with(chain: tuple[Any, ...], parts: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(parts.get(i, x) for i, x in enumerate(chain))


def _by_name(like: dict[Any, Any], given: dict[Any, Any]) -> dict[Any, Any]:
    """The states of `given`; where only one of the two has a name, what may start anew does."""
    differing = like.keys() ^ given.keys()
    if not differing or not all(_is_fresh({**like, **given}[key]) for key in differing):
        return given
    merged = like.copy()  # in its order
    merged.update({key: given[key] for key in like.keys() & given.keys()})
    return merged


def _may_match(like: Any, given: Any) -> bool:
    return bool({type(like), type(given)} & _WRAPPERS.keys()) or type(like) is type(given)


def _occurs(state: Any, within: Any) -> bool:
    """Whether a guard or accumulation of this kind, or its counterpart, is inside another state."""

    def kind(node: Any) -> type:
        return _COUNTERPARTS.get(type(node), type(node))

    inside = find_states(within, tuple(_WRAPPERS))
    return any(kind(x) is kind(state) for _, x in inside if x is not within)


def _is_shaped_as(like: Any, given: Any) -> bool:
    def shapes(tree: Any) -> Any:
        tree = replace_states(tree, ClipState, lambda clip: clip._replace(incidents=None))
        return jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), tree)

    return shapes(like) == shapes(given)


def _in_dtypes(like: AccumulationState, given: AccumulationState) -> Tree:
    """The accumulator of `given` in the dtypes of that of `like`, where both are one tree."""

    def cast(x: Any, like: Any) -> Any:
        kinds = jnp.result_type(x), jnp.result_type(like)
        is_real = all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)
        return jnp.asarray(x).astype(kinds[1]) if is_real else x

    if jax.tree.structure(like.acc_grads) != jax.tree.structure(given.acc_grads):
        return given.acc_grads
    return jax.tree.map(cast, given.acc_grads, like.acc_grads)


def _has_sum(window: Any) -> bool:
    """Whether a window has an accumulator: with `every=1` it has none."""
    return not (isinstance(window.acc_grads, tuple) and window.acc_grads == ())


def _is_open(window: Any) -> bool:
    """Whether micro-batches wait in a window, as far as that is known."""
    return not is_traced(window.mini_step) and bool(window.mini_step > 0)


def _check_closed(given: Any, path: Any) -> None:
    """Refuses to leave an open window behind."""
    if isinstance(given, (AccumulationState, optax.MultiStepsState)) and _is_open(given):
        place = leaf_path("state", path) + ".mini_step"
        rule = "between two windows where `tx` has no room for one"
        got = f"{int(_count(given.mini_step))} held micro-batches at {place}"
        hint = "`flush` the window first, or convert after the next step."
        raise ValueError(error_message(_NAME, "state", rule, got, hint))


def _children(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _count(value: Any) -> Scalar:
    return jnp.asarray(value, jnp.int32)


def _kind(node: Any) -> str:
    if isinstance(node, dict):
        return f"a dict with the keys {', '.join(map(repr, sorted(node, key=str)))}"
    if type(node) in (tuple, list):
        return f"a {type(node).__name__} of {len(node)}"
    return describe(node) if hasattr(node, "dtype") else type(node).__name__


def _mismatch(expected: str, got: str, path: Any) -> str:
    rule = "a state that maps on that of `tx`"
    place = leaf_path("state", path)
    return error_message(_NAME, "state", rule, f"{got} where `tx` has {expected} at {place}", _HINT)
