"""An accumulator in host memory, compiled for devices that are not there: scratch and transfers.

Run it in an environment of `make bench-compiled`:
`JAX_PLATFORMS=cpu .venv-tpu/bin/python -m benchmarks.compiled.host`.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks.compiled import _devices, _hlo

LAYERS, WIDTH, BATCH, EVERY = 3, 2048, 512, 4
PARAMS = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
N = 4 * LAYERS * WIDTH**2
TX = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-4)), EVERY)


def loss(params: Any, x: Any) -> Any:
    """Of a network without biases."""
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def measure(platform: str, *, on_host: bool) -> dict[str, Any]:
    """A window in one scan: its scratch, and what a micro-batch moves between the memories."""
    device = _devices.one_device(platform)

    def placed(state: Any, space: Any) -> Any:
        if not on_host:
            return state
        return state._replace(acc_grads=jax.device_put(state.acc_grads, space))

    def step(carry: Any, x: Any) -> Any:
        params, state = carry
        grads = jax.grad(loss)(params, x)
        state = placed(state, jax.memory.Space.Device)
        params, state = gcx.apply_gradients(TX, grads, state, params)
        return (params, placed(state, jax.memory.Space.Host)), None

    def window(params: Any, state: Any, batches: Any) -> Any:
        # Made here: compiled for a GPU that is not there no argument is on the host (JAX 0.12.0.1).
        state = state._replace(acc_grads=jax.tree.map(jnp.zeros_like, params))
        carry = (params, placed(state, jax.memory.Space.Host))
        (params, state), _ = jax.lax.scan(step, carry, batches)
        return params, state._replace(acc_grads=())

    state = jax.eval_shape(TX.init, PARAMS)._replace(acc_grads=())
    batches = jax.ShapeDtypeStruct((EVERY, BATCH, WIDTH), jnp.float32)
    args = _devices.placed((PARAMS, state, batches), device)
    found = _devices.compile_for(platform, window, *args, donate=(0, 1))
    into, out_of, hidden = transfers(found.text)
    return {
        "device": platform,
        "accumulator": "host" if on_host else "device",
        "scratch, N": round(found.scratch / N, 2),
        "to the device": into,
        "to the host": out_of,
        "in flight during all products": hidden,
    }


def transfers(text: str) -> tuple[int, int, int]:
    """Copies to the device and to the host in the body of the scan, and how many of them are begun
    before its first matrix product and waited for after its last."""
    into = out_of = hidden = 0
    for name, lines in _hlo.computations(text).items():
        of_products = [i for i, x in enumerate(lines) if " fusion(" in x and "dot_general" in x]
        for start, line in enumerate(lines if of_products and name != "ENTRY" else []):
            made = re.match(r"\s*%([\w.\-]+) = \((.*?\}), (.*?\}), .*copy-start\(", line)
            if made and "S(5)" in made[2] + made[3]:
                done = next(i for i, x in enumerate(lines) if f"copy-done(%{made[1]})" in x)
                out_of, into = out_of + ("S(5)" in made[2]), into + ("S(5)" in made[3])
                hidden += start < of_products[0] and done > of_products[-1]
    return into, out_of, hidden


if __name__ == "__main__":
    PLATFORM = _devices.available() or "cpu"
    print(_report.table([measure(PLATFORM, on_host=on_host) for on_host in (False, True)]))
