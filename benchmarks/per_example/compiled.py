"""Scratch and FLOPs of per-example clipping beside Optax and jax_privacy, compiled for an H100.

    python -m benchmarks.per_example.compiled                      # all models
    python -m benchmarks.per_example.compiled "GPT-2, 128 tokens"

GPT-2 is compiled with 2 and 4 layers, from which the numbers of 12 layers follow: scratch and FLOPs
are linear in the layers. The largest batch fits in 80 GB beside parameters, gradients and the
moments of Adam, if scratch of GPT-2 is proportional to the batch. FLOPs are those of matrix
products, and of the uncompiled program for the other models. An environment of
`make bench-compiled` with jax_privacy is needed.
"""

import argparse
import functools
import math
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import _report
from benchmarks.compiled import _devices
from benchmarks.per_example import _models, speed

PROGRAMS = {
    "ordinary gradient": speed.ordinary,
    "`gcx.per_example`": speed.ours,
    "Optax, `differentially_private_aggregate`": speed.aggregated,
    "jax_privacy, whole batch": speed.privacy(None),
    "jax_privacy, micro-batches of 1": speed.privacy(1),
}
Model = tuple[Any, Any, Any, Any]
f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=t) for t in (jnp.float32, jnp.int32))


def gpt2(tokens: int, layers: int = 12, **shape: int) -> Model:
    params = _models.gpt_shapes(layers, tokens=tokens, **shape)
    return (lambda _, p, x: _models.gpt_loss(p, x)), None, params, i32((tokens,))


class Adapted(NamedTuple):
    weight: jax.Array
    a: jax.Array
    b: jax.Array

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight + (x @ self.a) @ self.b


def lora(tokens: int, layers: int = 12, rank: int = 8) -> Model:
    """Adapters of the four matrices of each layer."""
    base, names = _models.gpt_shapes(layers, tokens=tokens), ("qkv", "out", "up", "down")
    shapes = {n: base["blocks"][0][n].shape for n in names}
    adapter = {n: (f32((a, rank)), f32((rank, b))) for n, (a, b) in shapes.items()}

    def loss(base: Any, adapters: Any, ids: jax.Array) -> jax.Array:
        def adapted(p: Any, adapter: Any) -> Any:
            return p | {n: Adapted(p[n], a, b) for n, (a, b) in adapter.items()}

        return _models.gpt_loss(
            base | {"blocks": list(map(adapted, base["blocks"], adapters))}, ids
        )

    return loss, base, [adapter] * layers, i32((tokens,))


def resnet() -> Model:
    example = f32((32, 32, 3)), i32(())
    return (lambda _, p, x: _models.resnet_loss(p, x)), None, _models.resnet_shapes(), example


def table(rows: int = 1_000_000, width: int = 64, ids: int = 32) -> Model:
    """Click prediction: 32 ids of a table and a network of two layers."""
    params = {"table": f32((rows, width)), "w": f32((width * ids, 256)), "out": f32((256,))}

    def loss(_: Any, p: Any, example: Any) -> jax.Array:
        x = p["table"][example[0]].reshape(1, -1)
        return jnp.square(jnp.dot(jax.nn.relu(x @ p["w"])[0], p["out"]) - example[1])

    return loss, None, params, (i32((ids,)), f32(()))


MODELS = {f"GPT-2, {n} tokens": (gpt2, n, 8192 // n) for n in (128, 256, 512, 1024)}
MODELS["GPT-2, LoRA of rank 8, 256 tokens"] = (lora, 256, 32)
MODELS["ResNet, 32 x 32"] = (resnet, None, 64)
MODELS["table of 1 M rows"] = (table, None, 64)


def compiled(program: str, model: Model, count: int) -> _devices.Compiled:
    return _devices.compile_for("cuda", *_placed(program, model, count, "cuda"))


def _placed(program: str, model: Model, count: int, platform: str) -> tuple[Any, ...]:
    loss, frozen, params, example = model
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), example)
    args = _devices.placed((frozen, params, batch), _devices.one_device(platform))
    return (lambda f, p, b: PROGRAMS[program](p, b, functools.partial(loss, f))), *args


def row(program: str, name: str) -> dict[str, Any]:
    make, tokens, count = MODELS[name]
    model = make() if tokens is None else make(tokens)
    if tokens is None:
        less, more = (compiled(program, model, n).scratch for n in (count // 2, count))
        each = (more - less) / (count - count // 2)
        run, *args = _placed(program, model, count, "cpu")
        flops = jax.jit(run).lower(*args).cost_analysis()["flops"]
    else:
        two, four = (compiled(program, make(tokens, layers), count) for layers in (2, 4))
        more, flops = (b + 4 * (b - a) for a, b in zip(*map(_measures, (two, four)), strict=True))
        each = more / count
    resident = sum(4 * math.prod(x.shape) for x in jax.tree.leaves((model[1], [model[2]] * 4)))
    free = 80e9 - resident - (more - count * each)
    is_loop = "micro" in program  # XLA counts the body of a loop once
    return {
        "what": program,
        "scratch GB": round(more / 1e9, 2),
        "largest batch": "any" if is_loop else int(free / each),
        "GFLOP per example": round(flops / (1 if is_loop else count) / 1e9, 4),
    }


def _measures(x: _devices.Compiled) -> tuple[float, float]:
    return x.scratch, x.flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    options = parser.parse_args()
    about = {"device": "NVIDIA H100 80GB, compiled only", "cores": "-"}
    about["jax_privacy"] = metadata.version("jax_privacy")
    for name in options.models:
        title = f"{name}: {MODELS[name][2]} examples"
        for program in options.programs:
            rows = [row(program, name)]
            print(name, rows, flush=True)
            _report.write({title: rows}, "per-example", **about)


if __name__ == "__main__":
    main()
