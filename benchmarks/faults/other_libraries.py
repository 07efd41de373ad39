"""Runs what goes wrong elsewhere, and the same here, side by side; prints a Markdown table.

Every cell is computed by this run. Takes about half a minute on one core of a CPU.
"""

import functools
import os
import warnings

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
from benchmarks._measure import Case, Timing, fresh, interleaved, tree_bytes
from benchmarks._report import environment, table

PARAMS = {f"layer{i}": (512, 1024) for i in range(12)}  # 6.3 million float32
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


def hold_step() -> list[Row]:
    """A micro-batch that does not close its window, Adam inside, buffers donated."""
    params = {name: jnp.ones(shape) for name, shape in PARAMS.items()}
    grads = jax.tree.map(lambda p: p * 1e-3, params)
    every = 1_000_000  # never reached: every step timed is a hold step
    multi = optax.MultiSteps(optax.adam(1e-3), every)
    ours = gcx.accumulate_gradients(optax.adam(1e-3), every)

    def by_multi_steps(carry, grads):
        params, state = carry
        updates, state = multi.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def by_apply_gradients(carry, grads):
        params, state = carry
        return gcx.apply_gradients(ours, grads, state, params)

    def bare(acc, grads):
        return jax.tree.map(jnp.add, acc, grads)

    timings = interleaved(
        {
            "bare": Case(bare, fresh(params), (grads,)),
            "optax": Case(by_multi_steps, fresh((params, multi.init(params))), (grads,)),
            "here": Case(by_apply_gradients, fresh((params, ours.init(params))), (grads,)),
        },
        repetitions=31,
    )

    def milliseconds(timing: Timing) -> str:
        return f"{timing.median * 1e3:.1f} ms"

    def scratch(timing: Timing) -> str:
        return f"{timing.scratch_bytes / tree_bytes(params):.2f}x params"

    count = sum(x.size for x in jax.tree.leaves(params)) / 1e6
    what = f"hold step of Adam on {count:.1f}M parameters"
    return [
        (
            f"{what}; `acc += g` alone: {milliseconds(timings['bare'])}",
            milliseconds(timings["optax"]),
            milliseconds(timings["here"]),
        ),
        ("scratch memory of that step", scratch(timings["optax"]), scratch(timings["here"])),
    ]


def guard_past_its_limit() -> Row:
    limit, steps = 3, 6

    def first_nan(tx) -> str:
        params = jnp.ones(1)
        state = tx.init(params)
        for i in range(steps):
            updates, state = tx.update(jnp.full(1, jnp.nan), state, params)
            params = optax.apply_updates(params, updates)
            if jnp.isnan(params).any():
                return f"applies the NaN of step {i + 1}"
        failed = gcx.metrics(state).get("guard_failed")
        return f"never applies one; `guard_failed` is {bool(failed)}"

    return (
        f"{steps} NaN gradients in a row, limit {limit}",
        first_nan(optax.apply_if_finite(optax.sgd(1.0), limit)),
        first_nan(gcx.skip_nonfinite(optax.sgd(1.0), max_consecutive_skips=limit)),
    )


def monitor_in_a_scan() -> Row:
    def scan(tx) -> str:
        grads = jnp.ones((4, 2))
        state = tx.init(grads[0])

        def step(state, grad):
            updates, state = tx.update(grad, state)
            return state, updates

        try:
            jax.lax.scan(step, state, grads)
        except TypeError as error:
            return f"`TypeError`: {str(error).split(',')[0].splitlines()[0]}"
        return "runs"

    what = "record the norm of each step of a `lax.scan`"
    monitor = getattr(optax, "monitor", None)  # from Optax 0.2.7 on
    optax_ = (
        "not in this version" if monitor is None else scan(monitor({"norm": optax.global_norm}))
    )
    return what, optax_, scan(gcx.record_norms(window=4))


def logging_the_norm() -> Row:
    """What it costs to read the norm after a jitted step that clipped by it."""
    grads = {name: jnp.ones(shape) for name, shape in PARAMS.items()}
    clip = gcx.clip_by_global_norm(1.0)
    _, state = jax.jit(clip.update)(grads, clip.init(grads))
    timing = interleaved(
        {
            "again": Case(lambda carry, g: carry + optax.global_norm(g), lambda: 0.0, (grads,)),
            "state": Case(
                lambda carry, s: carry + gcx.metrics(s)["grad_norm"], lambda: 0.0, (state,)
            ),
        },
        repetitions=15,
    )
    cells = [f"{timing[name].median * 1e3:.2f} ms" for name in ("again", "state")]
    what = "log the norm after the jitted step"
    return what, f"{cells[0]}, a second pass", f"{cells[1]}, from the state"


def unequal_micro_batches() -> Row:
    tokens = [1.0, 9.0]
    means = [jnp.float32([10.0]), jnp.float32([0.0])]  # gradient of each mean over tokens
    big = sum(n * g for n, g in zip(tokens, means, strict=True)) / sum(tokens)

    def window(tx, **weights) -> str:
        params = jnp.zeros(1)
        state = tx.init(params)
        for i, grad in enumerate(means):
            extra = {name: value[i] for name, value in weights.items()}
            updates, state = tx.update(grad, state, params, **extra)
        return f"gradient {numbers(-updates)}"

    return (
        f"micro-batches of 1 and 9 tokens; as one big batch: gradient {numbers(big)}",
        window(optax.MultiSteps(optax.sgd(1.0), 2)),
        window(gcx.accumulate_gradients(optax.sgd(1.0), 2), weight=tokens),
    )


def many_bfloat16_micro_batches() -> Row:
    count = 1_024
    params, batch = jnp.ones((), jnp.bfloat16), jnp.ones(count, jnp.bfloat16)

    def loss(params, x):
        return jnp.mean(params * x)  # its gradient is 1, for each micro-batch and for all

    microbatching = getattr(optax, "microbatching", None)  # Optax 0.2.5 has none
    if microbatching is None:
        theirs = "not in this version"
    else:
        mean = microbatching.AccumulationType.MEAN
        split = microbatching.microbatch(jax.grad(loss), 1, 1, mean)
        theirs = numbers(jax.jit(split)(params, batch))
    _, ours = jax.jit(gcx.microbatched_value_and_grad(loss, count))(params, batch)
    return f"mean of {count:,} bfloat16 micro-batches with gradient 1", theirs, numbers(ours)


def complex_micro_batches() -> Row:
    def window(tx) -> str:
        params = jnp.zeros(1, jnp.complex64)
        state = tx.init(params)
        for grad in (2 + 2j, 4 + 0j):
            updates, state = tx.update(jnp.full(1, grad, jnp.complex64), state, params)
        return f"{complex(updates[0]):g}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)  # the only sign of it
        theirs = window(optax.MultiSteps(optax.sgd(1.0), 2))
    ours = window(gcx.accumulate_gradients(optax.sgd(1.0), 2))
    return "update of the micro-batches 2+2j and 4, rate 1: exactly -3-1j", theirs, ours


def float64_micro_batches() -> Row:
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True):

        def window(tx) -> str:
            grad = jnp.full(1, 1 + 1e-12, jnp.float64)
            state = tx.init(grad)
            for _ in range(2):
                updates, state = tx.update(grad, state, grad)
            return f"{-float(updates[0]) - 1:.3g}"

        theirs = window(optax.MultiSteps(optax.sgd(1.0), 2))
        ours = window(gcx.accumulate_gradients(optax.sgd(1.0), 2))
    return "mean of float64 micro-batches 1 + 1e-12, minus 1", theirs, ours


def guard_behind_a_clip() -> Row:
    """MaxText clips to 1 and hands the norm of what is left to `skip_step_on_spikes`."""
    rng = np.random.default_rng(0)
    sizes = np.append(rng.uniform(2, 3, 40), 100.0)  # the last is a spike
    clip = optax.clip_by_global_norm(1.0)

    def sees(tx) -> str:
        params = jnp.zeros(4)
        state, update = tx.init(params), jax.jit(tx.update)
        for size in sizes:
            _, state = update(jnp.full(4, size / 2, jnp.float32), state, params)
        found = gcx.metrics(state)
        verdict = "skips it" if int(found["skipped_large_norm"]) else "steps on it"
        return f"sees a norm of {float(found['grad_norm']):.0f}, {verdict}"

    def guard(inner):
        return gcx.skip_large_norm(inner, gcx.thresholds.mean_std(window=32, warmup_steps=16))

    behind = optax.chain(clip, guard(optax.sgd(1.0)))
    around = guard(optax.chain(clip, optax.sgd(1.0)))
    what = "a spike of norm 100 among 2 to 3; the guard measures behind a clip to 1, as MaxText"
    return what, sees(behind), f"around the clip it {sees(around)}"


def last_partial_window() -> Row:
    batches, every = 10, 4
    params = jnp.zeros(1)

    def epoch(tx, state):
        total = params
        for _ in range(batches):
            updates, state = tx.update(jnp.ones(1), state, params)
            total = total + updates
        return total, state

    multi, ours = (
        make(optax.sgd(1.0), every) for make in (optax.MultiSteps, gcx.accumulate_gradients)
    )
    lost, _ = epoch(multi, multi.init(params))
    kept, state = epoch(ours, ours.init(params))
    updates, _ = gcx.flush(ours, state, params)
    steps = [f"{-float(x[0]):.0f} steps" for x in (lost, kept + updates)]
    return f"{batches} micro-batches, windows of {every}", steps[0], f"{steps[1]} with `flush`"


def negative_max_norm() -> Row:
    grads = jnp.float32([3.0, 4.0])
    try:
        ours = numbers(once(gcx.clip_by_global_norm(-1.0), grads))
    except ValueError as error:
        ours = f"`ValueError`: {str(error).split(': ', 1)[1].split('. ')[0]}"
    return (
        f"clip {numbers(grads)} to norm -1",
        numbers(once(optax.clip_by_global_norm(-1.0), grads)),
        ours,
    )


def main() -> None:
    about = environment()
    rows = [
        *overflowing_norms(),
        many_low_precision_leaves(),
        inside_shard_map(),
        nan_micro_batch(),
        *hold_step(),
        guard_past_its_limit(),
        monitor_in_a_scan(),
        logging_the_norm(),
        unequal_micro_batches(),
        many_bfloat16_micro_batches(),
        complex_micro_batches(),
        float64_micro_batches(),
        guard_behind_a_clip(),
        last_partial_window(),
        negative_max_norm(),
    ]
    header = ("run", f"Optax {about['optax']}", "gradclip_jax")
    print(table([dict(zip(header, row, strict=True)) for row in rows]))
    print(f"\njax {about['jax']}, {about['device']}, {about['cores']} cores")


if __name__ == "__main__":
    main()
