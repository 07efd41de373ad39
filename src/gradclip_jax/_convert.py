"""The state of one optimizer as the state of another: changing over in the middle of a run.

Both states are walked together. Where they are of one kind, the value is taken over; where a
transformation of Optax stands for one of this package, or the other way round, its fields are
translated; everything else is refused, with its path.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._checks import check_choice, describe, error_message, is_traced, leaf_path
from ._types import Scalar, Tree
from .accumulation._state import AccumulationState
from .clipping._clip import ClipState
from .guarding._scale_loss import LossScaleState
from .guarding._skip_nonfinite import SkipNonfiniteState
from .guarding._skip_spikes import SkipSpikesState

_NAME = "convert_state"
_LEAF = jax.tree.structure(0)
_GUARDS = (LossScaleState, SkipNonfiniteState, SkipSpikesState)
_HINT = (
    "Leave the rest of the chain as it was; restore a checkpoint into the `init(params)` of the "
    "transformation that wrote it before it is converted."
)


def convert_state(
    tx: optax.GradientTransformation, state: Any, params: Tree, *, reduction: str = "mean"
) -> Any:
    """The state of `tx` that continues a run from the state of the optimizer it replaces.

    For a run that was started with Optax and goes on with this package, or the other way round.
    The two optimizers must be alike but for the parts in this table, wherever they stand: inside
    `chain`, `named_chain`, `masked`, `partition`, `inject_hyperparams`, or one another.

    | Optax | here | what is carried over |
    | --- | --- | --- |
    | `MultiSteps` | `accumulate_gradients` | the open window, the counts, the inner state |
    | `apply_if_finite` | `skip_nonfinite` | the counts of skips, the inner state |
    | a clip | a clip | nothing: Optax's have no state. Rules and schedules of ours start anew |
    | nothing | a guard | nothing: the guard starts anew around what is there |

    Under `jax.jit` nothing is allocated that is thrown away again.

    Args:
        tx: the optimizer that goes on: a transformation, or an `optax.MultiSteps`.
        state: the state of the optimizer it replaces.
        params: the parameters.
        reduction: "mean" or "sum", as in `accumulate_gradients`; "sum" is `use_grad_mean=False`.

    Returns:
        A state for `tx.update`. `accumulation_stats` counts past micro-batches as if all windows
        had been as long as the first; a `skip_state` of `MultiSteps` starts anew.

    Raises:
        TypeError: a part of `state` has no counterpart in that of `tx`, or other shapes or
            dtypes; the message names its path.
        ValueError: an open window with weights other than 1 goes to `MultiSteps`, which has none;
            or `reduction` is another word.

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
        raise TypeError(error_message(_NAME, "tx", rule, repr(tx), hint))
    check_choice(_NAME, "reduction", reduction, ("mean", "sum"))
    return _Conversion(reduction == "mean").translated(tx.init(params), state, ())


@dataclasses.dataclass(frozen=True)
class _Conversion:
    mean: bool
    factor: Any = None  # what the leaves of an accumulator are multiplied by

    def translated(self, like: Any, given: Any, path: Any) -> Any:
        """What `given` says, in the structure of `like`, a fresh state."""
        match like, given:
            case (ClipState(), optax.EmptyState()) | (optax.EmptyState(), ClipState()):
                return like
            case AccumulationState(), optax.MultiStepsState():
                return self._to_window(like, given, path)
            case optax.MultiStepsState(), AccumulationState():
                return self._to_multi_steps(like, given, path)
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
            case _ if isinstance(like, _GUARDS) and type(like) is not type(given):
                return like._replace(inner_state=self.translated(like.inner_state, given, path))
            case _ if isinstance(given, _GUARDS) and type(like) is not type(given):
                inner_path = (*path, jax.tree_util.GetAttrKey("inner_state"))
                return self.translated(like, given.inner_state, inner_path)
            case _:
                return self._alike(like, given, path)

    def _alike(self, like: Any, given: Any, path: Any) -> Any:
        """Nodes of one kind, child by child."""
        children, structure = _children(like)
        others, other_structure = _children(given)
        if structure != other_structure:
            raise TypeError(_mismatch(_kind(like), _kind(given), path))
        if structure == _LEAF:
            return self._leaf(like, given, path)
        pairs = zip(children, others, strict=True)
        found = [self.translated(x, y, (*path, *key)) for (key, x), (_, y) in pairs]
        return jax.tree.unflatten(structure, found)

    def _field(self, name: str, like: Any, given: Any, path: Any) -> Any:
        key = jax.tree_util.GetAttrKey(name)
        return self.translated(getattr(like, name), getattr(given, name), (*path, key))

    def _to_window(self, like: AccumulationState, given: Any, path: Any) -> AccumulationState:
        held, steps = _count(given.mini_step), _count(given.gradient_step)
        factor = held if self.mean else jnp.minimum(held, 1)
        return like._replace(
            mini_step=held,
            gradient_step=steps,
            inner_opt_state=self._field("inner_opt_state", like, given, path),
            acc_grads=self._accumulators(like, given, factor.astype(jnp.float32), path),
            total_weight=held.astype(jnp.float32),
            micro_batch_count=steps * like.accumulation_steps + held,
            emitted=(held == 0) & (steps > 0),
        )

    def _to_multi_steps(self, like: Any, given: AccumulationState, path: Any) -> Any:
        held, weight = _count(given.mini_step), given.total_weight
        if not is_traced(held) and not is_traced(weight) and held > 0 and weight != held:
            place = leaf_path("state", path) + ".total_weight"
            rule, hint = "a window of weights 1", "`flush` the window first."
            got = f"a weight of {float(weight):g} in {int(held)} micro-batches at {place}"
            raise ValueError(error_message(_NAME, "state", rule, got, hint))
        # Zero for an empty window: ours still holds the sum of the last one, Optax adds to it.
        count = jnp.maximum(held, 1) if self.mean else 1
        factor = (held > 0) / jnp.float32(count)
        return like._replace(
            mini_step=held,
            gradient_step=_count(given.gradient_step),
            inner_opt_state=self._field("inner_opt_state", like, given, path),
            acc_grads=self._accumulators(like, given, factor, path),
        )

    def _accumulators(self, like: Any, given: Any, factor: Any, path: Any) -> Tree:
        """The accumulators of `given` times a factor, in the dtypes of those of `like`."""
        return dataclasses.replace(self, factor=factor)._field("acc_grads", like, given, path)

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
