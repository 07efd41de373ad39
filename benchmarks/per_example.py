"""Scratch and FLOPs of per-example clipping, compiled for a GPU or a TPU that need not be there.

    python benchmarks/per_example.py tpu 32 256 ordinary ours vmap
    python benchmarks/per_example.py h100 8 1024 ordinary ours --target h100_target_config.pbtxt

GPT-2 (124M, tied head, float32), `examples x tokens`. Prints one line of JSON for each program:
scratch in bytes and as a multiple of the parameters, and FLOPs as XLA counts them.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradclip_jax as gcx


def gpt_shapes(layers=12, width=768, vocabulary=50257, tokens=1024):
    """The parameters of GPT-2 as shapes."""

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {
        "norm1": leaf(width),
        "qkv": leaf(width, 3 * width),
        "out": leaf(width, width),
        "norm2": leaf(width),
        "up": leaf(width, 4 * width),
        "up_bias": leaf(4 * width),
        "down": leaf(4 * width, width),
        "down_bias": leaf(width),
    }
    return {
        "embed": leaf(vocabulary, width),
        "place": leaf(tokens, width),
        "norm": leaf(width),
        "blocks": [block] * layers,
    }


def normed(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def block_of(x, p, heads):
    q, k, v = jnp.split(normed(x, p["norm1"]) @ p["qkv"], 3, -1)
    q, k, v = (y.reshape(len(x), heads, -1).transpose(1, 0, 2) for y in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]).astype(np.float32)
    causal = np.tril(np.ones((len(x), len(x)), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v
    x = x + mixed.transpose(1, 0, 2).reshape(x.shape) @ p["out"]
    hidden = jax.nn.gelu(normed(x, p["norm2"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def loss(params, ids, heads=12):
    """Mean cross-entropy of the next token, one text."""
    x = params["embed"][ids] + params["place"][: len(ids)]
    for p in params["blocks"]:
        x = block_of(x, p, heads)
    logits = normed(x, params["norm"]) @ params["embed"].T
    picked = jnp.take_along_axis(logits[:-1], ids[1:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits[:-1], -1) - picked)


def ordinary(params, batch):
    return jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)


def ours(params, batch):
    return gcx.clipped_value_and_grad(loss, 1.0)(params, batch)[1]


def written_down(params, batch):
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    squares = [jnp.sum(jnp.square(g), range(1, g.ndim)) for g in jax.tree.leaves(grads)]
    factors = jnp.minimum(1, jax.lax.rsqrt(sum(squares)))
    return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(factors), grads)


PROGRAMS = {"ordinary": ordinary, "ours": ours, "vmap": written_down}


def device(kind, target):
    if kind == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices[0]
    described = topologies.get_topology_desc(
        topology_name="h100",
        platform="cuda",
        target_config=Path(target).read_text(),
        topology="1x1x1",
    )
    return described.devices[0]


def measured(program, kind, target, examples, tokens, layers):
    sharding = NamedSharding(Mesh(np.array([device(kind, target)]), ("x",)), PartitionSpec())
    arguments = gpt_shapes(layers), jax.ShapeDtypeStruct((examples, tokens), jnp.int32)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    size = sum(4 * x.size for x in jax.tree.leaves(arguments[0]))
    start = time.time()
    lowered = jax.jit(PROGRAMS[program]).trace(*arguments)
    platform = "tpu" if kind == "tpu" else "cuda"
    compiled = lowered.lower(lowering_platforms=(platform,)).compile()
    scratch = compiled.memory_analysis().temp_size_in_bytes
    flops = (compiled.cost_analysis() or {}).get("flops")
    return {
        "program": program,
        "device": kind,
        "examples": examples,
        "tokens": tokens,
        "layers": layers,
        "parameters_bytes": size,
        "scratch_bytes": scratch,
        "scratch_in_parameters": round(scratch / size, 2),
        "flops": flops,
        "compile_seconds": round(time.time() - start, 1),
    }, compiled


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=["tpu", "h100"])
    parser.add_argument("examples", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("programs", nargs="+", choices=PROGRAMS)
    parser.add_argument("--target", default="h100_target_config.pbtxt")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--text", help="folder to write the compiled program to")
    options = parser.parse_args()
    for program in options.programs:
        row, compiled = measured(
            program,
            options.device,
            options.target,
            options.examples,
            options.tokens,
            options.layers,
        )
        print(json.dumps(row), flush=True)
        if options.text:
            Path(options.text, f"{program}-{options.device}.txt").write_text(compiled.as_text())


if __name__ == "__main__":
    main()
