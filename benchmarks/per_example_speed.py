"""Examples per second and memory of per-example clipping on this machine, beside other libraries.

    python benchmarks/per_example_speed.py            # two models, each program in its own process
    python benchmarks/per_example_speed.py --quick    # a tiny model, printed only

`small` is a GPT in which activations outweigh the parameters, `wide` one in which the parameters
outweigh those of an example. `pip install jax_privacy`, and `pip install torch opacus`, add their
rows; Opacus has no shared weights, so its head is not tied. `peak` is the resident memory of a step
above that of the process before it; `scratch` what XLA reserves. CPU time, of all threads, hardly
depends on what else the machine does.
"""

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MODELS = {  # layers, width, heads, vocabulary, tokens, examples
    "small": (4, 128, 4, 2048, 64, 32),
    "wide": (2, 512, 8, 8192, 32, 16),
    "tiny": (1, 32, 2, 50, 8, 4),
}
REPETITIONS = 5


def peak_since_reset() -> int:
    """Bytes, the most that this process has held since `reset_peak`; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmHWM"))


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_since_reset()


def timed(step: Callable[[], Any], examples: int) -> dict[str, Any]:
    """Speed, and the peak of a step above what was held before it was ever called."""
    before = reset_peak()
    step()
    peak = peak_since_reset() - before
    walls, works = [], []
    for _ in range(REPETITIONS):
        start = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - start[0])
        works.append(time.process_time() - start[1])
    return {
        "examples per second": round(examples / float(np.median(walls)), 1),
        "CPU ms per example": round(1e3 * float(np.median(works)) / examples, 1),
        "peak MB": round(peak / 1e6),
    }


def jax_programs(loss: Any) -> dict[str, Any]:
    """Each program `(params, batch) -> gradients`."""
    import _per_example
    import jax
    from optax import contrib

    def aggregated(params: Any, batch: Any) -> Any:
        tx = contrib.differentially_private_aggregate(1.0, 0.0, 0)
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        return tx.update(grads, tx.init(params), params)[0]

    def privacy(microbatch: int | None) -> Any:
        import jax_privacy

        return jax_privacy.clipped_grad(
            lambda params, batch: loss(params, batch[0]),
            l2_clip_norm=1.0,
            batch_argnums=1,
            microbatch_size=microbatch,
        )

    named = {
        "ordinary gradient, JAX": _per_example.ordinary,
        "per_example.value_and_grad": _per_example.ours,
        "every gradient written down": _per_example.written_down,
    }
    programs = {name: functools.partial(f, loss=loss) for name, f in named.items()}
    programs["optax.contrib.differentially_private_aggregate"] = aggregated
    if importlib.util.find_spec("jax_privacy"):
        for size in (None, 1, 4):
            title = "whole" if size is None else f"microbatch {size}"
            programs[f"jax_privacy.clipped_grad, {title}"] = privacy(size)
    return programs


def run_jax(model: str, name: str) -> dict[str, Any]:
    import _per_example
    import jax
    import jax.numpy as jnp

    layers, width, heads, vocabulary, tokens, examples = MODELS[model]
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.05, jnp.float32),
        _per_example.gpt_shapes(layers, width, vocabulary, tokens),
    )
    batch = jnp.asarray(rng.integers(0, vocabulary, (examples, tokens)), jnp.int32)
    program = jax_programs(functools.partial(_per_example.loss, heads=heads))[name]
    compiled = jax.jit(program).lower(params, batch).compile()
    found = timed(lambda: jax.block_until_ready(compiled(params, batch)), examples)
    scratch = compiled.memory_analysis().temp_size_in_bytes
    return {**found, "scratch MB": round(scratch / 1e6), "versions": f"jax {jax.__version__}"}


def run_torch(model: str, name: str) -> dict[str, Any]:
    """The same network of `torch.nn` modules, with an output layer of its own."""
    import opacus
    import torch
    from _per_example_torch import ghost_step, network, ordinary_step

    torch.manual_seed(0)
    layers, width, heads, vocabulary, tokens, examples = MODELS[model]
    net = network(layers, width, heads, vocabulary, tokens)
    ids = torch.randint(vocabulary, (examples, tokens))
    step = (ghost_step if "Opacus" in name else ordinary_step)(net, ids)
    versions = f"torch {torch.__version__}, opacus {opacus.__version__}"
    return {**timed(step, examples), "scratch MB": "", "versions": versions}


TORCH = ["ordinary gradient, torch", "Opacus ghost clipping"]


def names() -> list[str]:
    has_torch = importlib.util.find_spec("torch") and importlib.util.find_spec("opacus")
    return [*jax_programs(None), *(TORCH if has_torch else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, printed only")
    parser.add_argument("--only", default="", help="programs with these words in their name")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PROGRAM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run = run_torch if options.one[1] in TORCH else run_jax
        print(json.dumps(run(*options.one)))
        return
    sections: dict[str, Any] = {}
    for model in ["tiny"] if options.quick else ["small", "wide"]:
        for name in filter(lambda name: options.only in name, names()):
            command = [sys.executable, __file__, "--one", model, name]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            row = {"what": name, **json.loads(printed.splitlines()[-1])}
            print(model, json.dumps(row), flush=True)
            sections.setdefault(title_of(model), []).append(row)
    if not options.quick:
        import _report

        _report.write(sections, "per example")


def title_of(model: str) -> str:
    layers, width, heads, vocabulary, tokens, examples = MODELS[model]
    return (
        f"{layers} layers of {width}, {heads} heads, vocabulary {vocabulary:,}: "
        f"{examples} examples of {tokens} tokens"
    )


if __name__ == "__main__":
    main()
