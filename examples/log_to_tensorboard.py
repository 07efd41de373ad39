"""Logs what clip and guards tell to TensorBoard, and reads the event file back.

Then `tensorboard --logdir runs`. Other loggers take the same mapping from name to number: for
Weights & Biases it is `wandb.log(row, step=step)`, for a progress bar `bar.set_postfix(row)`.
"""

import functools
import math
import struct
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

import gradclip_jax as gcx

STEPS = 60

tx = gcx.skip_nonfinite(optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(0.05)))


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    params, state = gcx.apply_gradients(tx, grads, state, params, value=loss)
    # The same keys at every step; the numbers were computed for the clip and the guard anyway.
    return params, state, {"loss": loss, **gcx.metrics(state)}


def read_scalars(file):
    """Tag to the `(step, value)` pairs of an event file."""
    scalars, data = defaultdict(list), Path(file).read_bytes()
    while data:  # each record: its length in 8 bytes, a checksum in 4, the event, a checksum in 4
        (length,) = struct.unpack("<Q", data[:8])
        event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
        for value in event.summary.value:
            scalars[value.tag].append((event.step, value.simple_value))
    return dict(scalars)


def main(folder="runs"):
    key = jax.random.key(0)
    x = jax.random.normal(key, (STEPS, 32, 3))
    y = x @ jnp.array([1.0, -2.0, 0.5]) + 3.0
    x = x.at[20, 0, 0].set(jnp.nan)  # a batch that would spoil every later step

    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    state = tx.init(params)
    rows = []
    with SummaryWriter(folder) as writer:
        for step in range(STEPS):
            params, state, row = train_step(params, state, x[step], y[step])
            rows.append({name: float(value) for name, value in jax.device_get(row).items()})
            for name, value in rows[-1].items():
                if math.isfinite(value):  # TensorBoard has no place for a NaN in a curve
                    writer.add_scalar(name, value, step)

    file = max(Path(folder).glob("events.out.tfevents.*"))  # the name holds the time
    scalars = read_scalars(file)
    print(f"{file}: {len(scalars)} tags, {STEPS} steps")
    for name, points in scalars.items():
        print(f"  {name:<18} {points[0][1]:>8.4g} -> {points[-1][1]:.4g}")
    return rows, file


if __name__ == "__main__":
    main()
