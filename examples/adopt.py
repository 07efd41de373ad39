"""Replace `MultiSteps`, `apply_if_finite` and the clip of Optax, and compare one bad batch.

    python examples/adopt.py                    # draws build/adopt.png
    python examples/adopt.py --out losses.png

A small network is trained on micro-batches, four to an optimizer step. Micro-batch 90 contains one
NaN, after which the run with Optax stays NaN. The second run continues from the state of the first
one at micro-batch 80, which `convert_state` converts, and trains on.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import gradclip_jax as gcx

MICRO_BATCHES, CONVERTED_AT, BAD = 240, 80, 90


def with_optax():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return optax.MultiSteps(optax.apply_if_finite(optimizer, 5), every_k_schedule=4)


def with_gradclip_jax():
    optimizer = optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return gcx.skip_nonfinite(gcx.accumulate_gradients(optimizer, every=4))


def loss_fn(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def step(update, params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def make_batches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(MICRO_BATCHES, 32, 8)).astype(np.float32)
    y = np.sin(x[..., :2].sum(-1, keepdims=True)) + 0.05 * rng.normal(size=(MICRO_BATCHES, 32, 1))
    x[BAD, 3, 5] = np.nan  # one corrupted number
    return list(zip(x, y.astype(np.float32), strict=True))


def train():
    """Train with Optax, and from micro-batch 80 on also with this library; return both losses."""
    w1, w2 = (jax.random.normal(key, (8, 64)) / 3 for key in jax.random.split(jax.random.key(0)))
    params = {"w1": w1, "b1": jnp.zeros(64), "w2": w2[:1].T}
    old, new = with_optax(), with_gradclip_jax()
    runs, losses = {"Optax": (old, params, old.init(params))}, {"Optax": [], "gradclip_jax": []}
    for i, batch in enumerate(make_batches()):
        if i == CONVERTED_AT:
            _, params, state = runs["Optax"]
            runs["gradclip_jax"] = new, params, gcx.convert_state(new, state, params)
        for name, (tx, params, state) in runs.items():
            params, state, loss = step(tx.update, params, state, batch)
            runs[name] = tx, params, state
            losses[name].append(float(loss))
    return losses


def draw(losses, path):
    """Draw both runs; a run that is NaN is drawn as a bar at the top."""
    grey = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with plt.rc_context(dict.fromkeys(grey, "#808080")):
        figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
        for (name, values), color in zip(losses.items(), ("#d9534f", "#1f77b4"), strict=True):
            places = np.arange(MICRO_BATCHES - len(values), MICRO_BATCHES)
            axes.plot(places, values, color=color, label=name)
            height = max(map(np.nanmax, losses.values()))
            missing = np.where(np.isnan(values), height, np.nan)  # an isolated NaN draws nothing
            axes.plot(places, missing, color=color, lw=5)
            if np.isnan(values[-1]):
                where = {"xytext": (0, -16), "textcoords": "offset points", "ha": "right"}
                axes.annotate("the loss is NaN", (places[-1], height), color=color, **where)
        axes.axvline(BAD, color="#808080", ls=":", lw=1, label="one NaN in the data")
        axes.set(xlabel="micro-batch", ylabel="loss")
        axes.margins(y=0.12)
        axes.legend(loc="center right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, transparent=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/adopt.png"))
    options = parser.parse_args(arguments)
    losses = train()
    for name, values in losses.items():
        nans = np.isnan(values).sum()
        print(f"{name:12} NaN in {nans:3} of {len(values)} losses, last loss {values[-1]:.3f}")
    draw(losses, options.out)
    print(f"drew {options.out}")
    return losses


if __name__ == "__main__":
    main()
