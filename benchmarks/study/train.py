"""Runs of a problem with a method, many of them in one compiled program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip_jax as gcx
from benchmarks.study.methods import MICRO_BATCHES, Method, Setting
from benchmarks.study.problems import Batch, Params, Problem

RECORDED_STEPS = 100


class Choice(NamedTuple):
    """What a method is free to choose."""

    learning_rate: Any
    value: Any  # of its hyperparameter


class Start(NamedTuple):
    """What a seed determines: equal for all methods, so that their results are pairs."""

    params: Params
    batches: Batch  # of all steps, stacked


@functools.cache
def make_starts(problem: Problem, seeds: tuple[int, ...]) -> Start:
    """Initial parameters and batches of several seeds, stacked."""

    def one(seed: jax.Array) -> Start:
        init_key, key = jax.random.split(jax.random.key(seed))
        steps = jnp.arange(problem.steps)
        draw = jax.vmap(lambda step: problem.draw(jax.random.fold_in(key, step), step))
        return Start(problem.init(init_key), draw(steps))

    return jax.jit(jax.vmap(one))(np.array(seeds))


def make_optimizer(name: str, learning_rate: Any) -> optax.GradientTransformation:
    if name == "sgd":
        return optax.sgd(learning_rate, momentum=0.9)
    return optax.adam(learning_rate)


def falling_to_zero(learning_rate: Any, steps: int) -> Callable[[Any], Any]:
    return lambda step: learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * step / steps))


def of_example(loss: Any) -> Any:
    """The mean loss of a batch as that of one example."""
    return lambda params, example: loss(params, jax.tree.map(lambda x: x[None], example))


def record_norms(problem: Problem, start: Start, learning_rate: Any) -> tuple[jax.Array, Any, Any]:
    """Norms of the gradient, of each leaf, of each example in the first steps without clipping."""
    norms_of_examples = gcx.per_example.norms(of_example(problem.loss))
    tx = make_optimizer(problem.optimizer, falling_to_zero(learning_rate, problem.steps))

    def step(carry: Any, batch: Batch):
        params, state = carry
        grads = jax.grad(problem.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        of_examples = norms_of_examples(params, batch)
        norms = gcx.global_norm(grads), gcx.leaf_norms(grads), of_examples
        return (optax.apply_updates(params, updates), state), norms

    first = jax.tree.map(lambda x: x[:RECORDED_STEPS], start.batches)
    return jax.lax.scan(step, (start.params, tx.init(start.params)), first)[1]


def mean_of_clipped(loss: Any, params: Params, batch: Batch, max_norm: Any) -> tuple[Any, Params]:
    """Loss, and the mean of the gradients of micro-batches, each clipped by itself."""

    def one(part: Batch) -> tuple[Any, Params]:
        value, grads = jax.value_and_grad(loss)(params, part)
        return value, gcx.clip_grad_norm(grads, max_norm)[0]

    parts = jax.tree.map(lambda x: x.reshape(MICRO_BATCHES, -1, *x.shape[1:]), batch)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.vmap(one)(parts))


def train(problem: Problem, method: Method, test: Batch, start: Start, choice: Choice):
    """Test loss after the training."""
    setting = Setting(
        functools.partial(make_optimizer, problem.optimizer),
        falling_to_zero(choice.learning_rate, problem.steps),
        choice.value,
        lambda: record_norms(problem, start, choice.learning_rate)[0],
        {name: name == "head" for name in start.params},
    )
    tx = method.build(setting)
    half = problem.dtype == jnp.float16
    tx = gcx.dynamic_loss_scale(tx) if half else optax.with_extra_args_support(tx)

    def step(carry: Any, batch: Batch):
        params, state = carry

        def loss(params: Params, batch: Batch) -> jax.Array:
            value = problem.loss(params, batch)
            return gcx.scale_loss(state, value) if half else value

        max_norm = choice.value * (gcx.metrics(state)["loss_scale"] if half else 1.0)
        if method.clips_each == "micro-batch":
            value, grads = mean_of_clipped(loss, params, batch, max_norm)
        elif method.clips_each == "example":
            clipped = gcx.per_example.value_and_grad(of_example(loss), max_norm)
            (value, _), grads = clipped(params, batch)
        else:
            value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, value=value)
        return (optax.apply_updates(params, updates), state), None

    (trained, _), _ = jax.lax.scan(step, (start.params, tx.init(start.params)), start.batches)
    return problem.loss(trained, test)


class Result(NamedTuple):
    """Test loss of a run; where it failed, that of the best constant prediction."""

    loss: float
    failed: bool  # diverged, or no better than that prediction


class Trainer:
    """Trains one problem with one method from several seeds; compiles once for a number of them."""

    CHOICES = 5  # in one call of the compiled program

    def __init__(self, problem: Problem, method: Method):
        self.problem, self.test = problem, problem.test()
        self.constant_loss = float(problem.constant_loss(self.test))
        for_choices = jax.vmap(functools.partial(train, problem, method), (None, None, 0))
        self.program = jax.jit(jax.vmap(for_choices, (None, 0, None)))

    def __call__(self, choices: Sequence[Choice], seeds: tuple[int, ...]) -> list[list[Result]]:
        """A list of results, one for each seed, for each choice."""
        starts, results = make_starts(self.problem, seeds), []
        for first in range(0, len(choices), self.CHOICES):
            chosen = list(choices[first : first + self.CHOICES])
            padded = chosen + chosen[-1:] * (self.CHOICES - len(chosen))
            columns = Choice(*(np.array(c, np.float32) for c in zip(*padded, strict=True)))
            losses = np.asarray(self.program(self.test, starts, columns)).T
            failed = ~(losses < self.constant_loss)  # also where it is NaN
            losses = np.where(failed, self.constant_loss, losses)
            rows = zip(losses.tolist(), failed.tolist(), strict=True)
            results += [list(map(Result, *row)) for row in rows][: len(chosen)]
        return results


@functools.cache
def usual_norms(problem: Problem, seeds: tuple[int, ...]) -> dict[str, float]:
    """Medians over the first steps without clipping, at the lowest learning rate."""
    starts = make_starts(problem, seeds)
    record = functools.partial(record_norms, problem, learning_rate=min(problem.learning_rates))
    norms, of_leaves, of_examples = jax.jit(jax.vmap(record))(starts)
    parameters = sum(x[0].size for x in starts.params.values())
    norm = float(np.nanmedian(norms))
    leaf_norm = float(np.nanmedian(np.stack(jax.tree.leaves(of_leaves))))
    return {
        "norm": norm,
        "leaf norm": leaf_norm,
        "example norm": float(np.nanmedian(of_examples)),
        "rms": norm / parameters**0.5,
    }
