"""An accumulator in host memory, compiled for devices that are not there: scratch and transfers.

Run it in an environment of `make bench-compiled`:
`JAX_PLATFORMS=cpu .venv-tpu/bin/python benchmarks/host_compiled.py`.
"""

import re
from typing import Any

import _devices
import _report
import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import gradclip_jax as gcx

LAYERS, WIDTH, BATCH = 3, 2048, 512
PARAMS = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
N = 4 * LAYERS * WIDTH**2
TX = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-4)), 8)


def loss(params: Any, x: Any) -> Any:
    """Of a network without biases."""
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def measure(platform: str, *, on_host: bool) -> dict[str, Any]:
    """Scratch, and what crosses between the memories in a held and in an emitted step."""
    device = _devices.devices(platform)[0]
    here = SingleDeviceSharding(device)
    there = SingleDeviceSharding(device, memory_kind="pinned_host") if on_host else here
    state = _devices.placed(jax.eval_shape(TX.init, PARAMS), here)
    state = state._replace(acc_grads=_devices.placed(state.acc_grads, there))

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        if on_host:
            state = state._replace(acc_grads=jax.device_put(state.acc_grads, here))
        params, state = gcx.apply_gradients(TX, grads, state, params)
        return params, state._replace(acc_grads=jax.device_put(state.acc_grads, there))

    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=here)
    params = _devices.placed(PARAMS, here)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    found = _devices.compile_for(platform, step, params, state, x, donate=(0, 1), out_shardings=out)
    copies = re.findall(r" = (.*?) (?:copy-start|copy)\(", found.text)
    return {
        "device": platform,
        "accumulator": "host" if on_host else "device",
        "scratch, N": round(found.scratch / N, 2),
        "transfers": sum("S(5)" in made for made in copies),
        "moved, N": round(found.program.held.moved / N, 1),
    }


if __name__ == "__main__":
    PLATFORM = _devices.available() or "cpu"
    print(_report.table([measure(PLATFORM, on_host=on_host) for on_host in (False, True)]))
