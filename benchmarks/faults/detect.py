"""Puts faults of known place into training, and counts which `gcx.watch` detects and places.

    python benchmarks/detect.py [--faults 1008] [--clean-steps 100000]

A small recurrent network, a GPT and a conv net. Each fault is put into a step of a run that has
trained for some time, and is taken back after it. Beside it stands what Optax alone sees: an update
that `apply_if_finite` refuses, or a logged norm above ten times the median of the last 200.
"""

import argparse
import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip_jax as gcx

WARM_UP, ROWS, CHUNK = 200, 16, 1000


def dense(key, *shape):
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


def rnn(key):
    keys = jax.random.split(key, 3)
    params = {
        "in": dense(keys[0], 4, 24),
        "cell": dense(keys[1], 24, 24),
        "out": dense(keys[2], 24, 2),
    }

    def loss(params, x, y):
        def cell(h, x):
            return jnp.tanh(x @ params["in"] + h @ params["cell"]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((len(x), 24)), x.swapaxes(0, 1))
        return jnp.mean((h @ params["out"] - y) ** 2, -1)

    return params, loss, lambda x: np.stack([np.sin(x.sum((1, 2))), x[:, -1, 0]], -1)


def gpt(key):
    keys = jax.random.split(key, 6)
    layers = {"qkv": dense(keys[0], 3, 24, 72), "wi": dense(keys[1], 3, 24, 48)}
    layers["wo"] = dense(keys[2], 3, 48, 24) / 4
    params = {"in": dense(keys[3], 4, 24), "layers": layers, "out": dense(keys[4], 24, 2)}

    def normal(h):
        return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-5)

    def loss(params, x, y):
        def block(h, layer):
            q, k, v = jnp.split(normal(h) @ layer["qkv"], 3, -1)
            h = h + jax.nn.softmax(q @ k.swapaxes(-1, -2) / 5.0) @ v
            return h + jax.nn.relu(normal(h) @ layer["wi"]) @ layer["wo"], None

        h, _ = jax.lax.scan(block, x @ params["in"], params["layers"])
        return jnp.mean((normal(h).mean(1) @ params["out"] - y) ** 2, -1)

    return params, loss, lambda x: np.stack([np.sin(x.sum((1, 2))), x[:, 0, 0]], -1)


def conv(key):
    keys = jax.random.split(key, 3)
    params = {"first": dense(keys[0], 3, 4, 16), "second": dense(keys[1], 3, 16, 16)}
    params["out"] = dense(keys[2], 16, 2)

    def loss(params, x, y):
        for name in ("first", "second"):
            x = jax.lax.conv_general_dilated(
                x, params[name], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            x = jax.nn.relu(x)
        return jnp.mean((x.mean(1) @ params["out"] - y) ** 2, -1)

    return params, loss, lambda x: np.stack([np.abs(x).mean((1, 2)), x.mean((1, 2))], -1)


MODELS = {"RNN": rnn, "GPT": gpt, "conv net": conv}
FAULTS = (
    *("NaN in a leaf", "infinity in a leaf", "layer x 10", "float16 overflow"),
    *("spoilt row", "label x 30", "bit of a weight"),
)


class Run:
    """A model in training; `step` is compiled once."""

    def __init__(self, make, seed):
        self.params, self.loss, self.target = make(jax.random.key(seed))
        depth = {name: int(name == "layers") for name in self.params}
        self.tx = gcx.watch(
            gcx.skip_nonfinite(optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(1e-3))),
            granularity=gcx.granularities.layer(depth),
        )
        self.state, self.rng = self.tx.init(self.params), np.random.default_rng(seed)
        self.step, self.norms = jax.jit(self._step), []
        self.steps = jax.jit(self._steps)

        def of_example(params, example):
            return self.loss(params, example[0][None], example[1][None])[0]

        self.of_example = of_example

    def _step(self, params, state, x, y, factors):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(self.loss(p, x, y)))(params)
        grads = jax.tree.map(jnp.multiply, grads, factors)
        updates, state = self.tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    def _steps(self, params, state, xs, ys):
        ones = jax.tree.map(jnp.ones_like, params)

        def step(carry, batch):
            return self._step(*carry, *batch, ones), None

        return jax.lax.scan(step, (params, state), (xs, ys))[0]

    def false_alarms(self, steps):
        """How many of some clean steps were taken for incidents."""
        before = int(self.state.incidents.incident_count)
        for _ in range(max(steps // CHUNK, 1)):
            batches = [self.batch() for _ in range(min(CHUNK, steps))]
            xs, ys = (np.stack(arrays) for arrays in zip(*batches, strict=True))
            self.params, self.state = self.steps(self.params, self.state, xs, ys)
        return int(self.state.incidents.incident_count) - before

    def batch(self):
        x = self.rng.standard_normal((ROWS, 8, 4)).astype("f")
        return x, self.target(x).astype("f")

    def advance(self, params=None, batch=None, factors=None):
        """One step: its incident, and its norm. Its outcome is kept unless it was a fault."""
        x, y = batch or self.batch()
        ones = jax.tree.map(lambda p: np.ones(p.shape, "f"), self.params)
        is_fault = not (params is None and batch is None and factors is None)
        after = self.step(params or self.params, self.state, x, y, factors or ones)
        count = int(after[1].incidents.incident_count)
        found = (
            gcx.incidents(after[1])[-1]
            if count > int(self.state.incidents.incident_count)
            else None
        )
        norm = float(after[1].norms["gradient"][0])
        if not is_fault:
            (self.params, self.state), self.norms = after, [*self.norms[-199:], norm]
        return found, norm


def units_of(run):
    """For each unit its name, and the tree of factors that changes its gradient alone."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        layers = range(len(leaf)) if name.startswith("layers/") else [None]
        for i in layers:
            place = name if i is None else name.replace("layers/", f"layers_{i}/")
            yield place, path, (() if i is None else (i,))


def inject(run, fault):
    """Returns what was found, the norm, and the unit or the row that it was."""
    rng = run.rng
    x, y = run.batch()
    if fault in ("spoilt row", "label x 30"):
        row = int(rng.integers(ROWS))
        if fault == "spoilt row":
            x[row] = 30 * rng.standard_normal(x[row].shape)
        else:
            y[row] = 30 * y[row] + 10 * np.sign(y[row])
        found, norm = run.advance(batch=(x, y))
        worst = gcx.diagnostics.worst_examples(run.of_example, run.params, (x, y), k=3)
        return found, norm, row in worst["deviation"]
    units = list(units_of(run))
    name, path, index = units[rng.integers(len(units))]
    leaves, structure = jax.tree_util.tree_flatten_with_path(run.params)
    arrays = [np.array(leaf) for _, leaf in leaves]
    (at,) = (i for i, (other, _) in enumerate(leaves) if other == path)
    if fault == "bit of a weight":
        target = arrays[at][index]
        place = tuple(rng.integers(n) for n in target.shape)
        flipped = np.float32(target[place]).view(np.int32) ^ np.int32(
            1 << 30
        )  # the highest of the exponent
        target[place] = np.int32(flipped).view(np.float32)
        found, norm = run.advance(params=jax.tree.unflatten(structure, arrays))
    else:
        factors = [np.ones(array.shape, "f") for array in arrays]
        target = factors[at][index]
        if fault == "layer x 10":
            target *= 10
        else:
            place = tuple(rng.integers(n) for n in target.shape)
            target[place] = {"NaN in a leaf": np.nan}.get(fault, np.inf)
            if fault == "float16 overflow":  # every element above 65504 after scaling
                target[...] = np.inf
        found, norm = run.advance(factors=jax.tree.unflatten(structure, factors))
    return found, norm, found is not None and found.leaf == name


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=1008)
    parser.add_argument("--clean-steps", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="21 faults and 30 clean steps")
    args = parser.parse_args()
    if args.quick:
        args.faults, args.clean_steps = 21, 30
    table, alarms = collections.defaultdict(lambda: np.zeros(4, int)), {}
    each = max(args.faults // (len(MODELS) * len(FAULTS)), 1)
    for name, make in MODELS.items():
        run = Run(make, seed=0)
        for _ in range(WARM_UP):
            run.advance()
        for fault in FAULTS:
            for _ in range(each):
                run.advance()
                found, norm, is_placed = inject(run, fault)
                by_optax = not np.isfinite(norm) or norm > 10 * np.median(run.norms)
                table[name, fault] += [1, found is not None, bool(is_placed), by_optax]
        clean = max(args.clean_steps // len(MODELS) // CHUNK * CHUNK, 10)
        alarms[name] = run.false_alarms(clean), clean
    print("| model | fault | detected | placed | by a finite check or 10x the median norm |")
    print("| --- | --- | --- | --- | --- |")
    for (name, fault), (n, detected, placed, by_optax) in table.items():
        print(f"| {name} | {fault} | {detected / n:.0%} | {placed / n:.0%} | {by_optax / n:.0%} |")
    for name, (count, steps) in alarms.items():
        print(f"{name}: {count} false alarms in {steps} clean steps")


if __name__ == "__main__":
    main()
