"""The benchmark suite: ours, Optax and the physical floor, side by side in one process.

`make bench` runs it. It writes benchmarks/results/<device>.json and the tables of that device in
benchmarks/README.md. Nothing here assumes a CPU.
"""

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import _report
import _trees as trees
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Case, Timing, copy_bandwidth, fresh, in_turn, interleaved, tree_bytes
from _report import Rows

import gradclip_jax as gcx

Tree = Any
REPETITIONS = 15


def row(what: str, timing: Timing, ours: Timing, **more: Any) -> dict[str, Any]:
    """One line: time, spread, and how much longer it takes than ours."""
    return {
        "what": what,
        "ms": round(timing.median * 1e3, 3),
        "spread": f"{timing.spread:.0%}",
        "ratio to ours": round(timing.median / ours.median, 2),
        **more,
    }


def compare(
    title: str, cases: dict[str, Case], floor: float | None = None, group: int = 1, unit: float = 1
) -> Rows:
    """Interleaves the cases; the first is ours. `floor` in seconds, `unit` bytes for scratch."""
    timings = interleaved(cases, REPETITIONS, group)
    ours = next(iter(timings.values()))
    rows: Rows = []
    for name, timing in timings.items():
        more: dict[str, Any] = {"scratch/N": round(timing.scratch_bytes / unit, 3)}
        if floor is not None:
            more["time/floor"] = round(timing.median / floor, 2)
        rows.append(row(f"{title}: {name}", timing, ours, **more))
    return rows


def _zero() -> jax.Array:
    return jnp.zeros(())


def norms_and_clips(models: dict[str, Tree], bandwidth: float) -> Rows:
    """Norm: one read. Clip: two reads and a write."""
    rows: Rows = []
    clip, theirs = gcx.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)
    for model, tree in models.items():
        size = tree_bytes(tree)
        norms = {
            "gcx.global_norm": Case(lambda _, t: gcx.global_norm(t), _zero, (tree,)),
            "optax.tree.norm": Case(
                lambda _, t: optax.tree.norm(t).astype(jnp.float32), _zero, (tree,)
            ),
        }
        # The bandwidth is that of read + write; reading alone is at least as fast.
        rows += compare(model, norms, size / bandwidth, unit=size)
        clips = {
            "gcx.clip_by_global_norm": Case(
                lambda t: jax.tree.map(jnp.negative, clip.update(t, None)[0]), fresh(tree)
            ),
            "optax.clip_by_global_norm": Case(
                lambda t: jax.tree.map(jnp.negative, theirs.update(t, optax.EmptyState())[0]),
                fresh(tree),
            ),
        }
        rows += compare(model, clips, 3 * size / bandwidth, unit=size)
    return rows


def _train(tx: Any, grads: Tree) -> Callable[..., Any]:
    def step(carry: Any, grads: Tree) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _fast(tx: Any) -> Callable[..., Any]:
    def step(carry: Any, grads: Tree) -> Any:
        params, state = carry
        return gcx.apply_gradients(tx, grads, state, params)

    return step


def _start(tx: Any, params: Tree) -> Callable[[], Any]:
    return lambda: fresh((params, tx.init(params)))()


def optimizer_steps(params: Tree, grads: Tree) -> Rows:
    """What a clip, a guard and the alternatives add to a step of AdamW."""
    size = tree_bytes(params)
    adamw = optax.adamw(1e-4)
    choices = {
        "gcx clip + adamw": optax.chain(gcx.clip_by_global_norm(1.0), adamw),
        "adamw alone": adamw,
        "optax clip + adamw": optax.chain(optax.clip_by_global_norm(1.0), adamw),
        "zclip + adamw": optax.chain(gcx.zclip(), adamw),
        "record_norms + gcx clip + adamw": optax.chain(
            gcx.record_norms(), gcx.clip_by_global_norm(1.0), adamw
        ),
    }
    cases = {n: Case(_train(tx, grads), _start(tx, params), (grads,)) for n, tx in choices.items()}
    return compare("step", cases, unit=size)


def guards(params: Tree, grads: Tree) -> Rows:
    """A good step and a bad one, guarded or not."""
    size, rows = tree_bytes(params), Rows()
    first, *others = params
    bad = {**grads, first: grads[first].at[(0,) * grads[first].ndim].set(jnp.nan)}
    adamw = optax.adamw(1e-4)
    ours, theirs = gcx.skip_nonfinite(adamw), optax.apply_if_finite(adamw, 1000)
    for kind, given in {"good step": grads, "bad step": bad}.items():
        cases = {
            "skip_nonfinite, apply_gradients": Case(_fast(ours), _start(ours, params), (given,)),
            "skip_nonfinite, update": Case(_train(ours, given), _start(ours, params), (given,)),
            "optax.apply_if_finite": Case(_train(theirs, given), _start(theirs, params), (given,)),
            "adamw alone": Case(_train(adamw, given), _start(adamw, params), (given,)),
        }
        rows += compare(kind, cases, unit=size)
    return rows


def accumulation(params: Tree, grads: Tree, inner: Any, label: str) -> Rows:
    """Seven hold steps and an emission; the floor is the bare addition."""
    size, k = tree_bytes(params), 8
    ours, theirs = gcx.accumulate_gradients(inner, k), optax.MultiSteps(inner, k)
    held = gcx.accumulate_gradients(inner, 10**9)
    held_theirs = optax.MultiSteps(inner, 10**9)
    addition = Case(lambda a, g: jax.tree.map(jnp.add, a, g), fresh(params), (grads,))
    holds = {
        "apply_gradients": Case(_fast(held), _start(held, params), (grads,)),
        "update + apply_updates": Case(_train(held, grads), _start(held, params), (grads,)),
        "optax.MultiSteps": Case(_train(held_theirs, grads), _start(held_theirs, params), (grads,)),
        "floor: acc += g": addition,
    }
    windows = {
        "apply_gradients": Case(_fast(ours), _start(ours, params), (grads,)),
        "update + apply_updates": Case(_train(ours, grads), _start(ours, params), (grads,)),
        "optax.MultiSteps": Case(_train(theirs, grads), _start(theirs, params), (grads,)),
        "one inner step": Case(_train(inner, grads), _start(inner, params), (grads,)),
        "floor: 8 additions": addition,
    }
    rows = compare(f"{label}, hold step", holds, unit=size)
    windows_rows = compare(f"{label}, window of {k}", windows, group=k, unit=size)
    for line in windows_rows:
        if "one inner step" in line["what"]:
            line["what"] += " x 8"
    return rows + windows_rows


def micro_batches(width: int, batch: int, parts: int) -> Rows:
    """One large MLP step, split inside the step."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {f"w{i}": jax.random.normal(keys[i], (width, width)) / width**0.5 for i in range(3)}
    x = jax.random.normal(keys[3], (batch, width))

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def total(params: Tree, x: jax.Array) -> jax.Array:
        return loss(params, x) * x.shape[0] / batch

    size = tree_bytes(params)
    grads = jax.tree.map(jnp.zeros_like, params)

    def case(value_and_grad: Callable[..., Any]) -> Case:
        return Case(lambda _, p, x: value_and_grad(p, x)[1], fresh(grads), (params, x))

    cases = {
        "gcx.microbatched_value_and_grad": case(gcx.microbatched_value_and_grad(loss, parts)),
        "optax.microbatch": case(_optax_microbatch(total, batch // parts)),
        "jax.value_and_grad, whole batch": case(jax.value_and_grad(loss)),
    }
    return compare(f"{parts} parts", cases, unit=size)


def _optax_microbatch(total: Callable[..., Any], size: int) -> Callable[..., Any]:
    from optax import microbatching

    return microbatching.microbatch(jax.value_and_grad(total), 1, size)


def beside(models: dict[str, Tree]) -> Rows:
    """Clips of other libraries, where they are installed: `pip install torch jax_privacy`."""
    rows: Rows = []
    clips: dict[str, Callable[[Tree], Tree]] = {
        "gcx.clip_grad_norm": lambda t: gcx.clip_grad_norm(t, 1.0)[0],
        "optax.clip_by_global_norm": lambda t: _optax_clip(t, optax.EmptyState())[0],
    }
    if importlib.util.find_spec("jax_privacy"):
        from jax_privacy.clipping import clip_pytree

        clips["jax_privacy clip_pytree"] = lambda t: clip_pytree(t, 1.0)[0]
    for model, tree in models.items():
        calls = {name: _in_place(clip, tree) for name, clip in clips.items()}
        if importlib.util.find_spec("torch"):
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


_optax_clip = optax.clip_by_global_norm(1.0).update


def _in_place(clip: Callable[[Tree], Tree], tree: Tree) -> Callable[[], Tree]:
    """A call that clips a tree of its own again and again, donated."""
    own = fresh(tree)()
    program = jax.jit(clip, donate_argnums=0)

    def call() -> Tree:
        nonlocal own
        own = program(own)
        return own

    return call


def _torch_clip(tree: Tree) -> Callable[[], None]:
    import torch

    parameters = [torch.empty(x.shape) for x in jax.tree.leaves(tree)]
    for parameter, x in zip(parameters, jax.tree.leaves(tree), strict=True):
        parameter.grad = torch.from_numpy(np.array(x))
    clip = torch.nn.utils.clip_grad_norm_

    def call() -> None:
        clip(parameters, 1.0, foreach=True)

    return call


def compile_times(counts: list[int]) -> Rows:
    """Trace and compile time of trees of many small leaves."""
    rows: Rows = []
    for count in counts:
        tree = trees.random_tree(trees.many_small(count))
        choices = {
            "gcx.global_norm": gcx.global_norm,
            "optax.tree.norm": optax.tree.norm,
            "gcx clip": lambda t: gcx.clip_by_global_norm(1.0).update(t, None),
            "optax clip": lambda t: optax.clip_by_global_norm(1.0).update(t, optax.EmptyState()),
            "gcx leaf clip": lambda t: gcx.clip_by_leaf_norm(1.0).update(t, None),
        }
        for name, function in choices.items():
            start = time.perf_counter()
            lowered = jax.jit(function).trace(tree).lower()
            middle = time.perf_counter()
            lowered.compile()
            end = time.perf_counter()
            rows.append(
                {
                    "what": f"{count} leaves: {name}",
                    "trace s": round(middle - start, 2),
                    "compile s": round(end - middle, 2),
                }
            )
    return rows


def growth(bandwidth: float, scale: int) -> Rows:
    """Cost of a clip against the number of leaves, of elements, and of a window against k."""
    rows: Rows = []
    clip = gcx.clip_by_global_norm(1.0)
    for leaves in (1, 10, 100, 1000):
        tree = trees.random_tree({f"l{i}": (1_000_000 // scale // leaves,) for i in range(leaves)})
        case = Case(lambda t: clip.update(t, None)[0], fresh(tree))
        timing = interleaved({"clip": case}, REPETITIONS)["clip"]
        floor = 3 * tree_bytes(tree) / bandwidth
        rows.append(
            {
                "what": f"clip, {1e6 / scale:.0e} elements in {leaves} leaves",
                "ms": timing.median * 1e3,
                "time/floor": timing.median / floor,
            }
        )
    for elements in (10**5, 10**6, 10**7, 5 * 10**7):
        elements //= scale
        tree = trees.random_tree({"x": (elements,)})
        case = Case(lambda t: clip.update(t, None)[0], fresh(tree))
        timing = interleaved({"clip": case}, REPETITIONS)["clip"]
        floor = 3 * tree_bytes(tree) / bandwidth
        rows.append(
            {
                "what": f"clip, {elements:.0e} elements",
                "ms": timing.median * 1e3,
                "time/floor": timing.median / floor,
            }
        )
    params = trees.random_tree(trees.few_large(4, 1024 // scale))
    for k in (1, 2, 4, 8, 16):
        tx = gcx.accumulate_gradients(optax.adamw(1e-4), k)
        case = Case(_fast(tx), _start(tx, params), (params,))
        timing = interleaved({"window": case}, REPETITIONS, group=k)["window"]
        rows.append(
            {
                "what": f"window of {k}, a micro-batch",
                "ms": timing.median * 1e3 / k,
                "time/floor": "",
            }
        )
    return rows


def main() -> None:
    """Runs all sections and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small trees, to see that it runs")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--only", default="", help="sections with this in their title, printed")
    options = parser.parse_args()
    scale = 8 if options.quick else 1
    bandwidth = copy_bandwidth((1 << 28) // scale)
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s", flush=True)

    def model(shapes: trees.Shapes, dtype: Any = "float32") -> Tree:
        return trees.random_tree(shapes, dtype)

    gpt2 = trees.gpt2(layers=12 // scale or 1, vocabulary=50257 // scale)
    square = trees.few_large(8, 2048 // scale)
    params, grads = model(square), trees.random_tree(square, seed=1)
    clip_adamw = optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-4))
    muon = optax.contrib.muon(1e-3) if hasattr(optax, "contrib") else optax.adamw(1e-3)
    small = trees.random_tree(trees.few_large(4, 512 // scale))
    models = {
        "GPT-2 124M, float32": functools.partial(model, gpt2),
        "GPT-2 124M, bfloat16": functools.partial(model, gpt2, "bfloat16"),
        "GPT-2 124M, mixed": functools.partial(model, gpt2, "mixed"),
        "Llama-like, 2 of 16 layers": functools.partial(
            model, trees.llama(layers=2, vocabulary=32000 // scale), "float32"
        ),
        "ResNet-50": functools.partial(model, trees.resnet50()),
        "2,000 small leaves": functools.partial(model, trees.many_small(2000 // scale)),
    }
    plan: dict[str, Callable[[], Rows]] = {
        "Norm and clip": lambda: [
            line
            for name, make in models.items()
            for line in norms_and_clips({name: make()}, bandwidth)
        ],
        "A clip in a step of AdamW (8 x 2048 x 2048)": lambda: optimizer_steps(params, grads),
        "Guards (8 x 2048 x 2048)": lambda: guards(params, grads),
        "Accumulation (8 x 2048 x 2048)": lambda: accumulation(
            params, grads, clip_adamw, "clip + adamw"
        ),
        "Accumulation, muon (4 x 512 x 512)": lambda: accumulation(small, small, muon, "muon"),
        "Micro-batches in one step": lambda: micro_batches(1024 // scale, 512, 8),
        "Clips of other libraries, in place, float32": lambda: beside(
            {
                name: models[name]()
                for name in ("GPT-2 124M, float32", "ResNet-50", "2,000 small leaves")
            }
        ),
        "Trace and compile": lambda: compile_times([1000 // scale, 2000 // scale]),
        "Growth": lambda: growth(bandwidth, scale),
    }
    sections: dict[str, Rows] = {}
    chosen = {title: run for title, run in plan.items() if options.only in title}
    if not chosen:
        parser.error(f"argument --only: {options.only!r} is in none of {list(plan)}")
    for title, run in chosen.items():
        sections[title] = run()
        print(f"\n{title}\n{_report.table(sections[title])}", flush=True)
    if not (options.no_write or options.only):
        path = _report.write(sections, copy_bandwidth_GB_per_s=round(bandwidth / 1e9, 2))
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
