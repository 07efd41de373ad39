"""Guards and an accumulation around a transformation, in their order of nesting."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from .._errors import named, type_error
from .._metrics import metric_names
from .._run_if import like_dtypes
from .._states import check_state, find_states
from .._types import Tree
from ._accumulation import Accumulation
from ._guard import Guard, params_of
from ._skips import IndexedGuard
from ._state import GuardState, WrapperState


class Wrappers(NamedTuple):
    """Guards and at most one accumulation that wrap a transformation.

    Attributes:
        name: Name of the public function that created the outermost wrapper, for error messages.
        inner: The transformation that the guards and the accumulation wrap.
        outer_guards: Guards around the accumulation, from the outermost to the innermost.
        accumulation: The accumulation, or None.
        inner_guards: Guards inside the accumulation; all guards if there is no accumulation.
    """

    name: str
    inner: optax.GradientTransformationExtraArgs
    outer_guards: tuple[Guard, ...] = ()
    accumulation: Accumulation | None = None
    inner_guards: tuple[Guard, ...] = ()

    @property
    def all_guards(self) -> tuple[Guard, ...]:
        """All guards, from the outermost to the innermost."""
        return self.outer_guards + self.inner_guards

    def with_outer(self, wrapper: Guard | Accumulation) -> Wrappers:
        """Return the wrappers with one more guard or accumulation around them."""
        named_wrappers = self._replace(name=wrapper.name)
        if not isinstance(wrapper, Guard):
            if self.accumulation is not None:
                _raise_nested_accumulations()
            return named_wrappers._replace(accumulation=wrapper)
        if self.accumulation is not None:
            return named_wrappers._replace(outer_guards=(wrapper, *self.outer_guards))
        return named_wrappers._replace(inner_guards=(wrapper, *self.inner_guards))

    def indexed_guards(self, state: WrapperState) -> tuple[list[IndexedGuard], list[IndexedGuard]]:
        """Return the outer and the inner guards, each with its position and its state."""
        states = state.outer_guards + state.inner_guards
        guards = list(map(IndexedGuard, itertools.count(), self.all_guards, states))
        num_outer = len(self.outer_guards)
        return guards[:num_outer], guards[num_outer:]

    def init(self, params: Tree) -> WrapperState:
        """Return the initial state."""
        with named(self.name):
            inner_state = self.inner.init(params)
            outer = tuple(_init_guard(guard, params) for guard in self.outer_guards)
            guards = tuple(_init_guard(guard, params) for guard in self.inner_guards)
            self._check_nesting((*outer, *guards), inner_state)
            return WrapperState(
                consecutive_skips=jnp.zeros((), jnp.int32),
                guard_failed=jnp.zeros((), jnp.int32),
                outer_guards=outer,
                accumulation=self.accumulation and self.accumulation.init(params),
                inner_guards=guards,
                # `update` returns no weak types, so weak types here would cause a second trace.
                inner_state=like_dtypes(inner_state, inner_state),
                outcome=jnp.zeros((), jnp.int32),
                grad_norm=jnp.zeros((), jnp.float32) if outer or guards else None,
            )

    def check_state(self, state: Any) -> None:
        """Raise if a state does not belong to these wrappers."""
        check_state(state, WrapperState, "consecutive_skips")
        states = state.outer_guards + state.inner_guards
        found = [tuple(sorted(guard.skipped)) for guard in states]
        expected = [tuple(sorted(guard.causes)) for guard in self.all_guards]
        if (len(state.outer_guards), found) != (len(self.outer_guards), expected) or (
            (state.accumulation is None) != (self.accumulation is None)
        ):
            number = "no" if state.accumulation is None else "an"
            got = f"one with {number} accumulation, and guards that count {found}"
            hint = "Convert it with `gcx.convert_state(tx, state, params)`."
            raise type_error("state", "the state of this transformation", got, hint)

    def _check_nesting(self, guards: tuple[GuardState, ...], inner_state: Tree) -> None:
        """Raise an error if a guard wraps a loss scale or a chain with an accumulation."""
        names = metric_names(inner_state)
        has_inner_scale = any(hasattr(guard.rule_state, "loss_scale") for guard in guards[1:])
        if has_inner_scale or (guards and "loss_scale" in names):
            # If an outer guard skipped steps that overflow, the loss scale would never decrease.
            rule = "a transformation without `dynamic_loss_scale`"
            hint = (
                "Use `dynamic_loss_scale` outside this guard, so that it checks unscaled gradients."
            )
            raise type_error("inner", rule, "one that contains it", hint)
        has_accumulation = "mini_step" in names
        if self.accumulation is not None and (
            has_accumulation or find_states(inner_state, optax.MultiStepsState)
        ):
            _raise_nested_accumulations()
        if has_accumulation:
            # The guard would only check micro-batches, and never the gradient of a window.
            rule = "a transformation without an accumulation inside a chain or another wrapper"
            hint = (
                "Place the guard directly around the accumulation, as in `optax.chain(clip, "
                "skip_nonfinite(accumulate_gradients(optimizer, 4)))`, and `watch` outside."
            )
            raise type_error("inner", rule, "one that contains an accumulation", hint)


def _init_guard(guard: Guard, params: Tree) -> GuardState:
    """Return the initial state of a guard, in which each array has its own buffer."""
    counts = {cause: jnp.zeros((), jnp.int32) for cause in guard.causes}
    return GuardState(counts, jax.tree.map(jnp.array, guard.init(params_of(params))))


def _raise_nested_accumulations() -> NoReturn:
    """Raise an error for an accumulation inside an accumulation."""
    rule = "a transformation that contains no accumulation"
    hint = "Use one accumulation with `every=a * b` instead of two."
    raise type_error("inner", rule, "one that contains an accumulation", hint)
