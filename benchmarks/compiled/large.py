"""A guard, an accumulation, a clip and `watch` on up to 256 TPU chips that are not there.

Prints scratch and collectives of a training step beside the same of Optax. Run it in the
environment of `make .venv-tpu/.compiled`:
`JAX_PLATFORMS=cpu .venv-tpu/bin/python -m benchmarks.compiled.large --only "GPT 1.1B"`.
"""

import argparse
from typing import Any

import jax
import optax

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks._models import gpt
from benchmarks._rows import EVERY, Step
from benchmarks.compiled import _devices, _sharded
from benchmarks.compiled._hlo import describe_collectives

MODELS = {
    "GPT 1.1B": lambda: gpt(20, 2048, 51200, 256, 1024, scan=True),
    "GPT 1.1B, 128 tokens": lambda: gpt(20, 2048, 51200, 256, 128, scan=True),
    "GPT 7.8B, 128 tokens": lambda: gpt(36, 4096, 131072, 256, 128, scan=True),
}
CHIPS = {
    "256 v5e, 32 x 8": ("v5e:16x16", (32, 8)),
    "64 v5p, 16 x 4": ("v5p:4x4x4", (16, 4)),
    "64 v5p, FSDP": ("v5p:4x4x4", (64, 1)),
}


def _optimizer(clip: Any) -> Any:
    return optax.chain(clip, optax.adamw(1e-4))


OPTAX = _optimizer(optax.clip_by_global_norm(1.0))
OURS = _optimizer(gcx.clip_by_global_norm(1.0))
STEPS = {
    "AdamW alone": optax.adamw(1e-4),
    "Optax: clip": OPTAX,
    "Optax: `MultiSteps(clip)`": optax.MultiSteps(OPTAX, EVERY),
    "Optax: `MultiSteps(apply_if_finite(clip))`": optax.MultiSteps(
        optax.apply_if_finite(OPTAX, 9), EVERY
    ),
    "`accumulate_gradients(clip)`": gcx.accumulate_gradients(OURS, EVERY),
    "`skip_nonfinite(accumulate_gradients(clip))`": gcx.skip_nonfinite(
        gcx.accumulate_gradients(OURS, EVERY)
    ),
    "`watch` around that": gcx.watch(gcx.skip_nonfinite(gcx.accumulate_gradients(OURS, EVERY))),
}


def step_of(tx: Any, loss: Any) -> Step:
    """Loss, backward pass and update; ours by `apply_gradients`."""

    def run(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        if isinstance(tx, optax.MultiSteps) or tx in STEPS_OF_OPTAX:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value
        return *gcx.apply_gradients(tx, grads, state, params), value

    return Step(tx, run)


STEPS_OF_OPTAX = [tx for name, tx in STEPS.items() if "Optax" in name or "alone" in name]


def measure(model: Any, chips: tuple[str, tuple[int, int]], tx: Any) -> dict[str, Any]:
    """The columns of one step."""
    step = step_of(tx, model.loss)
    args, size = _sharded.placed(model, step.state(model.params), _sharded.mesh("tpu", chips))
    out = (*(jax.tree.map(lambda x: x.sharding, tree) for tree in args[:2]), None)
    found = _devices.compile_for("tpu", step.run, *args, donate=(0, 1), out_shardings=out)
    return {
        "scratch, MiB a chip": round(found.scratch / 2**20, 1),
        "scratch, N": round(found.scratch / size, 2),
        "held": describe_collectives(found.program.held),
        "emitted": describe_collectives(found.program.emitted),
        "compile, s": round(found.trace_seconds + found.compile_seconds, 1),
    }


def main() -> None:
    """Compiles what is chosen, a table for each model and set of chips."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a model, chips or a step")
    options = parser.parse_args()
    for title, make in MODELS.items():
        for chips, layout in CHIPS.items():
            rows = []
            for name, tx in STEPS.items():
                if all(part in (title, chips, name) for part in options.only):
                    rows.append({"step": name} | measure(make(), layout, tx))
                    print(rows[-1], flush=True)
            if rows:
                print(f"**{title}, {chips}**, JAX {jax.__version__}\n\n{_report.table(rows)}\n")


if __name__ == "__main__":
    main()
