"""Rewind: go back to a checkpoint, leave the bad stretch of data out, and go on.

    python replay.py train runs/replay
    python replay.py replay runs/replay/incident

`train` compares runs on clean data, on data with a spoilt stretch, and on the same data with
rewinding (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 5.1). The last one writes its
first bad step to disk, with its batches and their ids, and continues from its checkpoints if it was
killed. `replay` repeats the steps from the checkpoint to the bad step in another process: the same
numbers bit for bit rule out a transient hardware fault.
"""

import json
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import gradclip_jax as gcx

STEPS, BATCHES = 400, 700
SAVE_EVERY = 25  # steps between checkpoints; none within so many steps after an incident
USUAL_BATCHES = 10  # the stretch has ended when so many losses in a row are usual
MAX_UNEXPLAINED = 3  # incidents in usual batches before training stops
CAUSES = {"nan", "infinity", "norm", "loss"}

tx = gcx.watch(gcx.skip_nonfinite(optax.adam(3e-3)))
checkpointer = ocp.StandardCheckpointer()


@jax.jit
def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["wi"] + params["b"]) @ params["wo"] - y) ** 2)


@jax.jit
def step_fn(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, state = tx.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state, loss


def init(seed):
    keys = jax.random.split(jax.random.key(seed))
    params = {"wi": jax.random.normal(keys[0], (4, 32)), "b": jnp.zeros(32)}
    return {**params, "wo": jax.random.normal(keys[1], (32, 1)) / 6}


def make_data(seed, spoilt=()):
    """Batches by id; those of the spoilt ids have labels of noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCHES, 32, 4)).astype("f")
    y = np.sin(x[..., :1] * x[..., 1:2])
    y[list(spoilt)] = 30 * rng.standard_normal(y[list(spoilt)].shape)
    return x, y


def first_run(seed):
    """Everything that a checkpoint holds; `recent` are the ids of the last batches, -1 for none."""
    params = init(seed)
    run = {"params": params, "state": tx.init(params), "step": np.array(0), "next_id": np.array(0)}
    return run | {"recent": np.full(SAVE_EVERY, -1), "losses": np.full(SAVE_EVERY, np.nan, "f")}


def is_unusual(loss, losses):
    """Whether a loss is far above others: `watch` needs more steps for a narrow threshold."""
    logs = np.log([x for x in losses if 0 < x < np.inf])
    if len(logs) < USUAL_BATCHES:
        return False
    deviation = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    return not np.log(loss) <= np.median(logs) + max(6 * deviation, np.log(3))


class Checkpoints:
    """The last two checkpoints: one is complete while the other is written or deleted."""

    def __init__(self, folder, seed):
        self.folder, self.seed = folder.resolve(), seed

    def paths(self):
        """Orbax renames a folder when everything is written: the last one is complete."""
        found = [x for x in self.folder.glob("checkpoint_*") if x.name[11:].isdigit()]
        return sorted(found, key=lambda path: int(path.name[11:]))

    def load(self):
        """The latest checkpoint and its folder; None if there is none."""
        paths = self.paths()
        return (restore(paths[-1], self.seed), paths[-1]) if paths else None

    def save(self, run):
        print(f"saving step {run['step']}", flush=True)
        checkpointer.save(self.folder / f"checkpoint_{run['step']}", run)
        checkpointer.wait_until_finished()
        for path in self.paths()[:-2]:
            shutil.rmtree(path)


def restore(path, seed=0):
    return checkpointer.restore(path.resolve(), first_run(seed))


def stretch_to_leave_out(run, x, y, last_id, left_out):
    """The ids from the first unusual batch since the checkpoint to where losses are usual again."""

    def loss_of(i):
        return float(loss_fn(run["params"], x[i], y[i]))

    first_id = int(run["next_id"])
    usual = [i for i in run["recent"].tolist() if i >= 0] or range(first_id, last_id)
    usual, unusual, i = [loss_of(i) for i in usual], [], first_id
    while i <= max([last_id, *unusual]) + USUAL_BATCHES and i < len(x):
        is_new = not any(i in stretch for stretch in left_out)
        unusual += [i] if is_new and is_unusual(loss_of(i), usual) else []
        i += 1
    return range(unusual[0], unusual[-1] + 1) if unusual else None


def train(folder, seed, spoilt):
    """Train with rewinding; returns the parameters and the stretches that were left out."""
    x, y = make_data(seed, spoilt)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints, left_out = Checkpoints(folder, seed), []
    saved = checkpoints.load()
    run = saved[0] if saved else first_run(seed)
    ids, is_saved, last_incident, unexplained = [], saved is not None, -SAVE_EVERY, 0
    while run["step"] < STEPS:
        step, i = int(run["step"]), int(run["next_id"])
        if any(i in stretch for stretch in left_out):
            run["next_id"] = np.array(i + 1)
            continue
        is_quiet = step - last_incident >= SAVE_EVERY
        if step % SAVE_EVERY == 0 and is_quiet and not is_saved:
            checkpoints.save(run)
            ids = []
        recent, losses = run["recent"], run["losses"]
        before = int(run["state"].incidents.incident_count)
        params, state, loss = step_fn(run["params"], run["state"], x[i], y[i])
        # In a large run read the loss and the state of the step before: the device does not wait.
        loss, new = float(loss), gcx.incidents(state)[-1:]
        new = new if int(state.incidents.incident_count) > before else []
        is_bad = is_unusual(loss, run["losses"]) or bool(new and CAUSES & set(new[0].kinds))
        ids.append(i)
        if new or is_bad:
            last_incident = step
        if is_bad:
            sentence = str(new[0]) if new else f"step {step}: loss {loss:.2g}"
            keep(folder, step, sentence, checkpoints.paths()[-1], ids, x, y, loss, state)
        is_saved = False
        run = {"params": params, "state": state, "step": np.array(step + 1)}
        run["next_id"], run["recent"] = np.array(i + 1), np.append(recent[1:], i)
        run["losses"] = np.append(losses[1:], np.float32(loss))
        if not is_bad:
            continue
        rewound, _ = checkpoints.load()
        stretch = stretch_to_leave_out(rewound, x, y, i, left_out)
        if stretch is None:
            unexplained += 1
            if unexplained == MAX_UNEXPLAINED:
                raise RuntimeError("incidents in usual batches: rewinding does not help")
            continue
        print(f"step {step}: back to step {rewound['step']}, without batches {stretch}", flush=True)
        run, ids, is_saved, last_incident = rewound, [], True, -SAVE_EVERY
        left_out.append(stretch)
    return run["params"], left_out


def keep(folder, step, sentence, checkpoint, ids, x, y, loss, state):
    """Log the bad step with its batch; keep all that is needed to repeat the first one."""
    with open(folder / "incidents.jsonl", "a") as file:
        row = {"step": step, "batch": ids[-1], "sentence": sentence}
        file.write(json.dumps(row) + "\n")
    if not (folder / "incident.npz").exists():
        print(sentence)
        shutil.copytree(checkpoint, folder / "incident", dirs_exist_ok=True)
        verdict = {"loss": np.float32(loss), "rows": state.incidents.rows}
        np.savez(folder / "partial.npz", ids=ids, x=x[ids], y=y[ids], **verdict)
        (folder / "partial.npz").replace(folder / "incident.npz")  # complete even after a kill


def train_plainly(seed, spoilt):
    (x, y), params, adam = make_data(seed, spoilt), init(seed), optax.adam(3e-3)
    state = adam.init(params)

    @jax.jit
    def step(params, state, x, y):
        updates, state = adam.update(jax.grad(loss_fn)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    for i in range(STEPS):
        params, state = step(params, state, x[i], y[i])
    return params


def replay(incident):
    """Repeat the steps from the checkpoint to the bad step: are loss and incidents the same?"""
    run, kept = restore(incident), np.load(incident.with_suffix(".npz"))
    params, state, loss = run["params"], run["state"], None
    for x, y in zip(kept["x"], kept["y"], strict=True):
        params, state, loss = step_fn(params, state, x, y)
    print(f"loss {loss:.2g} in batch {kept['ids'][-1]}", *gcx.incidents(state)[-1:])
    same = np.array_equal(kept["rows"], state.incidents.rows)
    return same and np.array_equal(kept["loss"], loss, equal_nan=True)


def test_loss(params):
    x, y = make_data(1000)
    return float(loss_fn(params, x.reshape(-1, 4), y.reshape(-1, 1)))


def main(command, folder):
    folder, spoilt = pathlib.Path(folder), range(330, 390)
    if command == "replay":
        print("the same verdict, bit for bit" if replay(folder) else "ANOTHER VERDICT")
        return
    for name, run in (
        ("clean", lambda: train_plainly(0, ())),
        ("clean, another seed", lambda: train_plainly(1, ())),
        ("spoilt", lambda: train_plainly(0, spoilt)),
        ("spoilt, with rewinding", lambda: train(folder, 0, spoilt)[0]),
    ):
        print(f"{name}: loss {test_loss(run()):.4f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
