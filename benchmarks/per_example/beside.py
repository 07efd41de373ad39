"""Scratch and FLOPs of per-example clipping beside Optax and jax_privacy, compiled for an H100.

    python -m benchmarks.per_example.beside                    # all models
    python -m benchmarks.per_example.beside "GPT-2, 128 tokens"

Each program is compiled for two batch sizes, from which bytes and FLOPs of one more example follow.
The largest batch fits in 80 GB beside parameters, gradients and the moments of Adam. FLOPs of
convolutions and of small models are those that XLA counts for a CPU. An environment of
`make bench-compiled` with jax_privacy is needed.
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


def gpt2(tokens: int) -> Model:
    return (lambda _, p, x: _gpt2.loss(p, x)), None, _gpt2.gpt_shapes(tokens=tokens), i32((tokens,))


def lora(tokens: int, rank: int = 8) -> Model:
    """Adapters of the four matrices of each layer."""
    base, names = _gpt2.gpt_shapes(tokens=tokens), ("qkv", "out", "up", "down")
    rows, columns = ({n: base["blocks"][0][n].shape[i] for n in names} for i in (0, 1))
    adapter = {n: (f32((rows[n], rank)), f32((rank, columns[n]))) for n in names}

    def loss(base: Any, adapters: Any, ids: jax.Array) -> jax.Array:
        def adapted(p: Any, adapter: Any) -> Any:
            return p | {n: p[n] + a @ b for n, (a, b) in adapter.items()}

        return _gpt2.loss(base | {"blocks": list(map(adapted, base["blocks"], adapters))}, ids)

    return loss, base, [adapter] * 12, i32((tokens,))


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


def compiled(platform: str, program: Any, model: Model, count: int) -> _devices.Compiled:
    loss, frozen, params, example = model
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), example)
    args = _devices.placed((frozen, params, batch), _devices.one_device(platform))
    return _devices.compile_for(
        platform, lambda f, p, b: program(p, b, functools.partial(loss, f)), *args
    )


def measured(model: Model, count: int) -> _report.Rows:
    """A row for each program, from batches of `count` and of half as many examples."""
    sizes = [4 * math.prod(x.shape) for x in jax.tree.leaves(model[2])]
    resident = 4 * sum(sizes) + sum(4 * math.prod(x.shape) for x in jax.tree.leaves(model[1]))
    rows: _report.Rows = []
    for name, program in PROGRAMS.items():
        less, more = (compiled("cuda", program, model, n) for n in (count // 2, count))
        has_dots = len(sizes) > 50  # GPT-2
        counted = more if has_dots else compiled("cpu", program, model, count)
        each = (more.scratch - less.scratch) / (count - count // 2)
        free = 80e9 - resident - (more.scratch - count * each)
        is_loop = "micro" in name  # XLA counts the body of a loop once
        row = {
            "what": name,
            "scratch GB": more.scratch / 1e9,
            "MB per example": each / 1e6,
            "largest batch": f"{int(free / each):,}" if each > 1 else "",
            "GFLOP per example": counted.flops / (1 if is_loop else count) / 1e9,
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        make, tokens, count = MODELS[name]
        rows = measured(make(tokens) if tokens else make(), count)
        about = {"device": "NVIDIA H100 80GB, compiled only", "cores": "-"}
        versions = {"jax_privacy": metadata.version("jax_privacy")}
        title = f"{name}; scratch of {count} examples"
        _report.write({title: rows}, "per-example", **about, **versions)


if __name__ == "__main__":
    main()
