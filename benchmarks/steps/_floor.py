"""The optimizer alone beside the time that its bytes need at the bandwidth of the device.

A step of AdamW with a clip by the global norm reads the gradient twice, because the norm must be
known before anything is scaled, reads the parameters and both moments, and writes these three:
eight times the bytes of the parameters, and seven without a clip.

The kernels of `clip_grad_norm` are those of Optax's clip. Our transformation also returns four
numbers as its state. XLA assigns new memory to them in each call, because the donated old numbers
are not read, and may then have to update its CUDA graph.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import optax

import gradclip_jax as gcx
from benchmarks._measure import Case, interleaved

PASSES = 8
LAYERS = 24
GROUP = 8
"""Number of steps in a repetition, which hides the time that the host needs for each."""


def rows(*, small: bool) -> Iterator[dict[str, str]]:
    """One row for each size and dtype of the parameters."""
    bandwidth = measured_bandwidth(1 << 16 if small else 1 << 28)
    sizes = {"0.2 M": 200_000} if small else {"124 M": 124_000_000, "1 B": 1_000_000_000}
    for title, size in sizes.items():
        for dtype in (jnp.float32, jnp.bfloat16):
            times = optimizer_seconds(size, dtype)
            floor = PASSES * size * jnp.dtype(dtype).itemsize / bandwidth
            yield {
                "what": f"{title} parameters, {jnp.dtype(dtype).name}",
                "floor, ms": f"{1e3 * floor:.4g}",
                "ms, " + " / ".join(times): " / ".join(f"{1e3 * x:.4g}" for x in times.values()),
                "over the floor": " / ".join(f"{x / floor:.2f}" for x in times.values()),
                "bandwidth, GB/s": f"{bandwidth / 1e9:.0f}",
            }


def measured_bandwidth(size: int) -> float:
    """Bytes per second of a kernel that reads and writes an array of float32."""
    case = Case(lambda x: x * 1.0001, lambda: jnp.ones(size, jnp.float32))
    found = interleaved({"scale": case}, 21, group=GROUP, warmup=3)["scale"]
    return 2 * 4 * size * GROUP / found.median


def optimizer_seconds(size: int, dtype: Any) -> dict[str, float]:
    """Seconds of each clip and AdamW on parameters of 24 equal layers, and of AdamW alone."""
    grads = [jnp.full(size // LAYERS, 1e-3, dtype) for _ in range(LAYERS)]

    def case(clip: Any) -> Case:
        tx = optax.chain(clip, optax.adamw(1e-4))

        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def carry() -> Any:
            params = [jnp.ones_like(x) for x in grads]
            return params, tx.init(params)

        return Case(step, carry, (grads,))

    clips = {
        "ours": gcx.clip_by_global_norm(1.0),
        "clip_grad_norm": optax.stateless(lambda grads, _: gcx.clip_grad_norm(grads, 1.0)[0]),
        "Optax": optax.clip_by_global_norm(1.0),
        "nothing": optax.identity(),
    }
    found = interleaved({name: case(clip) for name, clip in clips.items()}, 21, group=GROUP)
    return {name: timing.median / GROUP for name, timing in found.items()}
