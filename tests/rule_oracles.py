"""Adaptive clipping step by step: float64 NumPy, written from the papers. No JAX in here.

A rule takes norms, float64[steps], and returns what it says at each step, `inf` for "do not
clip". A method that looks at gradients takes, for one leaf, float64[steps, ...]. What the
library adds to a paper is an argument whose default is the paper.
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
    out: dict[str, list[float]] = {"threshold": [], "mean": [], "var": [], "margin": []}
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
        out["mean"].append(mean)
        out["var"].append(var)
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
            std = max(np.std(before, ddof=ddof), floor * np.mean(before))
            out.append(np.mean(before) + z_threshold * std)
    return np.array(out)


def ema(
    norms,
    factor: float,
    decay: float,
    warmup_steps: int,
    warmup_max: float = math.inf,
    zeros: bool = True,
) -> dict[str, np.ndarray]:
    """One tensor of AdaGC, 2502.11034, algorithm 1; `zeros`: whether norms of zero count."""
    level = math.inf
    out: dict[str, list[float]] = {"threshold": [], "level": []}
    for t, n in enumerate(norms):
        threshold = warmup_max if t < warmup_steps else factor * level
        clipped = min(n, threshold)
        if n > 0 or zeros:
            is_new = t < warmup_steps or level == math.inf
            level = min(level, clipped) if is_new else decay * level + (1 - decay) * clipped
        out["threshold"].append(threshold)
        out["level"].append(level)
    return {name: np.array(values) for name, values in out.items()}


def adagc(
    norms, factor: float, decay: float, warmup_steps: int, absolute: float, zeros: bool = True
) -> dict[str, np.ndarray]:
    """AdaGC on leaf norms, float64[steps, leaves]: in the warm-up one factor for all leaves."""
    total = np.sqrt(np.sum(norms**2, axis=1, keepdims=True))
    factors = np.minimum(1, absolute / np.where(total > 0, total, 1))
    factors[warmup_steps:] = 1
    seen = norms * factors
    rules = [ema(n, factor, decay, warmup_steps, zeros=zeros) for n in seen.T]
    threshold, level = (np.stack([r[name] for r in rules], 1) for name in ("threshold", "level"))
    return {"clipped": np.minimum(seen, threshold), "level": level}


def quantile(norms, target: float, rate: float, initial: float) -> np.ndarray:
    """Andrew et al., 1905.03871, one norm a round: the threshold of each step, and one more."""
    out = [initial]
    for n in norms:
        out.append(out[-1] * math.exp(-rate * (float(n <= out[-1]) - target)))
    return np.array(out)


def u_clip(grads, clip) -> tuple[np.ndarray, np.ndarray]:
    """U-Clip, 2302.02971, algorithm 1."""
    carry = np.zeros(grads.shape[1:])
    emitted, carries = [], []
    for g in grads:
        emitted.append(clip(g + carry))
        carry = g + carry - emitted[-1]
        carries.append(carry)
    return np.array(emitted), np.array(carries)


def acclip(grads, b1: float, b2: float, alpha: float, eps: float) -> np.ndarray:
    """ACClip, 1912.03194, algorithm 2: the updates."""
    m, tau = np.zeros(grads.shape[1:]), np.zeros(grads.shape[1:])
    out = []
    for g in grads:
        m = b1 * m + (1 - b1) * g
        tau = b2 * tau + (1 - b2) * np.abs(g) ** alpha
        out.append(np.minimum(tau ** (1 / alpha) / (np.abs(m) + eps), 1) * m)
    return np.array(out)


def spam(grads, theta: float, decay: float, warmup: int, reset_every: float) -> np.ndarray:
    """SPAM, 2501.06842, algorithm 1, with the grace periods of the authors' code: the updates."""
    v = np.zeros(grads.shape[1:])
    out = []
    for t, g in enumerate(grads, 1):
        since = math.fmod(t, reset_every)
        if since == 0:
            v = np.zeros_like(v)
        if t >= warmup and since >= warmup:
            g = np.where(g**2 > theta * v, np.sign(g) * np.sqrt(theta * v), g)
        v = decay * v + (1 - decay) * g**2
        out.append(g)
    return np.array(out)


def stable_spam(
    grads, max_decay: float, norm_decay: float, square_decay: float, eps: float
) -> np.ndarray:
    """AdaClip and AdaGN of Stable-SPAM, 2502.17055, for one leaf; t is never set back."""
    peak = norm = square = 0.0
    out = []
    for t, g in enumerate(grads, 1):
        largest = np.abs(g).max()
        peak = max_decay * peak + (1 - max_decay) * largest
        bound = peak / (1 - max_decay**t)
        g = np.where(np.abs(g) > bound, g / (largest or 1) * bound, g)
        length = np.linalg.norm(g)
        norm = norm_decay * norm + (1 - norm_decay) * length
        square = square_decay * square + (1 - square_decay) * length**2
        wanted = norm / (1 - norm_decay**t) / (math.sqrt(square / (1 - square_decay**t)) + eps)
        out.append(g / length * wanted if length > 0 else g)
    return np.array(out)


def stable_adamw(
    grads, param, lr: float, b1: float, b2: float, eps: float, weight_decay: float, d: float
) -> np.ndarray:
    """StableAdamW, 2304.13013, algorithm 2, for one leaf: the parameters after each step."""
    v, u = np.zeros(grads.shape[1:]), np.zeros(grads.shape[1:])
    out = []
    for t, g in enumerate(grads, 1):
        d1, d2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (b1, b2))
        v = d1 * v + (1 - d1) * g
        u = d2 * u + (1 - d2) * g**2
        rms = math.sqrt(np.mean(g**2 / np.maximum(u, eps**2)))
        rate = lr / max(1, rms / d)
        param = param - rate * weight_decay * param - rate * v / (np.sqrt(u) + eps)
        out.append(param)
    return np.array(out)
