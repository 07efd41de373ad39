"""What a feature costs on a good step: the program with it beside the same one without it.

Compiled for the device of the environment; the table is that of all devices. A new feature is a
line of `COSTS`.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
    """A function, its arguments as shapes, and which of them are donated."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()

    def compile_for(self, platform: str) -> _devices.Compiled:
        """The program for one device."""
        args = _devices.placed(self.args, _devices.one_device(platform))
        return _devices.compile_for(platform, self.function, *args, donate=self.donate)


@dataclass(frozen=True)
class Feature:
    """A program with the feature and without it.

    Attributes:
        with_it: makes the one for a tree of parameters.
        without: makes the other.
        unit: the arguments of which N is the size, from the parameters.
    """

    with_it: Callable[[Tree], Case]
    without: Callable[[Tree], Case]
    unit: Callable[[Tree], Tree] = lambda tree: tree


Wrapper = Callable[[Any], Any]


def _step(wrap: Wrapper, tree: Tree) -> Case:
    """A step of AdamW inside a wrapper."""
    tx = wrap(optax.adamw(1e-4))

    def step(carry: Any, grads: Tree, loss: Any) -> Any:
        params, state = carry
        return gcx.apply_gradients(tx, grads, state, params, value=loss)

    loss = jax.ShapeDtypeStruct((), jnp.float32)
    return Case(step, ((tree, jax.eval_shape(tx.init, tree)), tree, loss), donate=(0,))


def _around(wrap: Wrapper, without: Wrapper = optax.with_extra_args_support) -> Feature:
    return Feature(partial(_step, wrap), partial(_step, without))


def _as_dtype(tree: Tree, dtype: Any) -> Tree:
    def cast(x: Any) -> Any:
        return x.astype(dtype) if isinstance(x, jax.Array) else jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(cast, tree)


def _low(tree: Tree) -> Tree:
    return _as_dtype(tree, jnp.bfloat16)


def _low_step(is_rounded: bool, tree: Tree) -> Case:
    """A step on parameters in bfloat16, rounded at random, or with float32 copies."""
    tx = optax.chain(optax.adamw(1e-4), *[gcx.round_stochastically()] * is_rounded)

    def step(carry: Any, grads: Tree) -> Any:
        params, state = gcx.apply_gradients(tx, _as_dtype(grads, jnp.float32), *carry[::-1])
        return (params, state), () if is_rounded else _low(params)

    params = _low(tree) if is_rounded else tree
    return Case(step, ((params, jax.eval_shape(tx.init, tree)), _low(tree)), donate=(0,))


# An activation of 16,384 tokens of width 2048, between two matrices.
_TOKENS = jax.ShapeDtypeStruct((8, 2048, 2048), jnp.bfloat16)
_MATRIX = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)


def _backward(clip: Callable[[jax.Array], jax.Array], tree: Tree) -> Case:
    """The gradient with respect to the input of two layers, with a clip between them."""

    def backward(x: Any, first: Any, second: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda x: clip(x @ first) @ second, x)[1](cotangent)

    return Case(backward, (_TOKENS, _MATRIX, _MATRIX, _TOKENS))


def _cotangent(axis: Any) -> Feature:
    clip = partial(gcx.clip_cotangent, max_norm=1e-3, axis=axis)
    return Feature(partial(_backward, clip), partial(_backward, lambda x: x), lambda _: _TOKENS)


def _spike_guard(inner: Any) -> Any:
    rule = gcx.thresholds.mean_std(6.0)
    return gcx.skip_spikes(inner, norm=rule, loss=rule)


_accumulate = partial(gcx.accumulate_gradients, every=8)
_accumulate_low = partial(_accumulate, accumulator_dtype=jnp.bfloat16)

COSTS = {
    "`skip_spikes` on norm and loss": _around(_spike_guard),
    "`watch`, the gradient": _around(partial(gcx.watch, of=("gradient",))),
    "`watch`, gradient, update and parameters": _around(gcx.watch),
    "`dynamic_loss_scale`": _around(gcx.dynamic_loss_scale),
    '`dynamic_loss_scale(check="step")`': _around(partial(gcx.dynamic_loss_scale, check="step")),
    "`accumulator_dtype=bfloat16`": _around(_accumulate_low, _accumulate),
    '`rounding="stochastic"` with it': _around(
        partial(_accumulate_low, rounding="stochastic"), _accumulate_low
    ),
    "`round_stochastically`, beside float32 copies": Feature(
        partial(_low_step, True), partial(_low_step, False), _low
    ),
    "`clip_cotangent`, each token": _cotangent(-1),
    "`clip_cotangent`, each example": _cotangent((1, 2)),
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
            compiled = make(tree).compile_for(platform)
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
