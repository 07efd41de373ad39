"""Counts the incidents that `Detector` reports in runs of Adam on noise, without a fault.

The table has the mean over the seeds, the most in one of them, and the kinds in all of them.

python -m benchmarks.faults.streams [--steps 16000] [--seeds 4]
"""

import argparse
import collections

import jax.numpy as jnp
import numpy as np

from benchmarks._report import table
from gradclip_jax.monitoring._layout import MEASURED, Names, Outcome
from gradclip_jax.monitoring.host._detect import Detector
from gradclip_jax.monitoring.host._rows import Rows

STREAMS = (
    *("an expert in 50 of 150 steps", "a leaf in 1 % of steps", "zero in 5 % of steps"),
    *("cosine restarts", "linear restarts", "all frozen but one", "bfloat16 that does not move"),
    *("Student-t(3) by step", "Student-t(3) by element", "lognormal by step", "lognormal by leaf"),
)
SIZES = 8, 16, 16, 32, 64, 64
STARTS = np.cumsum((0, *SIZES[:-1]))


def gradient_of(name, t, distance, rng):
    """The distance to the target and noise, for one kind of run."""
    is_heavy, size = name == "Student-t(3) by element", sum(SIZES)
    noise = rng.standard_t(3, size) if is_heavy else rng.normal(size=size)
    of_step = {
        "zero in 5 % of steps": rng.random() > 0.05,
        "Student-t(3) by step": abs(rng.standard_t(3)),
        "lognormal by step": np.exp(rng.normal()),
    }
    of_leaf = {
        "an expert in 50 of 150 steps": np.where(np.arange(6) == 3, t % 150 < 50, 1),
        "a leaf in 1 % of steps": np.where(np.arange(6) == 2, rng.random() < 0.01, 1),
        "all frozen but one": np.arange(6) == 5,
        "lognormal by leaf": np.exp(rng.normal(size=6)),
    }
    noise *= np.repeat(of_leaf.get(name, np.ones(6)), SIZES)
    moving = np.repeat(of_leaf.get(name, np.ones(6)) > 0, SIZES)
    return (0.3 * distance * moving + noise) * of_step.get(name, 1.0)


def run(name, steps, seed):
    """Return the rows of a run and the names of its leaves."""
    rng, names = np.random.default_rng(seed), Names(tuple(f"leaf {i}" for i in range(6)))
    rows = Rows.zeros(steps, names)
    rows.step[:] = np.arange(steps)
    rows.outcome[:] = int(Outcome.HAS_UNITS | Outcome.HAS_LOSS | Outcome.APPLIED)
    rows.outcome[:] |= int(sum(MEASURED.values()))
    params, target, mu, nu = *rng.normal(size=(2, sum(SIZES))), 0.0, 0.0
    dtype = jnp.bfloat16 if "bfloat16" in name else np.float32
    for t in range(steps):
        gradient = gradient_of(name, t, params - target, rng)
        phase = t % 1000 / 1000
        rate = {"cosine restarts": (1 + np.cos(np.pi * phase)) / 2, "linear restarts": 1 - phase}
        mu, nu = 0.9 * mu + 0.1 * gradient, 0.999 * nu + 0.001 * gradient**2
        size = np.sqrt(nu / (1 - 0.999 ** (t + 1))) + 1e-8
        update = -1e-3 * rate.get(name, 1.0) * mu / (1 - 0.9 ** (t + 1)) / size
        old, params = params, (params + update).astype(dtype).astype(float)
        squares = np.square([gradient, params - old, params])
        rows.norms[t, :, 1:] = np.sqrt(np.add.reduceat(squares, STARTS, axis=1))
        rows.norms[t, :, 0] = np.sqrt(squares.sum(1))
        rows.loss[t] = 0.5 * np.mean((params - target) ** 2) + 0.1 + 0.02 * rng.normal()
    return rows, names


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16_000)
    parser.add_argument("--seeds", type=int, default=4)
    args, lines = parser.parse_args(), []
    for name in STREAMS:
        counts, kinds = [], collections.Counter()
        for seed in range(args.seeds):
            rows, names = run(name, args.steps, seed)
            found = Detector(names).update(rows)
            counts.append(len(found))
            kinds.update(kind for incident in found for kind in incident.kinds)
        row = {"run": name, "incidents": np.mean(counts), "most": max(counts)}
        lines.append(row | {"kinds": str(dict(kinds))})
    print(table(lines))


if __name__ == "__main__":
    main()
