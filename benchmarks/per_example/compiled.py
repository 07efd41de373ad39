"""Scratch and FLOPs of per-example clipping beside Optax and jax_privacy, compiled for an H100.

    python -m benchmarks.per_example.compiled                      # all models
    python -m benchmarks.per_example.compiled "GPT-2, 128 tokens"

Each program is compiled for two batch sizes, from which the bytes of one more example follow, and
GPT-2 with 2 and 4 layers, from which those of 12 follow. The largest batch fits in 80 GB beside
parameters, gradients and the moments of Adam. FLOPs are counted before compilation. An environment
of `make bench-compiled` with jax_privacy is needed.
"""

import functools
import math
import sys
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _report
from benchmarks.compiled import _devices
from benchmarks.per_example import _gpt2, _models, speed

PROGRAMS = {
    "ordinary gradient": _gpt2.ordinary,
    "`gcx.per_example`": _gpt2.ours,
    "Optax, `differentially_private_aggregate`": speed.aggregated,
    "jax_privacy, whole batch": speed.privacy(None),
    "jax_privacy, micro-batches of 1": speed.privacy(1),
}
Model = tuple[Any, Any, Any, Any]
f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=t) for t in (jnp.float32, jnp.int32))


def gpt2(tokens: int, layers: int = 12, **shape: int) -> Model:
    params = _gpt2.gpt_shapes(layers, tokens=tokens, **shape)
    return (lambda _, p, x: _gpt2.loss(p, x)), None, params, i32((tokens,))


def lora(tokens: int, layers: int = 12, rank: int = 8) -> Model:
    """Adapters of the four matrices of each layer."""
    base, names = _gpt2.gpt_shapes(layers, tokens=tokens), ("qkv", "out", "up", "down")
    shapes = {n: base["blocks"][0][n].shape for n in names}
    adapter = {n: (f32((a, rank)), f32((rank, b))) for n, (a, b) in shapes.items()}

    def loss(base: Any, adapters: Any, ids: jax.Array) -> jax.Array:
        def adapted(p: Any, adapter: Any) -> Any:
            return p | {n: p[n] + a @ b for n, (a, b) in adapter.items()}

        return _gpt2.loss(base | {"blocks": list(map(adapted, base["blocks"], adapters))}, ids)

    return loss, base, [adapter] * layers, i32((tokens,))


def resnet() -> Model:
    loss, params, _ = _models.resnet()
    return (lambda _, p, x: loss(p, x)), None, params, (f32((32, 32, 3)), i32(()))


def table(rows: int = 1_000_000, width: int = 64, ids: int = 32) -> Model:
    """Click prediction: 32 ids of a table and a network of two layers."""
    params = {"table": f32((rows, width)), "w": f32((width * ids, 256)), "out": f32((256,))}

    def loss(_: Any, p: Any, example: Any) -> jax.Array:
        x = p["table"][example[0]].reshape(1, -1)
        return jnp.square(jnp.dot(jax.nn.relu(x @ p["w"])[0], p["out"]) - example[1])

    return loss, None, params, (i32((ids,)), f32(()))


MODELS = {f"GPT-2, {n} tokens": (gpt2, n, 4096 // n) for n in (128, 256, 512, 1024)}
MODELS["GPT-2, LoRA of rank 8, 256 tokens"] = (lora, 256, 16)
MODELS["ResNet, 32 x 32"] = (resnet, None, 64)
MODELS["table of 1 M rows"] = (table, None, 64)


def compiled(program: str, model: Model, count: int) -> _devices.Compiled:
    return _devices.compile_for("cuda", *_placed(program, model, count, "cuda"))


def flops(program: str, model: Model, count: int) -> float:
    run, *args = _placed(program, model, count, "cpu")
    return jax.jit(run).lower(*args).cost_analysis()["flops"]


def _placed(program: str, model: Model, count: int, platform: str) -> tuple[Any, ...]:
    loss, frozen, params, example = model
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), example)
    args = _devices.placed((frozen, params, batch), _devices.one_device(platform))
    return (lambda f, p, b: PROGRAMS[program](p, b, functools.partial(loss, f))), *args


def measured(name: str) -> _report.Rows:
    """A row for each program, from batches of `count` and of half as many examples."""
    make, tokens, count = MODELS[name]
    model = make() if tokens is None else make(tokens)
    bytes_of = (4 * math.prod(x.shape) for x in jax.tree.leaves((model[1], [model[2]] * 4)))
    resident, rows = sum(bytes_of), []
    for what in PROGRAMS:
        sizes = (count, count // 2)
        if tokens is None:
            more, less = (compiled(what, model, n).scratch for n in sizes)
        else:
            pairs = [[compiled(what, make(tokens, x), n).scratch for x in (2, 4)] for n in sizes]
            more, less = (four + 4 * (four - two) for two, four in pairs)
        each = (more - less) / (count - count // 2)
        free = 80e9 - resident - (more - count * each)
        looped = 1 if "micro" in what else count  # XLA counts the body of a loop once
        row = {
            "what": what,
            "scratch GB": round(more / 1e9, 3),
            "MB per example": round(each / 1e6, 3),
            "largest batch": f"{int(free / each):,}" if each > 1e3 else "any",
            "GFLOP per example": round(flops(what, model, count) / looped / 1e9, 4),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        about = {"device": "NVIDIA H100 80GB, compiled only", "cores": "-"}
        about["jax_privacy"] = metadata.version("jax_privacy")
        title = f"{name}; scratch of {MODELS[name][2]} examples"
        _report.write({title: measured(name)}, "per-example", **about)


if __name__ == "__main__":
    main()
