"""Trains a plain tanh RNN on real text three times: no clipping, clipping, clipping + accumulation.

The network is that of Pascanu, Mikolov and Bengio (2013, arXiv 1211.5063), whose gradients
explode. The text is the manual that ships with every CPython, one character at a time.
`make demo DEMO_ARGS=--help` lists the options.
"""

import argparse
import functools
import math
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_report import Run, table, verdict, write_files
from flax import linen as nn
from tqdm import tqdm

import gradclip_jax as gcx

HIDDEN, UNROLL = 128, 100  # units; characters a gradient travels back through


class Text(NamedTuple):
    tokens: np.ndarray  # int32[characters]
    vocabulary: str


# The text and the network


def read_text() -> Text:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    vocabulary = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(vocabulary)}
    return Text(np.array([index[character] for character in text], np.int32), vocabulary)


def draw_batches(tokens: np.ndarray, steps: int, batch_size: int, seed: int) -> np.ndarray:
    """Random stretches of the text, int32[steps, batch_size, UNROLL + 1]."""
    last = len(tokens) - UNROLL - 1
    starts = np.random.default_rng(seed).integers(0, last, (steps, batch_size, 1))
    return tokens[starts + np.arange(UNROLL + 1)]


class CharRNN(nn.Module):
    vocabulary_size: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        # Orthogonal: at the start a gradient neither grows nor fades with distance, so that
        # what explodes later was made by training and not by the initialisation.
        cell = nn.SimpleCell(HIDDEN, recurrent_kernel_init=nn.initializers.orthogonal())
        hidden = nn.RNN(cell)(nn.Embed(self.vocabulary_size, HIDDEN)(tokens))
        return nn.Dense(self.vocabulary_size)(hidden)


# Training


def make_step(model: nn.Module, tx: optax.GradientTransformation) -> Any:
    def bits_per_character(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean() / math.log(2)

    # Donated: parameters and state are updated in the buffers they came in.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        bits, grads = jax.value_and_grad(bits_per_character)(params, tokens)
        params, state = gcx.apply_gradients(tx, grads, state, params)
        return params, state, {"bits": bits, **gcx.metrics(state)}

    return step


def train(
    name: str,
    model: nn.Module,
    params: Any,
    batches: np.ndarray,
    *,
    learning_rate: float,
    max_norm: float,
    micro_batches: int = 1,
) -> Run:
    tx = optax.chain(gcx.clip_by_global_norm(max_norm), optax.sgd(learning_rate))
    if micro_batches > 1:
        # Around the clipping: it is the mean over the whole batch that is clipped.
        tx = gcx.accumulate_gradients(tx, every=micro_batches)
    steps, batch_size, length = batches.shape
    batches = batches.reshape(steps, micro_batches, batch_size // micro_batches, length)
    params = jax.tree.map(jnp.copy, params)  # the step overwrites its own
    state = tx.init(params)
    # Compiled before the clock starts; it also knows how much memory it will need.
    step = make_step(model, tx).lower(params, state, batches[0, 0]).compile()
    memory = step.memory_analysis()

    rows = []
    start = time.perf_counter()
    bar = tqdm(batches, desc=f"{name:23}", unit="step", mininterval=0.5)
    for batch in bar:
        losses = []
        for micro_batch in batch:
            params, state, found = step(params, state, micro_batch)
            losses.append(found["bits"])
        rows.append((np.mean(losses), float(found["grad_norm"]), float(found["clip_factor"])))
        if len(rows) % 20 == 0:
            bar.set_postfix_str(f"{rows[-1][0]:.2f} bits per character", refresh=False)
    seconds = time.perf_counter() - start
    scratch_mib = memory.temp_size_in_bytes / 2**20 if memory else None
    columns = np.array(rows, np.float64).T
    return Run(name, micro_batches, *columns, seconds, scratch_mib)


# The command line


def positive(kind: type) -> Any:
    """A parser of numbers > 0 that says what was wrong."""
    rule = "an integer >= 1" if kind is int else "a finite number > 0"

    def parse(word: str) -> Any:
        try:
            value = kind(word)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {rule}, got {word!r}")
        return value

    return parse


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count, number, add = positive(int), positive(float), parser.add_argument
    add("--steps", type=count, default=1000, metavar="N", help="optimizer steps of each run")
    add("--learning-rate", type=number, default=1.0, metavar="X", help="of plain SGD")
    add("--max-norm", type=number, default=1.0, metavar="X", help="threshold of the clipping")
    add("-k", "--micro-batches", type=count, default=4, metavar="K", help="of one batch, run 3")
    add("--batch-size", type=count, default=32, metavar="B", help="stretches of text in one step")
    add("--seed", type=int, default=0, metavar="S", help="of the parameters and the data order")
    add("--out", type=Path, default=Path("demo_output"), metavar="DIR", help="folder for files")
    args = parser.parse_args(words)
    if args.batch_size % args.micro_batches:
        parser.error(
            f"argument --batch-size: must be a multiple of --micro-batches, "
            f"got {args.batch_size} and {args.micro_batches}"
        )
    if not 0 <= args.seed < 2**32:
        parser.error(f"argument --seed: must be an integer >= 0 and < 2**32, got {args.seed}")
    try:  # before the training, not after it
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"argument --out: must be a folder that can be made: {problem}")
    return args


def main(words: list[str] | None = None) -> None:
    args = read_arguments(words)
    text = read_text()
    batches = draw_batches(text.tokens, args.steps, args.batch_size, args.seed)
    model = CharRNN(len(text.vocabulary))
    params = jax.jit(model.init)(jax.random.key(args.seed), batches[0, :, :-1])
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{len(text.tokens):,} characters, {len(text.vocabulary)} different ones. Tanh RNN, "
        f"{HIDDEN} units, unrolled {UNROLL} steps, {size:,} parameters, SGD at "
        f"{args.learning_rate:g}, batches of {args.batch_size}."
    )
    run = functools.partial(train, model=model, params=params, batches=batches)
    run = functools.partial(run, learning_rate=args.learning_rate)
    runs = [
        run("no clipping", max_norm=math.inf),  # measures the norm, and never clips
        run("clipping", max_norm=args.max_norm),
        run("clipping + accumulation", max_norm=args.max_norm, micro_batches=args.micro_batches),
    ]
    print("", table(runs), "", *verdict(runs), sep="\n")
    write_files(args.out, runs, vars(args) | {"out": str(args.out)})
    print(f"\nWritten: demo.png, demo.csv and demo.json in {args.out}")


if __name__ == "__main__":
    main()
