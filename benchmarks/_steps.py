"""Steps that are guarded, accumulated or split, beside their alternatives and the floor."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _compare import Tree, compare, fast, start, train
from _measure import Case, fresh, tree_bytes
from _report import Rows

import gradclip_jax as gcx
from gradclip_jax._run_if import run_if


def guards(params: Tree, grads: Tree) -> Rows:
    """A good step and a bad one, guarded or not."""
    size, rows = tree_bytes(params), Rows()
    first, *others = params
    bad = {**grads, first: grads[first].at[(0,) * grads[first].ndim].set(jnp.nan)}
    adamw = optax.adamw(1e-4)
    ours, theirs = gcx.skip_nonfinite(adamw), optax.apply_if_finite(adamw, 1000)
    for kind, given in {"good step": grads, "bad step": bad}.items():
        cases = {
            "skip_nonfinite, apply_gradients": Case(fast(ours), start(ours, params), (given,)),
            "skip_nonfinite, update": Case(train(ours), start(ours, params), (given,)),
            "optax.apply_if_finite": Case(train(theirs), start(theirs, params), (given,)),
            "adamw alone": Case(train(adamw), start(adamw, params), (given,)),
        }
        rows += compare(kind, cases, unit=size)
    held = gcx.accumulate_gradients(adamw, 10**9)
    around = {
        "accumulate_gradients alone": held,
        "skip_nonfinite around it": gcx.skip_nonfinite(held),
        "skip_large_norm around it": gcx.skip_large_norm(held, 1e9),
    }
    cases = {name: Case(fast(tx), start(tx, params), (grads,)) for name, tx in around.items()}
    return rows + compare("hold step", cases, unit=size)


def accumulation(params: Tree, grads: Tree, inner: Any, label: str) -> Rows:
    """Seven hold steps and an emission; the floor is the bare addition."""
    size, k = tree_bytes(params), 8
    ours, theirs = gcx.accumulate_gradients(inner, k), optax.MultiSteps(inner, k)
    held = gcx.accumulate_gradients(inner, 10**9)
    plain = gcx.accumulate_gradients(optax.sgd(1e-4), 10**9)
    held_theirs = optax.MultiSteps(inner, 10**9)
    addition = Case(lambda a, g: jax.tree.map(jnp.add, a, g), fresh(params), (grads,))
    holds = {
        "apply_gradients": Case(fast(held), start(held, params), (grads,)),
        "update + apply_updates": Case(train(held), start(held, params), (grads,)),
        "optax.MultiSteps": Case(train(held_theirs), start(held_theirs, params), (grads,)),
        "apply_gradients, inner sgd": Case(fast(plain), start(plain, params), (grads,)),
        "floor: acc += g": addition,
    }
    windows = {
        "apply_gradients": Case(fast(ours), start(ours, params), (grads,)),
        "update + apply_updates": Case(train(ours), start(ours, params), (grads,)),
        "optax.MultiSteps": Case(train(theirs), start(theirs, params), (grads,)),
        "one inner step": Case(train(inner), start(inner, params), (grads,)),
        "floor: 8 additions": addition,
    }
    rows = compare(f"{label}, hold step", holds, unit=size)
    windows_rows = compare(f"{label}, window of {k}", windows, group=k, unit=size)
    for line in windows_rows:
        if "one inner step" in line["what"]:
            line["what"] += " x 8"
    hold, window = rows[0]["ms"], windows_rows[0]["ms"]
    emission = {"what": f"{label}, emission: window less 7 hold steps", "ms": window - 7 * hold}
    return [*rows, *windows_rows, emission]


def _select(emits: jax.Array, step: Callable[[Tree], Tree], carry: Tree) -> Tree:
    return jax.tree.map(functools.partial(jnp.where, emits), step(carry), carry)


def _cond(emits: jax.Array, step: Callable[[Tree], Tree], carry: Tree) -> Tree:
    return jax.lax.cond(emits, step, lambda carry: carry, carry)


def zero_or_one(params: Tree, grads: Tree, inner: Any) -> Rows:
    """The same accumulation with a loop of zero or one trip (ours), `lax.cond`, and a select."""
    size, k, rows = tree_bytes(params), 8, Rows()

    def micro_step(run_if: Any, every: int) -> Callable[..., Any]:
        def emit(carry: Tree) -> Tree:
            params, state, acc = carry
            updates, state = inner.update(jax.tree.map(lambda x: x / k, acc), state, params)
            return optax.apply_updates(params, updates), state, acc

        def step(carry: Any, grads: Tree) -> Any:
            count, params, state, acc = carry
            acc = jax.tree.map(lambda a, g: jnp.where(count == 0, 0, a) + g, acc, grads)
            emits = count == every - 1
            return jnp.where(emits, 0, count + 1), *run_if(emits, emit, (params, state, acc))

        return step

    def scanned(step: Callable[..., Any]) -> Callable[..., Any]:
        def window(carry: Any, grads: Tree) -> Any:
            return jax.lax.scan(lambda c, _: (step(c, grads), None), carry, None, length=k)[0]

        return window

    def begin() -> Any:
        return fresh((jnp.zeros((), jnp.int32), params, inner.init(params), params))()

    ways = {"loop": run_if, "lax.cond": _cond, "select": _select}
    plans = {
        "hold step": (1, lambda way: micro_step(way, 10**9)),
        f"window of {k} calls": (k, lambda way: micro_step(way, k)),
        f"window of {k} in one lax.scan": (1, lambda way: scanned(micro_step(way, k))),
    }
    for what, (group, make) in plans.items():
        cases = {name: Case(make(way), begin, (grads,)) for name, way in ways.items()}
        rows += compare(what, cases, group=group, unit=size)
    return rows


def micro_batches(width: int, batch: int, parts: int) -> Rows:
    """One large MLP step, split inside the step."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {f"w{i}": jax.random.normal(keys[i], (width, width)) / width**0.5 for i in range(3)}
    x = jax.random.normal(keys[3], (batch, width))

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def total(params: Tree, x: jax.Array) -> jax.Array:
        return loss(params, x) * x.shape[0] / batch

    size = tree_bytes(params)
    grads = jax.tree.map(jnp.zeros_like, params)

    def case(value_and_grad: Callable[..., Any]) -> Case:
        return Case(lambda _, p, x: value_and_grad(p, x)[1], fresh(grads), (params, x))

    cases = {
        "gcx.microbatched_value_and_grad": case(gcx.microbatched_value_and_grad(loss, parts)),
        "optax.microbatch": case(_optax_microbatch(total, batch // parts)),
        "jax.value_and_grad, whole batch": case(jax.value_and_grad(loss)),
    }
    return compare(f"{parts} parts", cases, unit=size)


def _optax_microbatch(total: Callable[..., Any], size: int) -> Callable[..., Any]:
    from optax import microbatching

    return microbatching.microbatch(jax.value_and_grad(total), 1, size)
