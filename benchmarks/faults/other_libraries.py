"""Runs what goes wrong elsewhere, and the same here, side by side; prints a Markdown table.

Every cell is computed by this run.
"""

import functools
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
from benchmarks._report import environment, table

Row = tuple[str, str, str]


def once(tx: optax.GradientTransformation, grads, params=None):
    """The updates of the first step."""
    return tx.update(grads, tx.init(grads if params is None else params), params)[0]


def numbers(array, digits: int = 4) -> str:
    """An array as text, short enough for a cell."""
    shown = [f"{float(x):.{digits}g}" for x in np.ravel(np.asarray(array, np.float64))]
    return shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"


def true_norm(tree) -> float:
    leaves = [np.asarray(x).astype(np.float64).ravel() for x in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves)))


def overflowing_norms() -> list[Row]:
    rows = []
    for grads in (jnp.float16([300, 400]), jnp.float32([1e20, 1e20])):
        optax_, here = (
            numbers(once(clip(1.0), grads))
            for clip in (optax.clip_by_global_norm, gcx.clip_by_global_norm)
        )
        rows.append((f"clip {grads.dtype} {numbers(grads)} to norm 1", optax_, here))
    return rows


def many_low_precision_leaves() -> Row:
    rng = np.random.default_rng(0)
    tree = [jnp.asarray(rng.standard_normal(10), jnp.bfloat16) for _ in range(2_000)]
    what = f"norm of {len(tree):,} bfloat16 leaves, exactly {true_norm(tree):.2f}"
    return what, f"{optax.global_norm(tree):.2f}", f"{gcx.global_norm(tree):.2f}"


def inside_shard_map() -> Row:
    """Eight devices; `w` is split over them, `b` is a copy on each."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((8, 1000)) * np.linspace(1, 12, 8)[:, None], jnp.float32)
    grads = {"w": w, "b": jnp.float32([100.0])}

    def on_each_device(clip, norm, grads):
        clipped = once(clip, grads)
        return norm(grads).reshape(1), clipped["b"]

    found = []
    for clip, norm in (
        (optax.clip_by_global_norm(1.0), optax.global_norm),
        (gcx.clip_by_global_norm(1.0), gcx.global_norm),
    ):
        run = jax.shard_map(
            functools.partial(on_each_device, clip, norm),
            mesh=mesh,
            in_specs=({"w": P("data"), "b": P()},),
            out_specs=(P("data"), P("data")),
            check_vma=True,
        )
        found.append([np.asarray(x) for x in jax.jit(run)(grads)])
    cells: list[str] = []
    for norms, copies in found:
        seen = sorted({f"{norm:.0f}" for norm in norms}, key=float)
        shown = seen[0] if len(seen) == 1 else f"{seen[0]} to {seen[-1]}"
        replicas = "drift apart" if len(np.unique(copies)) > 1 else "stay alike"
        cells.append(f"clips by {shown}; replicas {replicas}")
    what = f"clip inside `shard_map` on 8 devices, true norm {true_norm(grads):.0f}"
    return what, cells[0], cells[1]


def nan_micro_batch() -> Row:
    windows, bad = 10, 1

    def spoiled(tx) -> int:
        params = jnp.zeros(1)
        state, update, emitted = tx.init(params), jax.jit(tx.update), []
        for i in range(2 * windows):
            updates, state = update(jnp.full(1, jnp.nan if i == bad else 1.0), state, params)
            emitted.append(updates)
        return sum(bool(jnp.isnan(x).any()) for x in emitted[1::2])

    alone = gcx.accumulate_gradients(optax.sgd(1.0), 2)
    guarded = gcx.skip_nonfinite(gcx.accumulate_gradients(optax.sgd(1.0), 2))
    return (
        f"{windows} windows of 2 micro-batches, a NaN in the first",
        f"{spoiled(optax.MultiSteps(optax.sgd(1.0), 2))} windows are NaN",
        f"{spoiled(alone)} is; {spoiled(guarded)} with `skip_nonfinite`",
    )


def main() -> None:
    about = environment()
    others = many_low_precision_leaves(), inside_shard_map(), nan_micro_batch()
    rows = [*overflowing_norms(), *others]
    header = ("run", f"Optax {about['optax']}", "gradclip_jax")
    print(table([dict(zip(header, row, strict=True)) for row in rows]))
    print(f"\njax {about['jax']}, {about['device']}, {about['cores']} cores")


if __name__ == "__main__":
    main()
