"""Training with a float32, a bfloat16 and a stochastically rounded accumulator.

A student of two layers learns a teacher; every window is 1,024 micro-batches of eight examples, in
one `lax.scan`. Prints the table of docs/accumulation.md.
"""

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx

Tree = Any
WIDTH, WINDOW, EXAMPLES = 32, 1024, 8
ACCUMULATORS = {
    "float32": {},
    "bfloat16": {"accumulator_dtype": jnp.bfloat16},
    "bfloat16, stochastic": {"accumulator_dtype": jnp.bfloat16, "rounding": "stochastic"},
}


def network(key: jax.Array) -> Tree:
    """Weights of two layers."""
    first, second = jax.random.split(key)
    scale = WIDTH**-0.5
    return {
        "in": jax.random.normal(first, (WIDTH, WIDTH)) * scale,
        "out": jax.random.normal(second, (WIDTH, 1)) * scale,
    }


def apply(params: Tree, x: jax.Array) -> jax.Array:
    """The output of the network."""
    return jnp.tanh(x @ params["in"]) @ params["out"]


@functools.partial(jax.jit, static_argnames=("accumulator", "optimizer", "steps"))
def train(seed: int, accumulator: str, optimizer: str, steps: int) -> jax.Array:
    """The loss of the student beside the teacher after so many windows."""
    make = {"SGD": optax.sgd, "Adam": optax.adam}[optimizer]
    rate = optax.cosine_decay_schedule({"SGD": 0.5, "Adam": 0.01}[optimizer], steps)
    tx = gcx.accumulate_gradients(make(rate), WINDOW, **ACCUMULATORS[accumulator])
    own, of_teacher, data = jax.random.split(jax.random.key(seed), 3)
    params, teacher = network(own), network(of_teacher)

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean((apply(params, x) - apply(teacher, x)) ** 2)

    def micro_step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        grads = jax.grad(loss)(params, jax.random.normal(key, (EXAMPLES, WIDTH)))
        return gcx.apply_gradients(tx, grads, state, params), None

    keys = jax.random.split(data, steps * WINDOW)
    (params, _), _ = jax.lax.scan(micro_step, (params, tx.init(params)), keys)
    return loss(params, jax.random.normal(jax.random.key(99), (4096, WIDTH)))


def main() -> None:
    """Trains each once for each seed, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two windows, one seed")
    options = parser.parse_args()
    steps, seeds = (2, 1) if options.quick else (100, 3)
    print(f"| loss after {steps} windows of 1,024 | SGD | Adam |\n| --- | --- | --- |")
    for accumulator in ACCUMULATORS:
        losses = [
            statistics.median(
                float(train(seed, accumulator, optimizer, steps)) for seed in range(seeds)
            )
            for optimizer in ("SGD", "Adam")
        ]
        print(f"| {accumulator} | " + " | ".join(f"{x:.2e}" for x in losses) + " |", flush=True)


if __name__ == "__main__":
    main()
