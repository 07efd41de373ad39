"""What a feature costs on a good step: the program with it beside the same one without it.

Compiled for the device of the environment; the table is that of all devices. A new feature is a
line of `COSTS`.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks.compiled import _devices

Tree = Any


@dataclass(frozen=True)
class Case:
    """A function of the tree, its arguments as shapes, and which are donated."""

    function: Callable[..., Any]
    args: Callable[[Tree], tuple[Any, ...]]
    donate: tuple[int, ...] = ()

    def compile_for(self, platform: str, tree: Tree) -> _devices.Compiled:
        """The program for one device."""
        args = _devices.placed(self.args(tree), _devices.one_device(platform))
        return _devices.compile_for(platform, self.function, *args, donate=self.donate)


@dataclass(frozen=True)
class Feature:
    """A program with the feature and without it.

    Attributes:
        with_it: makes the one.
        without: makes the other.
        unit: the arguments of which N is the size: those of the tree of parameters, or others.
    """

    with_it: Callable[[], Case]
    without: Callable[[], Case]
    unit: Callable[[Tree], Tree] = lambda tree: tree


def _adamw() -> Any:
    return optax.adamw(1e-4)


def _step(tx: Any) -> Case:
    def step(carry: Any, grads: Tree) -> Any:
        params, state = carry
        return gcx.apply_gradients(tx, grads, state, params)

    return Case(step, lambda t: ((t, jax.eval_shape(tx.init, t)), t), donate=(0,))


def _accumulated(**options: Any) -> Case:
    return _step(gcx.accumulate_gradients(_adamw(), 8, **options))


def _with_loss(tx: Any) -> Case:
    def step(carry: Any, grads: Tree, loss: Any) -> Any:
        params, state = carry
        return gcx.apply_gradients(tx, grads, state, params, value=loss)

    def args(tree: Tree) -> tuple[Any, ...]:
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        return (tree, jax.eval_shape(tx.init, tree)), tree, loss

    return Case(step, args, donate=(0,))


def _spike_guard() -> Any:
    rule = gcx.thresholds.mean_std(6.0)
    return gcx.skip_spikes(_adamw(), norm=rule, loss=gcx.thresholds.mean_std(6.0))


def _as_dtype(tree: Tree, dtype: Any) -> Tree:
    def cast(x: Any) -> Any:
        return x.astype(dtype) if isinstance(x, jax.Array) else jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(cast, tree)


def _low(tree: Tree) -> Tree:
    return _as_dtype(tree, jnp.bfloat16)


def _low_step(*rounding: Any, copies: bool = False) -> Case:
    """A step on parameters in bfloat16, or on float32 copies; the moments are float32."""
    tx = optax.chain(_adamw(), *rounding)

    def step(carry: Any, grads: Tree) -> Any:
        params, state = gcx.apply_gradients(tx, _as_dtype(grads, jnp.float32), *carry[::-1])
        return (params, state), _low(params) if copies else ()

    def args(tree: Tree) -> tuple[Any, ...]:
        return (tree if copies else _low(tree), jax.eval_shape(tx.init, tree)), _low(tree)

    return Case(step, args, donate=(0,))


# An activation of 16,384 tokens of width 2048, between two matrices.
_TOKENS = jax.ShapeDtypeStruct((8, 2048, 2048), jnp.bfloat16)
_MATRIX = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)


def _backward(clip: Callable[..., jax.Array], *probe: tuple[int, ...]) -> Case:
    """The gradient with respect to the input of two layers, with a clip between them."""

    def backward(x: Any, first: Any, second: Any, cotangent: Any, *probes: Any) -> Any:
        def layers(x: Any, *probes: Any) -> Any:
            return clip(x @ first, *probes) @ second

        return jax.vjp(layers, x, *probes)[1](cotangent)

    probes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in probe]
    return Case(backward, lambda _: (_TOKENS, _MATRIX, _MATRIX, _TOKENS, *probes))


def _clipped(axis: Any) -> Callable[..., jax.Array]:
    return lambda x, *probe: gcx.clip_cotangent(
        x, 1e-3, axis=axis, norm_probe=probe[0] if probe else None
    )


def _cotangent(axis: Any, *probe: tuple[int, ...]) -> Feature:
    return Feature(
        lambda: _backward(_clipped(axis), *probe),
        lambda: _backward(lambda x: x),
        lambda _: _TOKENS,
    )


# Query and key weights of eight layers, four query heads to a key head.
_ATTENTION = {
    f"layer{i}": {
        "query": jax.ShapeDtypeStruct((2048, 16, 128), jnp.float32),
        "key": jax.ShapeDtypeStruct((2048, 4, 128), jnp.float32),
    }
    for i in range(8)
}


def _attention(tau: float | None) -> Case:
    tx = _adamw()

    def step(carry: Any, grads: Tree, logits: Any) -> Any:
        params, state = gcx.apply_gradients(tx, grads, *carry[::-1])
        if tau is not None:
            for name, layer in params.items():
                clipped = gcx.qk_clip(layer["query"], layer["key"], logits[name], tau)
                params = {**params, name: dict(zip(("query", "key"), clipped, strict=True))}
        return params, state

    logits = {name: jax.ShapeDtypeStruct((16,), jnp.float32) for name in _ATTENTION}
    state = jax.eval_shape(tx.init, _ATTENTION)
    return Case(step, lambda _: ((_ATTENTION, state), _ATTENTION, logits), donate=(0,))


COSTS = {
    "`skip_spikes` on norm and loss": Feature(
        lambda: _with_loss(_spike_guard()), lambda: _step(_adamw())
    ),
    "`watch`, the gradient": Feature(
        lambda: _step(gcx.watch(_adamw(), of=("gradient",))), lambda: _step(_adamw())
    ),
    "`watch`, gradient, update and parameters": Feature(
        lambda: _step(gcx.watch(_adamw())), lambda: _step(_adamw())
    ),
    "`dynamic_loss_scale`": Feature(
        lambda: _step(gcx.dynamic_loss_scale(_adamw())), lambda: _step(_adamw())
    ),
    '`dynamic_loss_scale(check="step")`': Feature(
        lambda: _step(gcx.dynamic_loss_scale(_adamw(), check="step")), lambda: _step(_adamw())
    ),
    "`accumulator_dtype=bfloat16`": Feature(
        lambda: _accumulated(accumulator_dtype=jnp.bfloat16), _accumulated
    ),
    '`rounding="stochastic"` with it': Feature(
        lambda: _accumulated(accumulator_dtype=jnp.bfloat16, rounding="stochastic"),
        lambda: _accumulated(accumulator_dtype=jnp.bfloat16),
    ),
    "`round_stochastically`, beside rounding to nearest": Feature(
        lambda: _low_step(gcx.round_stochastically()), _low_step, _low
    ),
    "`round_stochastically`, beside float32 copies": Feature(
        lambda: _low_step(gcx.round_stochastically()), lambda: _low_step(copies=True), _low
    ),
    "`clip_cotangent`, each token": _cotangent(-1),
    "`clip_cotangent`, each token, with its norms": _cotangent(-1, (8, 2048)),
    "`clip_cotangent`, each example": _cotangent((1, 2)),
    "`qk_clip` in a step of AdamW": Feature(lambda: _attention(100.0), lambda: _attention(None)),
}


def tree_of(leaves: int, side: int) -> Tree:
    """Square matrices."""
    return {f"w{i}": jax.ShapeDtypeStruct((side, side), jnp.float32) for i in range(leaves)}


DEVICES = {"cpu": "CPU", "cuda": "H100", "tpu": "TPU v5e"}


def cells(platform: str, tree: Tree, only: str) -> Iterator[tuple[str, str]]:
    """Each feature, with what a step moves, its scratch, launches and stops of the host."""
    for name, feature in COSTS.items():
        if only not in name:
            continue
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(feature.unit(tree)))
        found: list[tuple[Any, ...]] = []
        for make in (feature.without, feature.with_it):
            compiled = make().compile_for(platform, tree)
            program = compiled.program
            moved, scratch = program.all.moved / size, compiled.scratch / size
            found.append((moved, scratch, program.all.launches, program.always.stops))
        yield name, _cell(*found)


def _cell(without: tuple[Any, ...], with_it: tuple[Any, ...]) -> str:
    parts = [f"{without[0]:.2f} → {with_it[0]:.2f}"]
    if max(without[1], with_it[1]) >= 0.005:
        parts.append(f"scratch {without[1]:.2f} → {with_it[1]:.2f}")
    for what, old, new in zip(("launches", "host stops"), without[2:], with_it[2:], strict=True):
        if old or new:
            parts.append(f"{what} {old} → {new}")
    return ", ".join(parts)


def write(platform: str, found: dict[str, str], versions: str) -> None:
    """Merges the cells of this device into results/costs.json and generates the table."""
    path = _report.RESULTS / "costs.json"
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    device = old.get(DEVICES[platform]) or {"cells": {}}
    device = {"versions": versions, "cells": device["cells"] | found}
    all_of = {
        name: device if name == DEVICES[platform] else old.get(name) for name in DEVICES.values()
    }
    path.write_text(json.dumps(all_of, indent=1, ensure_ascii=False) + "\n")
    write_table(all_of)


def write_table(found: dict[str, Any]) -> None:
    """Generates the table of all devices."""
    known = {name: entry for name, entry in found.items() if entry}
    rows = [
        {"feature": name} | {d: entry["cells"].get(name, "") for d, entry in known.items()}
        for name in COSTS
    ]
    text = "; ".join(f"{name}: {entry['versions']}" for name, entry in known.items())
    _report.write_page("costs", f"{_report.table(rows)}\n\n{text}")


def main() -> None:
    """Compiles what is chosen and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="features with this in their name")
    parser.add_argument("--quick", action="store_true", help="a small tree, printed only")
    options = parser.parse_args()
    platform = _devices.available() or "cpu"
    tree = tree_of(2, 256) if options.quick else tree_of(8, 2048)
    found: dict[str, str] = {}
    for name, text in cells(platform, tree, options.only):
        found[name] = text
        print(f"{name} | {text}", flush=True)
    if not options.quick:
        versions = f"jax {jax.__version__}, optax {optax.__version__}, commit {_report.commit()}"
        write(platform, found, versions)


if __name__ == "__main__":
    main()
