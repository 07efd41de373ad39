"""Norms and clips, alone, beside those of other libraries, and in a step of an optimizer."""

import importlib.util
from collections.abc import Callable
from typing import Any

import _trees as trees
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _compare import REPETITIONS, Tree, compare, fast, start, train
from _measure import Case, fresh, in_turn, interleaved, tree_bytes
from _programs import PROGRAMS
from _report import Rows

import gradclip_jax as gcx

COMPILED = (
    "clip",
    "clip by leaf norm",
    "adaptive_grad_clip",
    "skip_nonfinite(AdamW), apply_gradients",
    "hold (and emission inside) of AdamW, apply_gradients",
)


def _zero() -> jax.Array:
    return jnp.zeros(())


def norms_and_clips(models: dict[str, Tree], bandwidth: float) -> Rows:
    """Norm: one read. Clip: two reads and a write; Optax's twice, to see what is chance."""
    rows: Rows = []
    clip, theirs = gcx.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)

    def optax_clip(tree: Tree) -> Tree:
        return jax.tree.map(jnp.negative, theirs.update(tree, optax.EmptyState())[0])

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
            "optax.clip_by_global_norm": Case(optax_clip, fresh(tree)),
            "optax.clip_by_global_norm, once more": Case(optax_clip, fresh(tree)),
        }
        rows += compare(model, clips, 3 * size / bandwidth, unit=size)
    return rows


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
    cases = {n: Case(train(tx), start(tx, params), (grads,)) for n, tx in choices.items()}
    return compare("step", cases, unit=size)


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


def compile_times(leaves: int) -> Rows:
    """CPU seconds to trace and to compile programs for many small leaves."""
    few = leaves // 3
    kinds = {
        f"{leaves} x 64": {f"leaf{i}": (64,) for i in range(leaves)},
        f"{few} matrices of 16 shapes": trees.many_small(few),
    }
    rows: Rows = []
    for kind, shapes in kinds.items():
        tree = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
        for title in COMPILED:
            ours: float | None = None
            for who, make in PROGRAMS[title].makers().items():
                found = make().compile_for("cpu", tree)
                both = found.trace_seconds + found.compile_seconds
                ours = ours or both
                rows.append(
                    {
                        "what": f"{kind}, {title}: {who}",
                        "trace s": round(found.trace_seconds, 2),
                        "compile s": round(found.compile_seconds, 2),
                        "ratio to ours": round(both / ours, 2),
                    }
                )
    return rows


def growth(bandwidth: float, scale: int) -> Rows:
    """Cost of a clip against the number of leaves, of elements, and of a window against k."""
    rows: Rows = []
    held = gcx.accumulate_gradients(optax.sgd(1e-4), 10**9)
    for leaves in (1, 10, 100, 1000, 2000):
        tree = trees.random_tree({f"l{i}": (4_000_000 // scale // leaves,) for i in range(leaves)})
        cases = {
            "norm": Case(lambda _, t: gcx.global_norm(t), _zero, (tree,)),
            "optax norm": Case(lambda _, t: optax.tree.norm(t), _zero, (tree,)),
            "clip": Case(_tighter(_our_clip), fresh((tree, jnp.ones(())))),
            "optax clip": Case(_tighter(_optax_clip), fresh((tree, jnp.ones(())))),
            "hold step": Case(fast(held), start(held, tree), (tree,)),
        }
        for name, timing in interleaved(cases, REPETITIONS).items():
            reads_and_writes = 1 if "norm" in name else 3
            floor = reads_and_writes * tree_bytes(tree) / bandwidth
            rows.append(
                {
                    "what": f"{name}, {4e6 / scale:.0e} elements in {leaves} leaves",
                    "ms": timing.median * 1e3,
                    "time/floor": timing.median / floor,
                }
            )
    for elements in (10**5, 10**6, 10**7, 5 * 10**7):
        elements //= scale
        tree = trees.random_tree({"x": (elements,)})
        case = Case(_tighter(_our_clip), fresh((tree, jnp.ones(()))))
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
        case = Case(fast(tx), start(tx, params), (params,))
        timing = interleaved({"window": case}, REPETITIONS, group=k)["window"]
        rows.append(
            {
                "what": f"window of {k}, a micro-batch",
                "ms": timing.median * 1e3 / k,
                "time/floor": "",
            }
        )
    return rows
