"""Training with parameters in bfloat16, rounded to nearest or at random, beside float32 copies.

All variants compute in float32 on parameters of bfloat16 and get the gradient in bfloat16; they
differ in how parameters and moments are kept. Prints the tables of docs/recipes/bfloat16.md.
"""

import argparse
import functools
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip_jax as gcx
from benchmarks._models import gpt
from benchmarks.study import problems

Tree = Any


class Variant(NamedTuple):
    """How numbers are kept.

    Attributes:
        params: their dtype.
        moments: the dtype of the optimizer's moments.
        is_random: whether parameters are rounded at random.
    """

    params: Any
    moments: Any
    is_random: bool


COPIES = "float32 copies"
VARIANTS = {
    COPIES: Variant(jnp.float32, jnp.float32, False),
    "bfloat16, to nearest": Variant(jnp.bfloat16, jnp.float32, False),
    "bfloat16, at random": Variant(jnp.bfloat16, jnp.float32, True),
    "bfloat16, to nearest; moments too": Variant(jnp.bfloat16, jnp.bfloat16, False),
    "bfloat16, at random; moments to nearest": Variant(jnp.bfloat16, jnp.bfloat16, True),
}


class Problem(NamedTuple):
    """Functions of a model and its data, and its optimizer with a learning rate."""

    init: Any
    draw: Any
    loss: Any
    test: jax.Array
    optimizer: Any
    rate: float


def study_gpt() -> Problem:
    """The GPT of the study."""
    found = next(x for x in problems.PROBLEMS if x.name.startswith("GPT"))
    draw = lambda key: found.draw(key, jnp.int32(0))  # noqa: E731
    return Problem(found.init, draw, found.loss, found.test(), optax.adam, 0.01)


def larger_gpt(layers: int, width: int) -> Problem:
    """More parameters than the study's, on 64 characters at a time."""
    model = gpt(layers, width, problems.VOCABULARY, 8, 64, scan=False)
    train, test = problems.read_text()

    def init(key: jax.Array) -> Tree:
        def leaf(path: Any, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path)
            if "bias" in name:
                return jnp.zeros(x.shape)
            of_leaf = jax.random.fold_in(key, sum(map(ord, name)))
            noise = 0.05 * jax.random.normal(of_leaf, x.shape)
            return jnp.ones(x.shape) if "scale" in name else noise

        return jax.tree_util.tree_map_with_path(leaf, model.params)

    draw = lambda key, tokens, size: problems.stretches(key, tokens, size, 64)  # noqa: E731
    held_out = draw(jax.random.key(1), test, 128)
    return Problem(init, lambda key: draw(key, train, 8), model.loss, held_out, optax.adamw, 0.002)


PROBLEMS = {
    "GPT of the study, Adam": study_gpt,
    "larger GPT, AdamW": functools.partial(larger_gpt, 2, 64),
    "GPT of three layers of 192, AdamW": functools.partial(larger_gpt, 3, 192),
}


def train(problem: Problem, variant: Variant, steps: int, seed: int) -> jax.Array:
    """The test loss after so many steps."""
    schedule = optax.cosine_decay_schedule(problem.rate, steps)
    parts = [gcx.clip_by_global_norm(1.0), problem.optimizer(schedule)]
    tx = optax.chain(*parts, *[gcx.round_stochastically(seed)] * variant.is_random)
    init_key, data_key = jax.random.split(jax.random.key(seed))
    # All start from numbers of bfloat16.
    first = as_dtype(problem.init(init_key), jnp.bfloat16)
    params = as_dtype(first, variant.params)

    def step(carry: Any, index: jax.Array) -> Any:
        params, state = carry
        batch = problem.draw(jax.random.fold_in(data_key, index))
        grads = jax.grad(lambda p: problem.loss(as_read(p), batch))(params)
        return gcx.apply_gradients(tx, as_dtype(grads, variant.moments), state, params), None

    carry = (params, tx.init(as_dtype(first, variant.moments)))
    (params, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    return problem.loss(as_read(params), problem.test)


def as_dtype(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def as_read(params: Tree) -> Tree:
    """Float32 numbers that bfloat16 has; XLA would leave out a conversion there and back."""
    return jax.tree.map(lambda p: jax.lax.reduce_precision(p.astype(jnp.float32), 8, 7), params)


def table(name: str, steps: int, seeds: int) -> None:
    """Mean loss and its deviation over seeds, and the gap to float32 copies seed by seed."""
    problem, of_copies = PROBLEMS[name](), np.zeros(seeds)
    print(f"\n{name}, {steps:,} steps, {seeds} seeds\n")
    print("| parameters | test loss | standard deviation over seeds | gap, its standard error |")
    print("| --- | --- | --- | --- |", flush=True)
    for variant, choice in VARIANTS.items():
        run = jax.jit(functools.partial(train, problem, choice, steps))
        losses = np.array([run(seed) for seed in range(seeds)])
        of_copies = losses if variant == COPIES else of_copies
        gaps = losses - of_copies
        deviation, error = (statistics.stdev(x) if seeds > 1 else 0 for x in (losses, gaps))
        gap = f"{np.mean(gaps):+.4f} ± {error / seeds**0.5:.4f}"
        print(f"| {variant} | {np.mean(losses):.4f} | {deviation:.4f} | {gap} |", flush=True)


def main() -> None:
    """Trains what is chosen, and prints a table for each problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="problems with this in their name")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two steps, one seed, the GPT")
    options = parser.parse_args()
    if options.quick:
        options.only, options.steps, options.seeds = "study", 2, 1
    for name in PROBLEMS:
        if options.only in name:
            table(name, options.steps, options.seeds)


if __name__ == "__main__":
    main()
