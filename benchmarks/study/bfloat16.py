"""Training with parameters in bfloat16, rounded to nearest or at random, beside float32 copies.

All variants compute in float32 on parameters of bfloat16 and get the gradient in bfloat16; they
differ in how parameters and moments are kept. Prints the tables of docs/recipes/bfloat16.md.
"""

import argparse
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx
from benchmarks._models import gpt
from benchmarks.study import problems

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
demo = importlib.import_module("demo")
Tree = Any
COPIES = "float32 copies"
NEAREST = "bfloat16, to nearest"
RANDOM = "bfloat16, at random"


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


VARIANTS = {
    COPIES: Variant(jnp.float32, jnp.float32, False),
    NEAREST: Variant(jnp.bfloat16, jnp.float32, False),
    RANDOM: Variant(jnp.bfloat16, jnp.float32, True),
    f"{NEAREST}; moments too": Variant(jnp.bfloat16, jnp.bfloat16, False),
    f"{RANDOM}; moments to nearest": Variant(jnp.bfloat16, jnp.bfloat16, True),
}


class Problem(NamedTuple):
    """A model and its data.

    Attributes:
        init: of a random key.
        draw: a batch, of a random key.
        loss: of parameters and a batch.
        test: held-out data.
        optimizer: of a schedule.
        rate: the learning rate that falls to zero with a cosine.
    """

    init: Callable[[jax.Array], Tree]
    draw: Callable[[jax.Array], jax.Array]
    loss: Callable[[Tree, jax.Array], jax.Array]
    test: jax.Array
    optimizer: Callable[[Any], optax.GradientTransformation]
    rate: float


def demo_rnn() -> Problem:
    """The tanh RNN of `make demo`."""
    text = demo.read_text()
    train, test = jnp.split(text.tokens, [len(text.tokens) * 9 // 10])
    model = demo.CharRNN(len(text.vocabulary))

    def stretches(key: jax.Array, tokens: jax.Array, batch: int) -> jax.Array:
        starts = jax.random.randint(key, (batch, 1), 0, len(tokens) - demo.UNROLL)
        return tokens[starts + jnp.arange(demo.UNROLL + 1)]

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return problems.cross_entropy(logits, tokens[:, 1:])

    return Problem(
        lambda key: model.init(key, train[None, :2]),
        lambda key: stretches(key, train, 16),
        loss,
        stretches(jax.random.key(1), test, 256),
        optax.sgd,
        1.0,
    )


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
        leaves, structure = jax.tree.flatten(model.params)
        names = [str(path[-1]) for path, _ in jax.tree_util.tree_leaves_with_path(model.params)]
        keys = jax.random.split(key, len(leaves))

        def leaf(name: str, shape: Any, key: jax.Array) -> jax.Array:
            if "bias" in name:
                return jnp.zeros(shape)
            return jnp.ones(shape) if "scale" in name else 0.05 * jax.random.normal(key, shape)

        columns = zip(names, leaves, keys, strict=True)
        return jax.tree.unflatten(structure, [leaf(n, x.shape, k) for n, x, k in columns])

    draw = lambda key, tokens, size: problems.stretches(key, tokens, size, 64)  # noqa: E731
    held_out = draw(jax.random.key(1), test, 128)
    return Problem(init, lambda key: draw(key, train, 8), model.loss, held_out, optax.adamw, 0.002)


PROBLEMS = {
    "tanh RNN of the demo, SGD": demo_rnn,
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
    problem, of_copies = PROBLEMS[name](), [0.0] * seeds
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(problem.init, jax.random.key(0))))
    print(f"\n{name}, {size:,} parameters, {steps:,} steps, {seeds} seeds\n")
    print("| parameters | test loss | standard deviation over seeds | gap, its standard error |")
    print("| --- | --- | --- | --- |", flush=True)
    for variant, choice in VARIANTS.items():
        if problem.optimizer is optax.sgd and choice.moments == jnp.bfloat16:
            continue  # it has none
        start = time.process_time()
        run = jax.jit(functools.partial(train, problem, choice, steps))
        losses = [float(run(seed)) for seed in range(seeds)]
        if variant == COPIES:
            of_copies = losses
        gaps = [x - y for x, y in zip(losses, of_copies, strict=True)]
        deviation, error = (statistics.stdev(x) if seeds > 1 else 0 for x in (losses, gaps))
        gap = f"{statistics.mean(gaps):+.4f} ± {error / seeds**0.5:.4f}"
        cells = [variant, f"{statistics.mean(losses):.4f}", f"{deviation:.4f}"]
        cells.append("" if variant == COPIES else gap)
        print("| " + " | ".join(cells) + " |", flush=True)
        print(f"{variant}: {time.process_time() - start:.0f} s of CPU time", file=sys.stderr)


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
