"""Examples per second and scratch of per-example clipping on this machine, beside other libraries.

    python benchmarks/per_example_speed.py

A GPT of 4 layers of 128, vocabulary 2,048, tied head, float32: 32 examples of 64 tokens. Needs
`jax_privacy` for its two rows. Prints one line of JSON for each program.
"""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from optax import contrib

import gradclip_jax as gcx
import per_example

LAYERS, WIDTH, VOCABULARY, TOKENS, EXAMPLES = 4, 128, 2048, 64, 32
loss = functools.partial(per_example.loss, heads=4)


def made():
    """Parameters and a batch."""
    rng = np.random.default_rng(0)
    shapes = per_example.gpt_shapes(LAYERS, WIDTH, VOCABULARY, TOKENS)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.05, jnp.float32), shapes
    )
    return params, jnp.asarray(rng.integers(0, VOCABULARY, (EXAMPLES, TOKENS)), jnp.int32)


def written_down(params, batch):
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    squares = [jnp.sum(jnp.square(g), range(1, g.ndim)) for g in jax.tree.leaves(grads)]
    factors = jnp.minimum(1, jax.lax.rsqrt(sum(squares)))
    return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(factors), grads)


def optax_aggregate(params, batch):
    tx = contrib.differentially_private_aggregate(1.0, 0.0, 0)
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    return tx.update(grads, tx.init(params), params)[0]


def privacy(microbatch):
    import jax_privacy

    clipped = jax_privacy.clipped_grad(
        lambda p, x: loss(p, x[0]), l2_clip_norm=1.0, batch_argnums=1, microbatch_size=microbatch
    )
    return lambda params, batch: clipped(params, batch)


def programs():
    def ordinary(params, batch):
        return jax.grad(lambda p: jnp.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)

    yield "ordinary gradient", ordinary
    yield "clipped_value_and_grad", lambda p, b: gcx.clipped_value_and_grad(loss, 1.0)(p, b)[1]
    yield "every gradient written down", written_down
    yield "optax.contrib.differentially_private_aggregate", optax_aggregate
    for size in (None, 1, 4):
        yield f"jax_privacy.clipped_grad, microbatch {size}", privacy(size)


def main():
    params, batch = made()
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    for name, program in programs():
        try:
            compiled = jax.jit(program).lower(params, batch).compile()
        except ImportError:
            continue
        jax.block_until_ready(compiled(params, batch))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(compiled(params, batch))
            times.append(time.perf_counter() - start)
        row = {
            "program": name,
            "scratch_in_parameters": round(compiled.memory_analysis().temp_size_in_bytes / size, 2),
            "examples_per_second": round(EXAMPLES / float(np.median(times)), 1),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
