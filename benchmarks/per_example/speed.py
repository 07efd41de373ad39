"""Time, memory and FLOPs of per-example clipping on this machine, beside other libraries.

    python -m benchmarks.per_example.speed            # models of five kinds, and a wide GPT
    python -m benchmarks.per_example.speed --quick    # one model, one round, printed only

`pip install jax_privacy` adds its rows. Each program has a process of its own; these take their
steps in turn, and medians are printed. CPU time, of all threads, hardly depends on what else the
machine does; `ratio` is that of it to the ordinary gradient in JAX. `peak` is the resident memory
of a step above that of the process before it; `scratch` what XLA reserves, `GFLOP` what it counts.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.per_example._models import MODELS

ROUNDS = 11
EXAMPLES = 16


def peak_since_reset() -> int:
    """Bytes, the most that this process has held since `reset_peak`; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmHWM"))


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_since_reset()


def jax_programs() -> dict[str, Any]:
    """Each program `(params, batch, loss) -> gradients`."""
    import jax
    from optax import contrib

    from benchmarks.per_example import _gpt2

    def aggregated(params: Any, batch: Any, loss: Any) -> Any:
        tx = contrib.differentially_private_aggregate(1.0, 0.0, 0)
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        return tx.update(grads, tx.init(params), params)[0]

    def privacy(microbatch: int | None) -> Any:
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

    programs: dict[str, Any] = {
        "ordinary gradient, JAX": _gpt2.ordinary,
        "per_example.value_and_grad": _gpt2.ours,
        "materialized gradients": _gpt2.materialized,
        "optax.contrib.differentially_private_aggregate": aggregated,
    }
    if importlib.util.find_spec("jax_privacy"):
        for size in (None, 1, 4):
            title = "whole" if size is None else f"microbatch {size}"
            programs[f"jax_privacy.clipped_grad, {title}"] = privacy(size)
    return programs


def jax_step(model: str, name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    import jax

    loss, params, batch = MODELS[model]()
    params, batch = jax.tree.map(jax.numpy.asarray, (params, batch))
    program = jax_programs()[name]
    compiled = jax.jit(lambda *args: program(*args, loss)).lower(params, batch).compile()
    about = {
        "scratch MB": round(compiled.memory_analysis().temp_size_in_bytes / 1e6),
        "GFLOP": round(compiled.cost_analysis()["flops"] / 1e9, 2),
        "versions": f"jax {jax.__version__}",
    }
    if "privacy" in name:
        # XLA counts the body of a loop once.
        about["GFLOP"] = about["GFLOP"] if "whole" in name else ""
        about["versions"] += f", jax_privacy {version('jax_privacy')}"
    return lambda: jax.block_until_ready(compiled(params, batch)), about


def version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


def work(model: str, name: str) -> None:
    """Prints what is known of a program, and for each line that is read the seconds of a step."""
    step, about = jax_step(model, name)
    before = reset_peak()
    step()
    print(json.dumps({"peak MB": round((peak_since_reset() - before) / 1e6), **about}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter(), time.process_time()
        step()
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        print(json.dumps(seconds), flush=True)


def answer(worker: Any) -> Any:
    """What a worker prints next; libraries print lines of their own."""
    for line in worker.stdout:
        if line.startswith(("{", "[")):
            return json.loads(line)
    raise RuntimeError(f"{worker.args[-1]} failed")


def measured(model: str, chosen: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each program of a model."""
    workers, abouts = {}, {}
    for name in chosen:
        command = [sys.executable, "-m", __spec__.name, "--one", model, name]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers[name] = subprocess.Popen(command, **pipes)
        abouts[name] = answer(workers[name])
    seconds: dict[str, list[Any]] = {name: [] for name in chosen}
    for _ in range(rounds + 1):
        for name, worker in workers.items():
            print(file=worker.stdin, flush=True)
            seconds[name].append(answer(worker))
    for worker in workers.values():
        worker.communicate()
    # The first round warms up.
    medians = {name: np.median(seconds[name][1:], 0) for name in chosen}
    return [
        {
            "what": name,
            "examples per second": round(EXAMPLES / float(wall), 1),
            "CPU ms per example": round(1e3 * float(cpu) / EXAMPLES, 1),
            "ratio": round(float(cpu / medians[chosen[0]][1]), 2),
            **abouts[name],
        }
        for name, (wall, cpu) in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, one round, printed only")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PROGRAM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work(*options.one)
        return
    for model in ["Mixer"] if options.quick else MODELS:
        rows = measured(model, list(jax_programs()), 1 if options.quick else ROUNDS)
        title = f"{model}: {' '.join((MODELS[model].__doc__ or '').split())}"
        print(title, *map(json.dumps, rows), sep="\n", flush=True)
        if not options.quick:
            from benchmarks import _report

            _report.write({title: rows}, "per example")


if __name__ == "__main__":
    main()
