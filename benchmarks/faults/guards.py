"""What bad batches do to a run, with the guards of this package and with those of Optax.

A small regression is trained with AdamW, with and without the bad batches, and what is left is
compared. Prints a table and writes it to results/guards.md. Takes a minute on one core.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip_jax as gcx
from benchmarks._report import RESULTS, table

STEPS, EVERY = 24, 4


class Fault(NamedTuple):
    """A kind of fault: `spoil` acts on `(grads, loss, boost)` at the steps `at`."""

    name: str
    spoil: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    at: tuple[int, ...] = (9,)
    accumulates: bool = False
    params_dtype: str = "float32"
    grads_dtype: str | None = None


def set_one(value: float) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """Replaces one element of the gradient."""
    return lambda g, loss, boost: ({**g, "w": g["w"].at[1].set(value)}, loss, boost)


def scaled(factor: float) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """A gradient that is larger altogether."""
    return lambda g, loss, boost: (jax.tree.map(lambda x: x * factor, g), loss, boost)


FAULTS = [
    Fault("NaN in the gradient", set_one(np.nan)),
    Fault("infinity in the gradient", set_one(np.inf)),
    Fault("NaN in ten consecutive steps", set_one(np.nan), at=tuple(range(8, 18))),
    Fault("overflow of a float16 gradient", scaled(1e7), params_dtype="float16"),
    Fault(
        "NaN in a float32 gradient, bfloat16 parameters", set_one(np.nan),
        params_dtype="bfloat16", grads_dtype="float32",
    ),
    Fault("1e20 in the gradient, overflow of Adam's second moment", set_one(1e20)),
    Fault("NaN in the loss only", lambda g, loss, boost: (g, loss * np.nan, boost)),
    Fault("non-finite update", lambda g, loss, boost: (g, loss, boost * np.inf)),
    Fault("gradient multiplied by 1,000", scaled(1e3)),
    Fault("NaN in one micro-batch of 4", set_one(np.nan), accumulates=True),
    Fault("NaN in all 4 micro-batches", set_one(np.nan), at=(8, 9, 10, 11), accumulates=True),
]  # fmt: skip


def boosted() -> optax.GradientTransformationExtraArgs:
    """Multiplies the update by an extra argument, to be able to spoil it."""

    def update(
        updates: Any, state: Any, params: Any = None, *, boost: Any = 1.0, **_: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: (u * boost).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def optimizer() -> optax.GradientTransformationExtraArgs:
    """AdamW; the usual eps is zero in float16."""
    return optax.chain(optax.adamw(0.05, eps=1e-3, weight_decay=0.01), boosted())


def multi_steps(inner: Any, every: int, skip: Any = None) -> Any:
    """MultiSteps as a transformation."""
    skips = {"should_skip_update_fn": skip} if skip else {}
    return optax.MultiSteps(inner, every, **skips).gradient_transformation()


def methods(fault: Fault) -> dict[str, Callable[[], Any]]:
    """Name to maker, each guarding the same optimizer."""
    every = EVERY if fault.accumulates else 1
    skip = optax.skip_not_finite

    def bare() -> Any:
        return multi_steps(optimizer(), every) if fault.accumulates else optimizer()

    def apply_if_finite() -> Any:
        guarded = optax.apply_if_finite(optimizer(), max_consecutive_errors=5)
        return multi_steps(guarded, every) if fault.accumulates else guarded

    def ours() -> Any:
        inner = gcx.skip_spikes(optimizer(), norm=50.0)
        inner = gcx.accumulate_gradients(inner, every) if fault.accumulates else inner
        return gcx.skip_nonfinite(inner, check="step")

    return {
        "Optax without a guard": bare,
        "`apply_if_finite`": apply_if_finite,
        "`MultiSteps`, `skip_not_finite`": lambda: multi_steps(optimizer(), every, skip),
        "guards of this package": ours,
    }


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error of a linear model."""
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return jnp.mean((x @ p["w"] + p["b"] - y) ** 2)


def train(tx: Any, fault: Fault, *, without: bool) -> tuple[Any, Any]:
    """Parameters and state after the run, with the fault or without its batches."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((STEPS, 16, 3)), jnp.float32)
    y = x @ jnp.array([1.0, -2.0, 3.0]) + 1
    params = {"w": jnp.zeros(3, fault.params_dtype), "b": jnp.zeros((), fault.params_dtype)}
    state = tx.init(params)

    @functools.partial(jax.jit, static_argnums=4)
    def step(params: Any, state: Any, x: Any, y: Any, is_bad: bool) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        boost = jnp.float32(1)
        if fault.grads_dtype:
            grads = jax.tree.map(lambda g: g.astype(fault.grads_dtype), grads)
        if is_bad:
            grads, loss, boost = fault.spoil(grads, loss, boost)
        updates, state = tx.update(grads, state, params, value=loss, boost=boost)
        return optax.apply_updates(params, updates), state

    for i in range(STEPS):
        is_bad = i in fault.at
        if not (is_bad and without):
            params, state = step(params, state, x[i], y[i], is_bad)
    return params, state


def outcome(make: Callable[[], Any], fault: Fault) -> str:
    """One cell of the table."""
    try:
        params, state = train(make(), fault, without=False)
        expected, _ = train(make(), fault, without=True)
    except (TypeError, ValueError) as error:
        return f"raises {type(error).__name__}"
    if gcx.diagnostics.nonfinite_leaves(params):
        return "**non-finite parameters**"
    # What tells of the last gradient is no part of the run; the moments are.
    lost = [path for path in gcx.diagnostics.nonfinite_leaves(state) if "grad_norm" not in path]
    if lost:
        return "**non-finite state**"
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
    distance = max(float(jnp.max(jnp.abs(a - b).astype(jnp.float32))) for a, b in pairs)
    # Compiled twice, with the fault and without: the last bit may differ.
    eps = float(jnp.finfo(fault.params_dtype).eps)
    if distance <= 8 * eps:
        return "unaffected"
    return f"error of {distance:.1g}"


def main() -> None:
    """Prints the table and writes it."""
    rows = [
        {"fault": fault.name, **{n: outcome(make, fault) for n, make in methods(fault).items()}}
        for fault in FAULTS
    ]
    text = f"{table(rows)}\n\nOptax {optax.__version__}, JAX {jax.__version__}."
    print(text)
    (RESULTS / "guards.md").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
