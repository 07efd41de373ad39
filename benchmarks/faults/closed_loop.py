"""Train small models through faults, follow the actions of `Monitor`, and compare the final losses.

    python -m benchmarks.faults.closed_loop [--small] [--only LM] [--out FOLDER]

Five models train with five optimizers through 200 faults. A corruption is a set of bits that are
flipped, or stuck at 0 or 1, in an element, a row, or every 32nd element of a gradient, of
parameters or of moments, in one step or in 50. It follows what Tung et al. (2026, arXiv 2605.04213)
report for GPUs: less than 40 % of the corruptions flip a single bit, their addresses are periodic,
and 1 % of them are NaN or infinite. A corruption is an event of the hardware: steps that are
repeated after a rewind do not repeat it. Batches are bad, and a learning rate is wrong, each time.

A run ends well if its loss on fixed data is at most 1 % above that of the clean run with as many
steps, or if it stops while the fault lasts. A run that leaves out batches uses later ones instead.
Then 50 runs are killed twice each, at random points between two writes or within one.
"""

import argparse
import collections
import functools
import itertools
import json
import pathlib
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip_jax as gcx
from benchmarks import _report
from benchmarks.faults._models import normal, weights
from benchmarks.faults.detect import scaled_by_fault

STEPS, READ_EVERY, LANES = 400, 25, 32
LOG, RESULTS = "run.jsonl", pathlib.Path(__file__).parents[1] / "results"


class Model(NamedTuple):
    params: Any
    batch: Any  # function of a key
    loss: Any  # function of the parameters and a batch
    optimizer: Any


def cosine(rate):
    return optax.warmup_cosine_decay_schedule(0, rate, 20, STEPS)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def labelled(logits_of, width):
    """Random inputs, and labels that are drawn from their logits."""

    def batch(key):
        x = jax.random.normal(key, (64, width))
        return x, jax.random.categorical(jax.random.fold_in(key, 1), logits_of(x))

    return batch


def logistic(key):
    truth = jax.random.normal(jax.random.key(5), (20, 10))
    params = weights(key, w=(20, 10)) | {"b": jnp.zeros(10)}
    loss = lambda p, x, y: cross_entropy(x @ p["w"] + p["b"], y)  # noqa: E731
    return Model(params, labelled(lambda x: x @ truth, 20), loss, optax.sgd(cosine(0.1), 0.9))


def mlp(key):
    def logits_of(x):
        parts = jnp.sin(2 * x[:, 0]), x[:, 1] * x[:, 2], jnp.abs(x[:, 3]), x[:, 4]
        return 2 * jnp.stack(parts, 1)

    def loss(p, x, y):
        h = jax.nn.gelu(x @ p["wi"] + p["b"])
        return cross_entropy(jax.nn.gelu(h @ p["mid"]) @ p["wo"], y)

    params = weights(key, wi=(8, 48), mid=(48, 48), wo=(48, 4)) | {"b": jnp.zeros(48)}
    return Model(params, labelled(logits_of, 8), loss, optax.adamw(cosine(5e-3)))


def lm(key):
    """A transformer for sequences with a constant difference, in which 1 of 10 tokens is wrong."""

    def batch(key):
        start, step = jax.random.randint(key, (2, 32, 1), 0, 5)
        tokens = (start + (step + 1) * jnp.arange(13)) % 16
        keys = jax.random.split(key)
        noise = jax.random.randint(keys[0], tokens.shape, 0, 16)
        tokens = jnp.where(jax.random.uniform(keys[1], tokens.shape) < 0.1, noise, tokens)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(p, x, y):
        h = p["embed"][x] + p["position"]
        q, k, v = jnp.split(normal(h) @ p["qkv"], 3, -1)
        scores = jnp.where(jnp.tri(12, dtype=bool), q @ k.swapaxes(-1, -2) / 5, -1e9)
        h = h + jax.nn.softmax(scores) @ v @ p["wo"]
        h = h + jax.nn.gelu(normal(h) @ p["wi"]) @ p["out"]
        return cross_entropy(normal(h) @ p["head"], y)

    shapes = {"qkv": (24, 72), "wo": (24, 24), "wi": (24, 48), "out": (48, 24)}
    params = weights(key, embed=(16, 24), position=(12, 24), head=(24, 16), **shapes)
    return Model(params, batch, loss, optax.adamw(cosine(1e-2), weight_decay=0.1))


def convnet(key):
    def batch(key):
        keys = jax.random.split(key, 3)
        y = jax.random.randint(keys[0], (32,), 0, 4)
        phase = jax.random.uniform(keys[1], (32, 1), maxval=6.3)
        x = jnp.sin(phase + (y[:, None] + 1) * jnp.arange(24) / 2)
        return (x + jax.random.normal(keys[2], x.shape))[..., None], y

    def loss(p, x, y):
        for name in ("conv1", "conv2"):
            dims = ("NWC", "WIO", "NWC")
            x = jax.lax.conv_general_dilated(x, p[name], (2,), "SAME", dimension_numbers=dims)
            x = jax.nn.relu(x)
        return cross_entropy(x.mean(1) @ p["head"], y)

    params = weights(key, conv1=(5, 1, 16), conv2=(5, 16, 16), head=(16, 4))
    return Model(params, batch, loss, optax.contrib.muon(cosine(1e-2)))


def autoencoder(key):
    def batch(key):
        keys = jax.random.split(key)
        mixed = jax.random.normal(keys[0], (64, 3)) @ jnp.sin(jnp.arange(48.0)).reshape(3, 16)
        x = jnp.tanh(mixed) + 0.5 * jax.random.normal(keys[1], (64, 16))
        return x, x

    def loss(p, x, y):
        h = jnp.tanh(jnp.tanh(x @ p["e1"]) @ p["e2"])
        return jnp.mean((jnp.tanh(h @ p["d1"]) @ p["d2"] - y) ** 2)

    params = weights(key, e1=(16, 32), e2=(32, 4), d1=(4, 32), d2=(32, 16))
    return Model(params, batch, loss, optax.lion(cosine(2e-3)))


MODELS = logistic, mlp, lm, convnet, autoencoder

SHAPES, TARGETS, FOREVER = ("element", "row", "lane"), ("gradient", "parameters", "moments"), 10**6


class Fault(NamedTuple):
    """What goes wrong at some calls of the hardware, in some batches, or at some steps."""

    name: str
    calls: range = range(0)
    batches: range = range(0)
    steps: range = range(0)
    rate: float = 1.0
    growth: float = 1.0
    target: str = ""
    shape: str = ""

    def lasts(self, call, step):
        """Return whether the fault is still there."""
        return call in self.calls or step in self.steps


def faults():
    """Return the 40 faults of each model."""
    for target, shape, count in itertools.product(TARGETS, SHAPES, (1, 50, FOREVER)):
        steps = {1: "one step", 50: "50 steps"}.get(count, "lasting")
        yield Fault(f"{target}, {steps}", range(150, 150 + count), target=target, shape=shape)
    for count in (1, 10, 30, 60):
        yield Fault("bad batches", batches=range(170, 170 + count))
    for rate, start in itertools.product((3, 10), (0, 100, 200)):
        yield Fault(f"rate x {rate}", steps=range(start, FOREVER), rate=rate)
    for growth in (1.01, 1.02, 1.05):
        yield Fault("rate grows", steps=range(100, FOREVER), growth=growth)


def corruption(rng, leaves, shape, is_stuck):
    """Return the bits to keep and the bits to flip in one of the leaves, chosen by its size."""
    sizes = np.array([leaf.size for leaf in leaves])
    chosen = rng.choice(len(leaves), p=sizes / sizes.sum())
    size, width = sizes[chosen], leaves[chosen].shape[-1]
    index, place = np.arange(size), rng.integers(size)
    is_wrong = {
        "element": index == place,
        "row": index // width == place // width,
        "lane": index % LANES == place % LANES,
    }[shape]
    bits = 1 << rng.integers(32) if rng.random() < 0.38 else rng.integers(1, 2**32)
    keep, flip = no_corruption(leaves)
    keep[chosen].flat[is_wrong] = 2**32 - 1 - bits * is_stuck
    flip[chosen].flat[is_wrong] = bits & rng.integers(2**32) if is_stuck else bits
    return keep, flip


def no_corruption(leaves):
    return tuple([np.full(x.shape, bits, np.uint32) for x in leaves] for bits in (2**32 - 1, 0))


class Lab:
    """A model, its optimizer, its data, and a compiled function for some steps."""

    def __init__(self, make, is_guarded=False, seed=0):
        self.name, self.seed = make.__name__, seed
        self.params, self.batch, self.loss, optimizer = make(jax.random.key(seed))
        step_size = optax.inject_hyperparams(optax.scale)(step_size=1.0)
        optimizer = optax.chain(optimizer, step_size, scaled_by_fault())
        tx = optax.chain(gcx.clip_by_global_norm(1.0), optimizer)
        rule = gcx.thresholds.mean_std(6.0, window=128, warmup_steps=64)
        tx = gcx.skip_spikes(tx, norm=rule, loss=rule) if is_guarded else tx
        self.tx = gcx.watch(gcx.skip_nonfinite(tx))
        self.run = {"params": self.params, "state": self.tx.init(self.params), "next_id": 0}
        self.advance = jax.jit(lambda run, given, masks: jax.lax.scan(
            functools.partial(self.step, masks=masks), run, given)[0])
        keys = jax.random.split(jax.random.key(99), 64)
        self.evaluate = jax.jit(
            lambda params: jax.vmap(lambda key: self.loss(params, *self.batch(key)))(keys).mean()
        )

    def is_target(self, leaf):
        """Whether a leaf is a gradient, a parameter, or a moment of one."""
        shapes = {x.shape for x in jax.tree.leaves(self.params)}
        return leaf.shape in shapes and leaf.dtype == jnp.float32 and leaf.ndim > 0

    def corrupted(self, tree, masks, is_on):
        """Flip bits; bits that are not kept become those of the mask."""
        masks = zip(*masks, strict=True)

        def corrupt(x):
            if not self.is_target(x):
                return x
            keep, flip = next(masks)
            bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
            return jnp.where(is_on, jax.lax.bitcast_convert_type((bits & keep) ^ flip, x.dtype), x)

        return jax.tree.map(corrupt, tree)

    def step(self, run, given, masks):
        batch_id, is_on, is_spoilt, rate = given
        x, y = self.batch(jax.random.fold_in(jax.random.key(self.seed), batch_id))
        y = jnp.where(is_spoilt, jnp.roll(y, 1, axis=0), y)
        loss, grads = jax.value_and_grad(self.loss)(run["params"], x, y)
        grads = self.corrupted(grads, masks["gradient"], is_on)
        extra_args = {"value": loss, "batch_id": batch_id, "rate": rate}
        params, state = gcx.apply_gradients(
            self.tx, grads, run["state"], run["params"], **extra_args
        )
        params = self.corrupted(params, masks["parameters"], is_on)
        state = state._replace(
            inner_state=self.corrupted(state.inner_state, masks["moments"], is_on)
        )
        return {"params": params, "state": state, "next_id": batch_id + 1}, None

    def masks(self, fault, seed):
        """Return the masks for each target; those of the fault change bits."""
        state = [x for x in jax.tree.leaves(self.run["state"].inner_state) if self.is_target(x)]
        leaves = dict.fromkeys(TARGETS, jax.tree.leaves(self.params)) | {"moments": state}
        masks = {name: no_corruption(x) for name, x in leaves.items()}
        if fault.target:
            rng, is_stuck = np.random.default_rng(seed), len(fault.calls) > 1
            masks[fault.target] = corruption(rng, leaves[fault.target], fault.shape, is_stuck)
        return masks


class Killed(Exception):
    """The process is gone; the disk remains."""


class Job:
    """A run that follows the actions of a monitor, in one process or, after kills, in several."""

    def __init__(self, lab, fault, seed, folder, kills=()):
        self.lab, self.fault, self.masks = lab, fault, lab.masks(fault, seed)
        self.log, self.kills, self.rng = folder / "run.jsonl", kills, np.random.default_rng(seed)
        self.disk, self.calls, self.points, self.actions = {}, 0, 0, []
        while True:
            try:
                self.report, self.loss = self.process()
                break
            except Killed:
                pass

    def may_die(self):
        self.points += 1
        if self.points in self.kills:
            raise Killed

    def process(self):
        """Train as examples/replay.py does, after a kill from what is on the disk."""
        monitor = gcx.Monitor(self.lab.params, log=self.log, resume=True, rewind_on_rise=True)
        report, run = monitor.report, self.lab.run
        if self.disk:
            run = self.resume(report)
        else:
            self.save(0, run)
        while report.action != "stop" and (step := int(run["state"].step_count)) < STEPS:
            run = self.advance(run, step, report.batch_ids)
            self.may_die()
            report = self.read(monitor, run)
            if report.action in ("rewind", "lower"):
                run = self.resume(report)
            elif report.action == "save":
                self.save(report.step, run)
            for old in list(self.disk):
                if old < (report.good_step or 0):
                    self.may_die()
                    del self.disk[old]
        return report, float(self.lab.evaluate(run["params"]))

    def advance(self, run, step, left_out):
        ids = (i for i in itertools.count(int(run["next_id"])) if i not in left_out)
        ids, steps = list(itertools.islice(ids, READ_EVERY)), range(step, step + READ_EVERY)
        calls, fault = range(self.calls, self.calls + READ_EVERY), self.fault
        self.calls = calls.stop
        rates = [
            fault.rate * fault.growth ** (t - fault.steps.start) if t in fault.steps else 1.0
            for t in steps
        ]
        is_on, is_spoilt = [i in fault.calls for i in calls], [i in fault.batches for i in ids]
        given = np.array(ids), np.array(is_on), np.array(is_spoilt), np.float32(rates)
        return self.lab.advance(run, given, self.masks)

    def read(self, monitor, run):
        before = self.log.read_bytes() if self.log.exists() else b""
        report = monitor.read(run["state"], saved=[*self.disk])
        if self.points + 1 in self.kills:  # in the middle of the write
            size = len(self.log.read_bytes())
            with self.log.open("rb+") as file:
                file.truncate(self.rng.integers(len(before), size + 1))
        self.may_die()
        if report.action not in ("continue", "save"):
            self.actions.append((report.action, report.reason, report.good_step, report.batch_ids))
        return report

    def save(self, step, run):
        self.may_die()
        self.disk[step] = jax.device_get(run)
        self.may_die()

    def resume(self, report):
        is_rewind = report.action in ("rewind", "lower")
        step = report.good_step if is_rewind else max(self.disk)
        run = dict(self.disk[step])
        for later in list(self.disk):
            if later > step:
                self.may_die()
                del self.disk[later]
        run["state"] = optax.tree.set(run["state"], step_size=0.3**report.num_lowers)
        return run
