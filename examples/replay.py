"""Keeps the batches since the last checkpoint: an incident can be done again, or left out.

    python replay.py train runs/replay
    python replay.py replay runs/replay/incident

The first trains on clean data, on data with a spoilt stretch, and on the same going back to the
checkpoint and leaving the stretch out (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
It writes the first incident to disk. The second does it again from there, in another process: the
same verdict bit for bit means that it was the data, not the hardware.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import gradclip_jax as gcx

STEPS, EVERY, LEFT_OUT = 400, 25, 40
SPOILT = range(330, 360)

guarded = gcx.skip_spikes(
    optax.adam(3e-3), norm=gcx.thresholds.mean_std(), relearn_after=1000, max_consecutive_skips=3
)
tx = gcx.watch(guarded)
checkpointer = ocp.StandardCheckpointer()


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["wi"] + params["b"]) @ params["wo"] - y) ** 2)


def init(seed):
    keys = jax.random.split(jax.random.key(seed))
    params = {"wi": jax.random.normal(keys[0], (4, 32)), "b": jnp.zeros(32)}
    return {**params, "wo": jax.random.normal(keys[1], (32, 1)) / 6}


def make_step(tx):
    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return step


def make_data(seed, spoilt=()):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((STEPS + LEFT_OUT + EVERY, 32, 4)).astype("f")
    y = np.sin(x[..., :1] * x[..., 1:2])
    y[list(spoilt)] = 30 * rng.standard_normal(y[list(spoilt)].shape)
    return x, y


def save(path, tree):
    checkpointer.save(path.resolve(), tree, force=True)
    checkpointer.wait_until_finished()


def restore(path, seed=0):
    params = init(seed)
    return checkpointer.restore(path.resolve(), (params, tx.init(params)))


def train(folder, seed, spoilt):
    """Goes back to the checkpoint and leaves out what follows when the guard gives up."""
    x, y = make_data(seed, spoilt)
    params, step, position, kept, told = init(seed), make_step(tx), 0, [], False
    state = tx.init(params)
    for i in range(STEPS):
        if i % EVERY == 0 and not gcx.metrics(state)["consecutive_skips"]:
            save(folder / "checkpoint", (params, state))
            kept = []
        kept.append((x[position], y[position]))
        params, state = step(params, state, *kept[-1])
        position += 1
        # In a large run look at the state of the step before: then the device does not wait.
        if not told and int(state.incidents.incident_count):
            told = True
            save(folder / "incident", restore(folder / "checkpoint", seed))
            xs, ys = map(np.stack, zip(*kept, strict=True))
            np.savez(folder / "incident.npz", x=xs, y=ys, verdict=state.incidents.rows)
            print(gcx.incidents(state)[-1])
        if gcx.metrics(state)["guard_failed"]:
            params, state = restore(folder / "checkpoint", seed)
            position += LEFT_OUT
            kept = []
    return params


def train_plainly(seed, spoilt):
    (x, y), params, adam = make_data(seed, spoilt), init(seed), optax.adam(3e-3)
    step, state = make_step(optax.with_extra_args_support(adam)), adam.init(params)
    for i in range(STEPS):
        params, state = step(params, state, x[i], y[i])
    return params


def replay(incident):
    """Does the steps since the checkpoint again; returns whether the verdict is the same."""
    params, state = restore(incident)
    kept, step = np.load(incident.with_suffix(".npz")), make_step(tx)
    for x, y in zip(kept["x"], kept["y"], strict=True):
        params, state = step(params, state, x, y)
    print(gcx.incidents(state)[-1])
    return np.array_equal(kept["verdict"], state.incidents.rows)


def main(command, folder):
    folder = pathlib.Path(folder)
    if command == "replay":
        print("the same verdict, bit for bit" if replay(folder) else "ANOTHER VERDICT")
        return
    test = [part.reshape(-1, part.shape[-1]) for part in make_data(1000)]
    for name, run in (
        ("clean", lambda: train_plainly(0, ())),
        ("clean, another seed", lambda: train_plainly(1, ())),
        ("spoilt", lambda: train_plainly(0, SPOILT)),
        ("spoilt, with rewinding", lambda: train(folder, 0, SPOILT)),
    ):
        print(f"{name}: loss {float(loss_fn(run(), *test)):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
