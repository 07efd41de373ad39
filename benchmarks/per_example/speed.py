"""Time, memory and FLOPs of per-example clipping on this machine, beside other libraries.

    python -m benchmarks.per_example.speed            # models of two kinds
    python -m benchmarks.per_example.speed --quick    # one model, one round, printed only

`pip install jax_privacy` adds its rows. The programs of a model take their steps in turn, and
medians are printed. CPU time, of all threads, hardly depends on what else the machine does; `ratio`
is that of it to the ordinary gradient. `scratch` is what XLA reserves, `GFLOP` what it counts.
"""

import argparse
import importlib.util
import json
import time
from importlib import metadata
from typing import Any

import jax
import numpy as np
from optax import contrib

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks.per_example._models import MODELS

ROUNDS = 11
EXAMPLES = 16


def ordinary(params: Any, batch: Any, loss: Any) -> Any:
    """The gradient of the mean loss: nothing is clipped."""
    return jax.grad(lambda p: jax.numpy.mean(jax.vmap(loss, (None, 0))(p, batch)))(params)


def ours(params: Any, batch: Any, loss: Any) -> Any:
    """The clipped mean of this library."""
    return gcx.per_example.value_and_grad(loss, 1.0)(params, batch)[1]


def aggregated(params: Any, batch: Any, loss: Any) -> Any:
    """The clipped sum of Optax, from the materialized gradient of every example."""
    tx = contrib.differentially_private_aggregate(1.0, 0.0, 0)
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    return tx.update(grads, tx.init(params), params)[0]


def privacy(microbatch: int | None) -> Any:
    """The clipped sum of jax_privacy."""

    def clipped(params: Any, batch: Any, loss: Any) -> Any:
        import jax_privacy

        gradient = jax_privacy.clipped_grad(
            lambda params, batch: loss(params, jax.tree.map(lambda x: x[0], batch)),
            l2_clip_norm=1.0,
            batch_argnums=1,
            microbatch_size=microbatch,
        )
        return gradient(params, batch)

    return clipped


def programs() -> dict[str, Any]:
    """Each program `(params, batch, loss) -> gradients`; the first is the ordinary gradient."""
    found: dict[str, Any] = {
        "ordinary gradient, JAX": ordinary,
        "per_example.value_and_grad": ours,
        "optax.contrib.differentially_private_aggregate": aggregated,
    }
    if importlib.util.find_spec("jax_privacy"):
        for size in (None, 1, 4):
            title = "whole" if size is None else f"microbatch {size}"
            found[f"jax_privacy.clipped_grad, {title}"] = privacy(size)
    return found


def facts(name: str, compiled: Any) -> dict[str, Any]:
    """What is known of a program without running it."""
    flops = round(compiled.cost_analysis()["flops"] / 1e9, 2)
    versions = f"jax {jax.__version__}"
    if "privacy" in name:
        versions += f", jax_privacy {metadata.version('jax_privacy')}"
    return {
        "scratch MB": round(compiled.memory_analysis().temp_size_in_bytes / 1e6),
        "GFLOP": "" if "microbatch" in name else flops,  # XLA counts the body of a loop once
        "versions": versions,
    }


def measured(model: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each program of a model."""
    loss, params, batch = MODELS[model]()
    args = jax.tree.map(jax.numpy.asarray, (params, batch))
    compiled = {
        name: jax.jit(lambda *args, program=program: program(*args, loss)).lower(*args).compile()
        for name, program in programs().items()
    }
    seconds: dict[str, list[Any]] = {name: [] for name in compiled}
    for _ in range(rounds + 1):
        for name, step in compiled.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(step(*args))
            seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    # The first round warms up.
    medians = {name: np.median(found[1:], 0) for name, found in seconds.items()}
    ordinary = next(iter(medians.values()))[1]
    return [
        {
            "what": name,
            "examples per second": round(EXAMPLES / float(wall), 1),
            "CPU ms per example": round(1e3 * float(cpu) / EXAMPLES, 1),
            "ratio": round(float(cpu / ordinary), 2),
            **facts(name, compiled[name]),
        }
        for name, (wall, cpu) in medians.items()
    ]


def main() -> None:
    """Measure and print every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, one round, printed only")
    quick = parser.parse_args().quick
    for model in ["GPT"] if quick else MODELS:
        rows = measured(model, 1 if quick else ROUNDS)
        title = f"{model}: {' '.join((MODELS[model].__doc__ or '').split())}"
        print(title, *map(json.dumps, rows), sep="\n", flush=True)
        if not quick:
            _report.write({title: rows}, "per example")


if __name__ == "__main__":
    main()
