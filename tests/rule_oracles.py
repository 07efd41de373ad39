"""Adaptive clipping step by step: float64 NumPy, written from the papers. No JAX in here.

A rule takes norms, float64[steps], and returns what it says at each step, `inf` for "do not
clip". What the library adds to a paper is an argument whose default is the paper.
"""

import math

import numpy as np


def percentile(norms, percentile: float, window: float = math.inf) -> np.ndarray:
    """AutoClip, 2007.14469, algorithm 1: of all norms so far, this one included."""
    first = [int(max(0, t + 1 - window)) for t in range(len(norms))]
    return np.array([np.percentile(norms[a : t + 1], percentile) for t, a in enumerate(first)])


def zscore(
    norms, z_threshold: float, decay: float, warmup_steps: int, relearn_after: float = math.inf
) -> dict[str, np.ndarray]:
    """ZClip, 2504.02507, algorithm 1, with the statistics of the authors' code."""
    seen: list[float] = []
    mean = var = math.nan
    streak = 0
    out: dict[str, list[float]] = {"threshold": [], "margin": []}
    for n in norms:
        threshold = math.inf
        if len(seen) < warmup_steps:
            seen.append(n)
            mean, var = np.mean(seen), np.var(seen)
            out["margin"].append(math.inf)
        else:
            std = math.sqrt(var)
            z = (n - mean) / (std + 1e-6)
            if z > z_threshold:
                threshold = mean + z_threshold**2 / z * std
            out["margin"].append(abs(z - z_threshold))
            fed = threshold if z > z_threshold and streak < relearn_after else n
            streak = streak + 1 if z > z_threshold else 0
            mean = decay * mean + (1 - decay) * fed
            var = decay * var + (1 - decay) * (fed - mean) ** 2
        out["threshold"].append(threshold)
    return {name: np.array(values) for name, values in out.items()}


def mean_std(
    norms, z_threshold: float, window: int, warmup_steps: int, floor: float = 0.0, ddof: int = 0
) -> np.ndarray:
    """OLMo-core and levanter: of the `window` norms before this one."""
    out = []
    for t in range(len(norms)):
        before = norms[max(0, t - window) : t]
        if t < warmup_steps:
            out.append(math.inf)
        else:
            std = max(np.std(before, ddof=ddof), floor * abs(np.mean(before)))
            out.append(np.mean(before) + z_threshold * std)
    return np.array(out)


def ema(
    norms, factor: float, decay: float, warmup_steps: int, warmup_max: float = math.inf
) -> dict[str, np.ndarray]:
    """One tensor of AdaGC, 2502.11034, algorithm 1, but norms of zero do not count."""
    level = math.inf
    out: dict[str, list[float]] = {"threshold": [], "level": []}
    for t, n in enumerate(norms):
        threshold = warmup_max if t < warmup_steps else factor * level
        clipped = min(n, threshold)
        if n > 0:
            is_new = t < warmup_steps or level == math.inf
            level = min(level, clipped) if is_new else decay * level + (1 - decay) * clipped
        out["threshold"].append(threshold)
        out["level"].append(level)
    return {name: np.array(values) for name, values in out.items()}


def quantile(norms, target: float, rate: float, initial: float) -> np.ndarray:
    """Andrew et al., 1905.03871, one norm a round: the threshold of each step, and one more."""
    out = [initial]
    for n in norms:
        out.append(out[-1] * math.exp(-rate * (float(n <= out[-1]) - target)))
    return np.array(out)
