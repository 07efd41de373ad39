"""Training with parameters in bfloat16, rounded to nearest or at random, beside float32 copies.

All variants compute in float32 on parameters of bfloat16; they differ in how parameters are kept.
Prints the tables of docs/recipes/bfloat16.md.
"""

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip_jax as gcx
from benchmarks._models import Model, gpt
from benchmarks.study import problems

Tree = Any


COPIES = "float32 copies"
# The dtype of the parameters, and whether they are rounded at random. The moments are float32.
VARIANTS = {
    COPIES: (jnp.float32, False),
    "bfloat16, to nearest": (jnp.bfloat16, False),
    "bfloat16, at random": (jnp.bfloat16, True),
}
# Layers and width.
MODELS = {"GPT of 107 k parameters": (2, 64), "GPT of 1.35 M parameters": (3, 192)}
LENGTH = 64  # characters
RATE = 0.002


def initial(model: Model, key: jax.Array) -> Tree:
    """Parameters that bfloat16 has."""

    def leaf(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "bias" in name:
            return jnp.zeros(x.shape, jnp.bfloat16)
        of_leaf = jax.random.fold_in(key, sum(map(ord, name)))
        noise = 0.05 * jax.random.normal(of_leaf, x.shape)
        return (jnp.ones(x.shape) if "scale" in name else noise).astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(leaf, model.params)


def train(model: Model, variant: tuple[Any, bool], steps: int, seed: int) -> jax.Array:
    """The test loss after so many steps."""
    text, test = problems.read_text()
    dtype, is_random = variant
    parts = [gcx.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(RATE, steps))]
    tx = optax.chain(*parts, *[gcx.round_stochastically(seed)] * is_random)
    init_key, data_key = jax.random.split(jax.random.key(seed))
    first = initial(model, init_key)
    params = as_dtype(first, dtype)

    def step(carry: Any, index: jax.Array) -> Any:
        params, state = carry
        batch = problems.stretches(jax.random.fold_in(data_key, index), text, 8, LENGTH)
        grads = jax.grad(lambda p: model.loss(as_read(p), batch))(params)
        return gcx.apply_gradients(tx, as_dtype(grads, jnp.float32), state, params), None

    carry = (params, tx.init(as_dtype(first, jnp.float32)))
    (params, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    held_out = problems.stretches(jax.random.key(1), test, 128, LENGTH)
    return model.loss(as_read(params), held_out)


def as_dtype(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def as_read(params: Tree) -> Tree:
    """Float32 numbers that bfloat16 has; XLA would leave out a conversion there and back."""
    return jax.tree.map(lambda p: jax.lax.reduce_precision(p.astype(jnp.float32), 8, 7), params)


def table(name: str, steps: int, seeds: int) -> None:
    """Mean loss and its deviation over seeds, and the gap to float32 copies seed by seed."""
    model = gpt(*MODELS[name], problems.VOCABULARY, 8, LENGTH, scan=False)
    of_copies = np.zeros(seeds)
    print(f"\n{name}, {steps:,} steps, {seeds} seeds\n")
    print("| parameters | test loss | standard deviation over seeds | gap, its standard error |")
    print("| --- | --- | --- | --- |", flush=True)
    for variant, choice in VARIANTS.items():
        run = jax.jit(functools.partial(train, model, choice, steps))
        losses = np.array([run(seed) for seed in range(seeds)])
        of_copies = losses if variant == COPIES else of_copies
        gaps = losses - of_copies
        deviation, error = (statistics.stdev(x) if seeds > 1 else 0 for x in (losses, gaps))
        gap = f"{np.mean(gaps):+.4f} ± {error / seeds**0.5:.4f}"
        print(f"| {variant} | {np.mean(losses):.4f} | {deviation:.4f} | {gap} |", flush=True)


def main() -> None:
    """Trains what is chosen, and prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for name in MODELS:
        if options.only in name:
            table(name, options.steps, options.seeds)


if __name__ == "__main__":
    main()
