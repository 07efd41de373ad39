"""What whole training steps do not show: clips beside other libraries, and ways to hold a step.

`make bench` runs it, with `steps.py`, which times whole steps. It writes the tables of this device
in benchmarks/README.md.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import _report
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Case, copy_bandwidth, fresh, in_turn, interleaved, tree_bytes
from _models import gpt, resnet, small_leaves
from _report import Rows

import gradclip_jax as gcx

Tree = Any
REPETITIONS = 15


def compare(title: str, cases: dict[str, Case], group: int, unit: float) -> Rows:
    """Interleaves the cases; the first is ours. `unit` bytes for scratch."""
    timings = interleaved(cases, REPETITIONS, group)
    ours = next(iter(timings.values()))
    return [
        {
            "what": f"{title}: {name}",
            "ms": round(timing.median * 1e3, 3),
            "spread": f"{timing.spread:.0%}",
            "ratio to ours": round(timing.median / ours.median, 2),
            "scratch/N": round(timing.scratch_bytes / unit, 3),
        }
        for name, timing in timings.items()
    ]


def beside(models: dict[str, Tree]) -> Rows:
    """Clips of other libraries, where they are installed: `pip install torch jax_privacy`."""
    rows: Rows = []
    clips = {"gcx.clip_grad_norm": _our_clip, "optax.clip_by_global_norm": _optax_clip}
    if importlib.util.find_spec("jax_privacy"):
        from jax_privacy.clipping import clip_pytree

        clips["jax_privacy clip_pytree"] = lambda t, max_norm: clip_pytree(t, max_norm)[0]
    for model, tree in models.items():
        calls = {name: _in_place(clip, tree) for name, clip in clips.items()}
        if importlib.util.find_spec("torch") and jax.default_backend() == "cpu":
            calls["torch clip_grad_norm_(foreach=True)"] = _torch_clip(tree)
        for call in calls.values():  # to compile
            jax.block_until_ready(call())
        seconds = in_turn(calls, REPETITIONS)
        ours = np.median(next(iter(seconds.values())))
        rows += [
            {
                "what": f"{model}: {name}",
                "ms": round(float(np.median(times)) * 1e3, 3),
                "ratio to ours": round(float(np.median(times) / ours), 2),
            }
            for name, times in seconds.items()
        ]
    return rows


def _our_clip(tree: Tree, max_norm: Any) -> Tree:
    return gcx.clip_grad_norm(tree, max_norm)[0]


def _optax_clip(tree: Tree, max_norm: Any) -> Tree:
    return optax.clip_by_global_norm(max_norm).update(tree, optax.EmptyState())[0]


def _tighter(clip: Callable[[Tree, Any], Tree]) -> Callable[[Any], Any]:
    """A step that clips what it clipped before, to less: what is within bounds costs no write."""
    return lambda carry: (clip(*carry), 0.9 * carry[1])


def _in_place(clip: Callable[[Tree, Any], Tree], tree: Tree) -> Callable[[], Any]:
    """A call that clips a tree of its own again and again, donated."""
    carry = (fresh(tree)(), jnp.float32(1.0))
    program = jax.jit(_tighter(clip), donate_argnums=0)

    def call() -> Any:
        nonlocal carry
        carry = program(carry)
        return carry

    return call


def _torch_clip(tree: Tree) -> Callable[[], None]:
    import torch

    parameters = [torch.empty(x.shape) for x in jax.tree.leaves(tree)]
    for parameter, x in zip(parameters, jax.tree.leaves(tree), strict=True):
        parameter.grad = torch.from_numpy(np.array(x))
    max_norm = 1.0

    def call() -> None:
        nonlocal max_norm
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        max_norm *= 0.9

    return call


def _loop(emits: jax.Array, step: Callable[[Tree], Tree], carry: Tree) -> Tree:
    def body(state: Any) -> Any:
        return jnp.array(False), step(state[1])

    return jax.lax.while_loop(lambda state: state[0], body, (emits, carry))[1]


def _select(emits: jax.Array, step: Callable[[Tree], Tree], carry: Tree) -> Tree:
    return jax.tree.map(functools.partial(jnp.where, emits), step(carry), carry)


def _cond(emits: jax.Array, step: Callable[[Tree], Tree], carry: Tree) -> Tree:
    return jax.lax.cond(emits, step, lambda carry: carry, carry)


def zero_or_one(params: Tree, grads: Tree, inner: Any) -> Rows:
    """The same accumulation with a loop of zero or one trip, `lax.cond`, and a select."""
    size, k, rows = tree_bytes(params), 8, Rows()

    def micro_step(run_if: Any, every: int) -> Callable[..., Any]:
        def emit(carry: Tree) -> Tree:
            params, state, acc = carry
            updates, state = inner.update(jax.tree.map(lambda x: x / k, acc), state, params)
            return optax.apply_updates(params, updates), state, acc

        def step(carry: Any, grads: Tree) -> Any:
            count, params, state, acc = carry
            acc = jax.tree.map(lambda a, g: jnp.where(count == 0, 0, a) + g, acc, grads)
            emits = count == every - 1
            return jnp.where(emits, 0, count + 1), *run_if(emits, emit, (params, state, acc))

        return step

    def scanned(step: Callable[..., Any]) -> Callable[..., Any]:
        def window(carry: Any, grads: Tree) -> Any:
            return jax.lax.scan(lambda c, _: (step(c, grads), None), carry, None, length=k)[0]

        return window

    def begin() -> Any:
        return fresh((jnp.zeros((), jnp.int32), params, inner.init(params), params))()

    ways = {"loop": _loop, "lax.cond": _cond, "select": _select}
    plans = {
        "hold step": (1, lambda way: micro_step(way, 10**9)),
        f"window of {k} calls": (k, lambda way: micro_step(way, k)),
        f"window of {k} in one lax.scan": (1, lambda way: scanned(micro_step(way, k))),
    }
    for what, (group, make) in plans.items():
        cases = {name: Case(make(way), begin, (grads,)) for name, way in ways.items()}
        rows += compare(what, cases, group, size)
    return rows


def main() -> None:
    """Runs both sections and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small trees, printed only")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--only", default="", help="sections with this in their title")
    options = parser.parse_args()
    scale = 8 if options.quick else 1
    models = {
        "GPT-2 124M": gpt(12 // scale, 768 // scale, 50257 // scale, 1, 1024, scan=False),
        "ResNet-50": resnet((3, 4, 6, 3), 64 // scale, 1, 224, 1000),
        "2,000 small leaves": small_leaves(2000 // scale, 1000),
    }
    square = {f"w{i}": jnp.ones((2048 // scale,) * 2) for i in range(8)}
    plan: dict[str, Callable[[], Rows]] = {
        "Clips of other libraries, in place, float32": lambda: [
            line for name, model in models.items() for line in beside({name: model.arrays()[0]})
        ],
        "A step zero or one times, adamw (8 x 2048 x 2048)": lambda: zero_or_one(
            square, square, optax.adamw(1e-4)
        ),
    }
    sections: dict[str, Rows] = {}
    chosen = {title: run for title, run in plan.items() if options.only in title}
    if not chosen:
        parser.error(f"argument --only: {options.only!r} is in none of {list(plan)}")
    for title, run in chosen.items():
        sections[title] = run()
        print(f"\n{title}\n{_report.table(sections[title])}", flush=True)
    if not (options.no_write or options.quick):
        bandwidth = round(copy_bandwidth() / 1e9, 2)
        print(f"\nwritten to {_report.write(sections, copy_bandwidth_GB_per_s=bandwidth)}")


if __name__ == "__main__":
    main()
