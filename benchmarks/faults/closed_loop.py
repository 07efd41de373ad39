"""Train small models through faults, follow the actions of `Monitor`, and compare the final losses.

    python -m benchmarks.faults.closed_loop [--small] [--runs FILE]

Five models train with five optimizers through 200 faults. A corruption is a set of bits that are
flipped, or stuck at 0 or 1, in an element, a row, or every 32nd element of a gradient, of
parameters or of moments, in one step or in 50. It follows what arXiv 2605.04213 (2026)
report for GPUs: less than 40 % of the corruptions flip a single bit, their addresses are periodic,
and 1 % of them are NaN or infinite. A corruption is an event of the hardware: steps that are
repeated after a rewind do not repeat it. Batches are bad, and a learning rate is wrong, each time.

A run ends well if its loss on fixed data is at most 1 % above that of the clean run with as many
steps, or if it stops while the fault lasts. A run that leaves out batches uses later ones instead.
Then 50 runs are killed twice each, at random points between two writes or within one.

Each finished run is a line of FILE. If the command is stopped, the same command goes on where it
was; it writes the tables once all runs have finished with the same sources.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
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
from gradclip_jax.monitoring.host._lines import lines_with
from gradclip_jax.monitoring.host._log import read_columns

STEPS, READ_EVERY, LANES = 400, 25, 32
BATCHES, HELD_OUT = 1000, 64


class Model(NamedTuple):
    params: Any
    data: Any  # inputs and targets of all batches
    loss: Any  # function of parameters, inputs and targets
    optimizer: Any
    has_spike_guard: bool = False


def cosine(rate):
    return optax.warmup_cosine_decay_schedule(0, rate, 20, STEPS)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def drawn(rng, logits):
    return np.argmax(logits + rng.gumbel(size=logits.shape), -1)


def logistic(key, rng):
    x = rng.normal(size=(BATCHES, 256, 20))
    data = x, drawn(rng, x @ rng.normal(size=(20, 10)))
    params = weights(key, w=(20, 10)) | {"b": jnp.zeros(10)}

    def loss(p, x, y):
        return cross_entropy(x @ p["w"] + p["b"], y)

    return Model(params, data, loss, optax.sgd(cosine(0.1), momentum=0.9))


def mlp(key, rng):
    x = rng.normal(size=(BATCHES, 128, 8))
    parts = np.sin(2 * x[..., 0]), x[..., 1] * x[..., 2], np.abs(x[..., 3]), x[..., 4]
    data = x, drawn(rng, 2 * np.stack(parts, -1))

    def loss(p, x, y):
        h = jax.nn.gelu(x @ p["wi"] + p["b"])
        return cross_entropy(jax.nn.gelu(h @ p["mid"]) @ p["wo"], y)

    params = weights(key, wi=(8, 48), mid=(48, 48), wo=(48, 4)) | {"b": jnp.zeros(48)}
    return Model(params, data, loss, optax.adamw(cosine(5e-3)), has_spike_guard=True)


def transformer(key, rng):
    """Predict tokens with a constant difference, 1 of 10 of which is random."""
    start, difference = rng.integers(0, 5, size=(2, BATCHES, 32, 1))
    tokens = (start + (difference + 1) * np.arange(13)) % 16
    noise = rng.integers(0, 16, size=tokens.shape)
    tokens = np.where(rng.random(tokens.shape) < 0.1, noise, tokens)

    def loss(p, x, y):
        h = p["embed"][x] + p["position"]
        q, k, v = jnp.split(normal(h) @ p["qkv"], 3, -1)
        scores = jnp.where(jnp.tri(12, dtype=bool), q @ k.swapaxes(-1, -2) / 5, -1e9)
        h = h + jax.nn.softmax(scores) @ v @ p["wo"]
        h = h + jax.nn.gelu(normal(h) @ p["wi"]) @ p["out"]
        return cross_entropy(normal(h) @ p["head"], y)

    shapes = {"qkv": (24, 72), "wo": (24, 24), "wi": (24, 48), "out": (48, 24)}
    params = weights(key, embed=(16, 24), position=(12, 24), head=(24, 16), **shapes)
    data = tokens[..., :-1], tokens[..., 1:]
    return Model(params, data, loss, optax.adamw(cosine(1e-2), weight_decay=0.1))


def convnet(key, rng):
    """Classify the frequency of noisy signals."""
    y = rng.integers(0, 4, size=(BATCHES, 32))
    phase = rng.uniform(0, 2 * np.pi, size=(BATCHES, 32, 1))
    x = np.sin(phase + (y[..., None] + 1) * np.arange(24) / 2)
    x = (x + rng.normal(size=x.shape))[..., None]

    def loss(p, x, y):
        for name in ("conv1", "conv2"):
            dims = ("NWC", "WIO", "NWC")
            x = jax.lax.conv_general_dilated(x, p[name], (2,), "SAME", dimension_numbers=dims)
            x = jax.nn.relu(x)
        return cross_entropy(x.mean(1) @ p["head"], y)

    params = weights(key, conv1=(5, 1, 16), conv2=(5, 16, 16), head=(16, 4))
    optimizer = optax.contrib.muon(cosine(1e-2))
    return Model(params, (x, y), loss, optimizer, has_spike_guard=True)


def autoencoder(key, rng):
    x = np.tanh(rng.normal(size=(BATCHES, 64, 3)) @ np.sin(np.arange(48.0)).reshape(3, 16))
    x += 0.5 * rng.normal(size=x.shape)

    def loss(p, x, y):
        h = jnp.tanh(jnp.tanh(x @ p["e1"]) @ p["e2"])
        return jnp.mean((jnp.tanh(h @ p["d1"]) @ p["d2"] - y) ** 2)

    params = weights(key, e1=(16, 32), e2=(32, 4), d1=(4, 32), d2=(32, 16))
    return Model(params, (x, x), loss, optax.lion(cosine(2e-3)))


MODELS = logistic, mlp, transformer, convnet, autoencoder
SHAPES, TARGETS, FOREVER = ("element", "row", "lane"), ("gradient", "parameters", "moments"), 10**6


class Fault(NamedTuple):
    """What goes wrong at some calls of the hardware, in some batches, or at some steps."""

    kind: str
    detail: str = ""
    calls: range = range(0)
    batches: range = range(0)
    steps: range = range(0)
    rate: float = 1.0
    growth: float = 1.0
    target: str = ""
    shape: str = ""

    @property
    def name(self):
        return f"{self.kind}, {self.detail}"

    def lasts(self, call, step):
        """Return whether the fault is still there."""
        return call in self.calls or step in self.steps


def faults():
    """Return the 40 faults of each model."""
    for target, shape, count in itertools.product(TARGETS, SHAPES, (1, 50, FOREVER)):
        steps = {1: "one step", 50: "50 steps"}.get(count, "lasting")
        calls = range(150, 150 + count)
        yield Fault(target, f"{shape}, {steps}", calls, target=target, shape=shape)
    for count in (1, 10, 30, 60):
        yield Fault("bad batches", str(count), batches=range(170, 170 + count))
    for rate, start in itertools.product((3, 10), (0, 100, 200)):
        yield Fault(f"rate x {rate}", f"from {start}", steps=range(start, FOREVER), rate=rate)
    for growth in (1.01, 1.02, 1.05):
        yield Fault("rate grows", f"x {growth}", steps=range(100, FOREVER), growth=growth)


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

    def __init__(self, make):
        self.name, self.model = make.__name__, make(jax.random.key(0), np.random.default_rng(0))
        optimizer, loss = self.model.optimizer, self.model.loss
        step_size = optax.inject_hyperparams(optax.scale)(step_size=1.0)  # as in examples/replay.py
        tx = optax.chain(gcx.clip_by_global_norm(1.0), optimizer, step_size, scaled_by_fault())
        if self.model.has_spike_guard:
            rule = gcx.thresholds.mean_std(6.0, window=128, warmup_steps=64)
            tx = gcx.skip_spikes(tx, norm=rule, loss=rule)
        self.tx, params = gcx.watch(gcx.skip_nonfinite(tx)), self.model.params
        self.start = {"params": params, "state": jax.jit(self.tx.init)(params), "next_id": 0}
        self.shapes = {x.shape for x in jax.tree.leaves(params)}
        self.data = [x.astype("f" if x.dtype == float else "i") for x in self.model.data]
        held_out = [x[-HELD_OUT:] for x in self.data]
        losses = jax.vmap(loss, (None, 0, 0))
        self.evaluate = jax.jit(lambda run: losses(run["params"], *held_out).mean())

    @functools.partial(jax.jit, static_argnums=0)
    def advance(self, run, given, masks):
        return jax.lax.scan(lambda run, given: (self.step(run, *given, masks), None), run, given)[0]

    def is_target(self, leaf):
        """Whether a leaf is a gradient, a parameter, or a moment of one."""
        return leaf.shape in self.shapes and leaf.dtype == jnp.float32 and leaf.ndim > 0

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

    def step(self, run, batch_id, x, y, rate, is_on, masks):
        loss, grads = jax.value_and_grad(self.model.loss)(run["params"], x, y)
        grads = self.corrupted(grads, masks["gradient"], is_on)
        extra_args = {"value": loss, "batch_id": batch_id, "rate": rate}
        old = run["state"], run["params"]
        params, state = gcx.apply_gradients(self.tx, grads, *old, **extra_args)
        params = self.corrupted(params, masks["parameters"], is_on)
        inner = self.corrupted(state.inner_state, masks["moments"], is_on)
        state = state._replace(inner_state=inner)
        return {"params": params, "state": state, "next_id": batch_id + 1}

    def masks(self, fault, seed):
        """Return the masks for each target; those of the fault change bits."""
        state = [x for x in jax.tree.leaves(self.start["state"].inner_state) if self.is_target(x)]
        leaves = dict.fromkeys(TARGETS, jax.tree.leaves(self.model.params)) | {"moments": state}
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
        self.disk, self.calls, self.points, self.num_kills = {}, 0, 0, 0
        self.told, self.lost, self.last = None, [], None
        folder.mkdir()
        while self.last is None:
            with contextlib.suppress(Killed):
                self.report, self.last = self.process()

    def may_die(self):
        self.points += 1
        if self.points in self.kills:
            self.num_kills += 1
            raise Killed

    def process(self):
        """Train as examples/replay.py does, after a kill from what is on the disk."""
        monitor = gcx.Monitor(self.lab.model.params, log=self.log, resume=True, rewind_on_rise=True)
        report, run = monitor.report, self.lab.start
        if self.told is not None:
            # A decision that was written before the kill is in force, although no one was told.
            is_newer = report.num_rewinds > self.told.num_rewinds
            if not is_newer and report.batch_ids != self.told.batch_ids:
                self.lost.append(f"{self.told.batch_ids} became {report.batch_ids}")
            if (report.num_rewinds, report.num_lowers) < self.told[5:7]:
                self.lost.append("a rewind")
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
        return report, run

    def advance(self, run, step, left_out):
        ids = (i for i in itertools.count(int(run["next_id"])) if i not in left_out)
        ids, steps = list(itertools.islice(ids, READ_EVERY)), range(step, step + READ_EVERY)
        calls, fault = range(self.calls, self.calls + READ_EVERY), self.fault
        self.calls = calls.stop
        rates = [
            fault.rate * fault.growth ** (t - fault.steps.start) if t in fault.steps else 1.0
            for t in steps
        ]
        is_on, (x, y) = [i in fault.calls for i in calls], [x[ids] for x in self.lab.data]
        is_bad = np.reshape([i in fault.batches for i in ids], (-1, *[1] * (y.ndim - 1)))
        y = np.where(is_bad, np.roll(y, 1, axis=1), y)
        given = np.array(ids), x, y, np.float32(rates), np.array(is_on)
        return self.lab.advance(run, given, self.masks)

    def read(self, monitor, run):
        before = self.log.read_bytes() if self.log.exists() else b""
        report = monitor.read(run["state"], saved=[*self.disk])
        if self.points + 1 in self.kills:  # in the middle of the write
            size = len(self.log.read_bytes())
            with self.log.open("rb+") as file:
                file.truncate(self.rng.integers(len(before), size + 1))
        self.may_die()
        self.told = report
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


def ending(job, clean):
    """Return how a run has ended, and its loss relative to the clean run."""
    loss = float(job.lab.evaluate(job.last)) / clean - 1
    if job.report.action == "stop":
        lasts = job.fault.lasts(job.calls - 1, job.report.step - 1)
        return "stopped" if lasts else "failed", loss
    return ("better" if loss < -0.01 else "well" if loss <= 0.01 else "failed"), loss


def events(job):
    """Return the incidents, the decisions with the batches that they leave out, and the actions."""
    columns = read_columns(job.log)  # without lines that were cut off by a kill
    decisions = lines_with(columns, ["action", "batch_ids"]).values()
    decisions = [(x["action"], x["batch_ids"]) for x in decisions]
    incidents = {(x["step"], *x["kinds"]) for x in lines_with(columns, ["step", "kinds"]).values()}
    return incidents, decisions, [action for action, _ in decisions]


def differences(job, killed):
    """Yield what a killed run has lost, or has decided otherwise than without kills."""
    yield from killed.lost
    if not job.fault.calls:  # steps that are repeated after a kill do not repeat a corruption
        (incidents, decisions, _), again = events(job), events(killed)
        if incidents - again[0]:
            yield f"without the incidents {sorted(incidents - again[0])}"
        if decisions != again[1]:
            yield f"{decisions} became {again[1]}"


class Runs:
    """The finished runs in a file, one line each, so that a command that was stopped goes on.

    Runs of another version of the package, of this script, or of JAX do not count.
    """

    def __init__(self, path):
        self.path, self.of = path, {"sources": checksum_of_sources(), "jax": jax.__version__}
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        self.rows = {x["what"]: x for x in found if self.of.items() <= x.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(x) + "\n" for x in self.rows.values()))
        print(f"{len(self.rows)} of these runs are in {path}")

    def add(self, what, **row):
        self.rows[what] = {"what": what, **row, **self.of}
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[what]) + "\n")
        print(f"{row['end']}: {what} | {row['loss']} | {', '.join(row['actions'])}", flush=True)


def checksum_of_sources():
    """A checksum of the package and of this script."""
    paths = sorted(pathlib.Path(gcx.__file__).parent.rglob("*.py"))
    texts = [path.read_bytes() for path in (pathlib.Path(__file__), *paths)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def run_model(runs, number, numbered_faults):
    """Train a model without a fault, then with each fault, and kill every fourth run."""
    name = MODELS[number].__name__
    left = [x for x in numbered_faults if f"{name}: {x[1].name}" not in runs.rows]
    if not left:
        return
    lab = Lab(MODELS[number])
    with tempfile.TemporaryDirectory() as folder:
        job = Job(lab, Fault("none"), 0, pathlib.Path(folder, "clean"))
        clean = float(lab.evaluate(job.last))
        print(f"{name}: loss {clean:.4f}; {len(events(job)[1])} decisions without a fault")
        for i, fault in left:
            seed, killed = 1000 * number + i, {}
            job = Job(lab, fault, seed, pathlib.Path(folder, f"{i}"))
            end, loss = ending(job, clean)
            if i % 4 == 0:
                chosen = np.random.default_rng(seed).choice(job.points, 2, replace=False)
                kills = {*(1 + chosen).tolist()}
                again = Job(lab, fault, seed, pathlib.Path(folder, f"{i} killed"), kills)
                killed = compared(job, again, clean)
            row = {"end": end, "loss": f"{100 * loss:+.2f} %", "actions": events(job)[2]}
            runs.add(f"{name}: {fault.name}", **row, kind=fault.kind, model=name, killed=killed)


def compared(job, killed, clean):
    """What differs between a run that was killed and the same run without kills."""
    ends, found = [ending(x, clean)[0] for x in (job, killed)], [*differences(job, killed)]
    print(f"  killed {killed.num_kills} times, {ends[1]}", *found, sep="; ", flush=True)
    return {
        "kills": killed.num_kills,
        "runs": 1,
        "runs that lost something": bool(killed.lost),
        "runs that differ": bool(found),
        "runs that end worse": ends[1] == "failed" != ends[0],
    }


def tables(rows):
    """The tables of the endings, of the runs that failed, and of the kills."""
    names = ("well", "better", "stopped", "failed")
    kinds, models = ([*dict.fromkeys(x[key] for x in rows)] for key in ("kind", "model"))
    total, killed = collections.Counter(), collections.Counter()
    for x in rows:
        killed.update(x["killed"])
        for key in itertools.product((x["kind"], "all"), (x["model"], "all")):
            total[*key, x["end"]] += 1
    models.append("all")
    endings = [
        {"what": kind} | {x: " / ".join(str(total[kind, x, end]) for end in names) for x in models}
        for kind in (*kinds, "all")
    ]
    failed = [
        {"what": x["what"], "loss": x["loss"], "actions": ", ".join(x["actions"])}
        for x in rows
        if x["end"] == "failed"
    ]
    kills = [{"what": key, "number": int(count)} for key, count in killed.items()]
    title = "Fault and model: ends within 1 % of the clean run / better / stops / fails"
    return {title: endings, "Runs that failed": failed, "Kills": kills}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one model, 8 faults; print only")
    parser.add_argument("--runs", type=pathlib.Path, default="build/closed_loop.jsonl")
    options = parser.parse_args()
    runs, step = Runs(options.runs), 5 if options.small else 1
    chosen = [*itertools.islice(enumerate(faults()), 0, None, step)]
    models = MODELS[:1] if options.small else MODELS
    for number in range(len(models)):
        run_model(runs, number, chosen)
    # In the order of the faults, although the runs may have finished in another.
    names = [f"{model.__name__}: {fault.name}" for model in models for _, fault in chosen]
    found = {key: x for key, x in tables([runs.rows[name] for name in names]).items() if x}
    for title, rows in found.items():
        print(f"\n**{title}**\n\n{_report.table(rows)}")
    if not options.small:
        facts = {"commit": _report.commit()} | runs.of
        _report.write(found, "closed loop", is_whole=True, **facts)


if __name__ == "__main__":
    main()
