"""The benchmark suite: ours, Optax and the physical floor, side by side in one process.

`make bench` runs it. It writes benchmarks/results/<device>.json and the tables of that device in
benchmarks/README.md. Nothing here assumes a CPU.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import _report
import _trees as trees
import optax
from _clips import beside, compile_times, growth, norms_and_clips, optimizer_steps
from _compare import Tree
from _measure import copy_bandwidth
from _report import Rows
from _steps import accumulation, guards, micro_batches, zero_or_one

import gradclip_jax as gcx


def main() -> None:
    """Runs all sections and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small trees, printed only")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--only", default="", help="sections with this in their title")
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
        "A step zero or one times, adamw (8 x 2048 x 2048)": lambda: zero_or_one(
            params, grads, optax.adamw(1e-4)
        ),
        "Micro-batches in one step": lambda: micro_batches(1024 // scale, 512, 8),
        "Clips of other libraries, in place, float32": lambda: beside(
            {
                name: models[name]()
                for name in ("GPT-2 124M, float32", "ResNet-50", "2,000 small leaves")
            }
        ),
        "Trace and compile": lambda: compile_times(300 // scale),
        "Growth": lambda: growth(bandwidth, scale),
    }
    sections: dict[str, Rows] = {}
    chosen = {title: run for title, run in plan.items() if options.only in title}
    if not chosen:
        parser.error(f"argument --only: {options.only!r} is in none of {list(plan)}")
    for title, run in chosen.items():
        sections[title] = run()
        print(f"\n{title}\n{_report.table(sections[title])}", flush=True)
    if not (options.no_write or options.quick):
        path = _report.write(sections, copy_bandwidth_GB_per_s=round(bandwidth / 1e9, 2))
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
