"""Injects faults of known place into training, and counts which the rows of `gcx.watch` show.

    python -m benchmarks.faults.detect [--models gpt,conv] [--faults 24] [--clean-steps 100000]

Seven small models with seven optimizers. Each trains for some time; then copies of the run go on
side by side, each with one fault at a known step and unit, or without one. Other copies begin
anew, and get one loss that is 10 times the largest one so far. All steps are jitted scans.
The rows are recorded first, and `Detector` reads them afterwards. Its constants were chosen on the
seed 2.
"""

import argparse
import collections
import copy
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradclip_jax as gcx
from gradclip_jax.clipping._granularity import as_granularity
from gradclip_jax.monitoring._detect import Detector
from gradclip_jax.monitoring._rows import Outcome, read_stack
from gradclip_jax.monitoring._watch import names_of

MODELS = ("gpt", "gru", "conv", "bandit", "mixer", "contrastive", "denoiser")
WARM_UP, AT, STEPS = 400, 5, 80

FAULTS = {
    # name: the incidents in so many steps from the fault on that count
    "NaN in one element": 1,
    "infinity in one element": 1,
    "gradient of one unit x 10": 1,
    "gradient of one unit zero from then on": 64,
    "whole gradient zero": 1,
    "learning rate x 100": 1,
    "slow drift of one unit": WARM_UP,
    "highest exponent bit of a weight": 3,
    "highest exponent bit of a moment": 3,
}
DRIFT = "slow drift of one unit"
RATES = (1.01, 1.02, 1.03)
EARLY = (16, 24, 40, 64)
EARLY_LOSS = "loss x 10 at step 16 to 64 of a run"
REPLICAS, CHECK_EVERY = 8, 16
REPLICA_FAULTS = {
    # name: factors of the parameters and of the summed gradient on one device in one step
    "parameters 2 % off on one of 8 devices": (1.02, 1.0),
    "gradient negated on one of 8 devices": (1.0, -1.0),
    "gradient zero on one of 8 devices": (1.0, 0.0),
}
ROWS = (*FAULTS, EARLY_LOSS, *REPLICA_FAULTS)
PLACELESS = ("whole gradient zero", "learning rate x 100", EARLY_LOSS)


def dense(key, *shape):
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


def normal(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def weights(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {name: dense(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def gpt(key):
    """Next-token prediction, layers in `scan`; AdamW behind a clip."""
    params = {
        "layers": weights(key, qkv=(3, 24, 72), wo=(3, 24, 24), wi=(3, 24, 48), out=(3, 48, 24)),
        **weights(jax.random.fold_in(key, 1), embed=(32, 24), head=(24, 32)),
    }

    def loss(params, key):
        start, step = jax.random.randint(key, (2, 16, 1), 0, 7)
        tokens = (start + (step + 1) * jnp.arange(12)) % 32
        tokens = jnp.where(jax.random.uniform(key, tokens.shape) < 0.1, tokens // 2, tokens)

        def block(h, layer):
            q, k, v = jnp.split(normal(h) @ layer["qkv"], 3, -1)
            scores = jnp.where(jnp.tri(h.shape[1], dtype=bool), q @ k.swapaxes(-1, -2) / 5, -1e9)
            h = h + jax.nn.softmax(scores) @ v @ layer["wo"]
            return h + jax.nn.gelu(normal(h) @ layer["wi"]) @ layer["out"], None

        h, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["layers"])
        logits = normal(h) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return params, loss, optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-3))


def gru(key):
    """The sum of a sequence; RMSProp."""
    params = weights(key, x=(4, 72), h=(24, 72), out=(24, 1))

    def loss(params, key):
        x = jax.random.normal(key, (16, 10, 4))

        def cell(h, x):
            a, b = x @ params["x"], h @ params["h"]
            z, r = (jax.nn.sigmoid((a + b)[:, i : i + 24]) for i in (0, 24))
            return z * h + (1 - z) * jnp.tanh(a[:, 48:] + r * b[:, 48:]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((16, 24)), x.swapaxes(0, 1))
        return jnp.mean((h @ params["out"] - jnp.tanh(x.sum((1, 2)))[:, None]) ** 2)

    return params, loss, optax.rmsprop(1e-3)


def conv(key):
    """Autoencoder of one-dimensional signals; Adafactor."""
    shapes = {"enc1": (3, 2, 8), "enc2": (3, 8, 4), "dec1": (3, 4, 8), "dec2": (3, 8, 2)}
    params = weights(key, **shapes) | {"bias": jnp.zeros(8)}

    def apply(w, x):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    def loss(params, key):
        phase, size = jax.random.normal(key, (2, 16, 1, 2))
        x = size * jnp.sin(jnp.arange(16)[:, None] / 2 + 3 * phase)
        h = jax.nn.relu(apply(params["enc1"], x) + params["bias"])
        h = jax.nn.relu(apply(params["dec1"], apply(params["enc2"], h)))
        return jnp.mean((apply(params["dec2"], h) - x) ** 2)

    return params, loss, optax.adafactor(1e-2)


def bandit(key):
    """Actor and critic with heavy-tailed rewards (Student's t, 2 degrees of freedom); Adam."""
    params = weights(key, body=(6, 24), actor=(24, 4), critic=(24, 1))

    def loss(params, key):
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (32, 6))
        h = jnp.tanh(x @ params["body"])
        logits, value = h @ params["actor"], (h @ params["critic"])[:, 0]
        action = jax.random.categorical(keys[1], jax.lax.stop_gradient(logits))
        noise = jax.random.t(keys[2], 2.0, (32,))
        reward = jnp.take_along_axis(x, action[:, None], 1)[:, 0] + noise
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        gain = jax.lax.stop_gradient(reward - value)
        return jnp.mean(-log_p * gain + 0.5 * (reward - value) ** 2)

    return params, loss, optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(3e-4))


def mixer(key):
    """MLP-Mixer that classifies patches; Muon."""
    shapes = {"token1": (8, 16), "token2": (16, 8), "wi": (12, 24), "wo": (24, 12), "head": (12, 4)}
    params = weights(key, patch=(6, 12), **shapes) | {"scale": jnp.ones(12)}

    def loss(params, key):
        label = jax.random.randint(key, (16,), 0, 4)
        x = jax.random.normal(key, (16, 8, 6)) + jax.nn.one_hot(label, 6)[:, None]
        h = x @ params["patch"]
        mixed = jax.nn.gelu(normal(h).swapaxes(1, 2) @ params["token1"]) @ params["token2"]
        h = h + mixed.swapaxes(1, 2)
        h = normal(h + jax.nn.gelu(normal(h) @ params["wi"]) @ params["wo"]).mean(1)
        logits = h * params["scale"] @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    return params, loss, optax.contrib.muon(2e-3)


def contrastive(key):
    """Two views of a point, InfoNCE; Lion."""
    params = weights(key, a1=(8, 24), a2=(24, 8), b1=(8, 24), b2=(24, 8))

    def loss(params, key):
        x, *noise = jax.random.normal(key, (3, 32, 8))
        a = jax.nn.relu((x + noise[0] / 2) @ params["a1"]) @ params["a2"]
        b = jax.nn.relu((x + noise[1] / 2) @ params["b1"]) @ params["b2"]
        a, b = (v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-6) for v in (a, b))
        return optax.softmax_cross_entropy_with_integer_labels(5 * a @ b.T, jnp.arange(32)).mean()

    return params, loss, optax.lion(3e-4)


def denoiser(key):
    """Predicts noise at random levels; AdamW, an optimizer step every second micro-batch."""
    params = weights(key, wi=(9, 32), mid=(32, 32), wo=(32, 8)) | {"bias": jnp.zeros(32)}

    def loss(params, key):
        keys = jax.random.split(key, 3)
        x = jnp.sin(jax.random.normal(keys[0], (16, 1)) + jnp.arange(8))
        level, noise = jax.random.uniform(keys[1], (16, 1)), jax.random.normal(keys[2], x.shape)
        h = jnp.concatenate([(1 - level) * x + level * noise, level], -1) @ params["wi"]
        h = jax.nn.silu(jax.nn.silu(h + params["bias"]) @ params["mid"])
        return jnp.mean((h @ params["wo"] - noise) ** 2)

    return params, loss, gcx.accumulate_gradients(optax.adamw(1e-3), 2)


def scaled_by_fault():
    """A learning rate that a fault multiplies: the extra argument `rate`."""

    def update(updates, state, params=None, *, rate=1.0, **extra_args):
        return jax.tree.map(lambda u: u * rate, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class Run:
    """A model, its watched optimizer, and a step into which a fault can be put."""

    def __init__(self, name, seed):
        self.name, self.seed = name, seed
        self.params, self.loss, inner = globals()[name](jax.random.key(seed))
        depth = {key: int(key == "layers") for key in self.params}
        layers = gcx.granularities.layer(depth)
        inner = gcx.skip_nonfinite(optax.chain(inner, scaled_by_fault()))
        self.tx = gcx.watch(inner, granularity=layers, history=1)
        self.names = names_of(self.params, layers, None, None)
        self.state = jax.jit(self.tx.init)(self.params)
        self.run = jax.jit(self._run, static_argnums=3)
        self.copies = jax.jit(jax.vmap(self._run, (None, None, 0, None)), static_argnums=3)
        key = jax.random.key(1000 + seed)
        self.clean = {"kind": -1, "unit": 0, "place": 0, "rate": np.float32(1), "seed": key}
        self.params, self.state, rows = self.run(self.params, self.state, self.clean, WARM_UP)
        self.detector = Detector(read_stack(rows, self.names)[1])
        self.early_alarms = self.read(rows, self.detector)

    def read(self, stack, detector=None):
        """Return the incidents in a stack of rows, by default after those of the warm-up."""
        rows = read_stack(stack, self.names)[0]
        first = rows.step[0]
        found = (detector or copy.deepcopy(self.detector)).update(rows)
        return [incident._replace(step=int(incident.step - first)) for incident in found]

    def _run(self, params, state, fault, steps):
        keys = jax.random.split(fault["seed"], steps)
        step = functools.partial(self._step, fault=fault)
        (params, state), rows = jax.lax.scan(step, (params, state), (jnp.arange(steps), keys))
        return params, state, rows

    def _step(self, carry, given, fault):
        (params, state), (t, key) = carry, given
        is_now, is_on = t == AT, t >= AT

        def happens(name, when=is_now):
            return when & (fault["kind"] == list(FAULTS).index(name))

        flip = happens("highest exponent bit of a weight")
        params = self._with_bit(params, fault, flip)
        flip = happens("highest exponent bit of a moment")
        state = state._replace(inner_state=self._with_moment(state.inner_state, fault, flip))
        loss, grads = jax.value_and_grad(self.loss)(params, key)
        factor = jnp.where(happens("gradient of one unit x 10"), 10.0, 1.0)
        factor *= jnp.where(happens("gradient of one unit zero from then on", is_on), 0.0, 1.0)
        drift = fault["rate"] ** jnp.maximum(t - AT, 0)
        factor *= jnp.where(happens("slow drift of one unit", is_on), drift, 1.0)
        bad = jnp.where(happens("NaN in one element"), jnp.nan, 0.0)
        bad = jnp.where(happens("infinity in one element"), jnp.inf, bad)
        whole = jnp.where(happens("whole gradient zero"), 0.0, 1.0)
        grads = self._map_units(grads, fault, lambda g: g * factor, lambda g: g + bad, bad != 0)
        grads = jax.tree.map(lambda g: g * whole, grads)
        rate = jnp.where(happens("learning rate x 100"), 100.0, 1.0)
        loss = jnp.where(t == fault.get("loss_at", -1), fault.get("loss", loss), loss)
        updates, state = self.tx.update(grads, state, params, value=loss, rate=rate)
        return (optax.apply_updates(params, updates), state), gcx.last_row(state)

    def early(self, key, loss_at, loss):
        """The first steps of another run, with another loss at one of them."""
        params = globals()[self.name](key)[0]
        fault = {"seed": jax.random.fold_in(key, 1), "loss_at": loss_at, "loss": loss}
        return self._run(params, self.tx.init(params), self.clean | fault, max(EARLY) + 1)[2]

    def _places(self):
        """For each leaf the number of its first unit, and how many units it has."""
        first = 0
        for path, x in jax.tree_util.tree_leaves_with_path(self.params):
            count = len(x) if path[0].key == "layers" else 1
            yield first, count
            first += count

    def _map_units(self, tree, fault, of_unit, of_element, is_element):
        leaves, structure = jax.tree.flatten(tree)
        for i, (first, count) in enumerate(self._places()):
            x = leaves[i].reshape(count, -1)
            here = (first + jnp.arange(count) == fault["unit"])[:, None]
            element = here & (jnp.arange(x.shape[1]) == fault["place"] % x.shape[1])
            x = jnp.where(here, of_unit(x), x)
            x = jnp.where(element & is_element, of_element(x), x)
            leaves[i] = x.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, leaves)

    def _with_bit(self, params, fault, flip):
        return self._map_units(params, fault, lambda x: x, flipped, flip)

    def _with_moment(self, state, fault, flip):
        """The state with a bit flipped in one of the trees of moments, such as `mu` and `nu`."""
        entries, structure = jax.tree_util.tree_flatten_with_path(state)
        leaves = [x for _, x in entries]
        params = jax.tree_util.tree_leaves_with_path(self.params)
        places = [
            [
                j
                for j, (at, x) in enumerate(entries)
                if at[-len(path) :] == path and x.shape == p.shape
            ]
            for path, p in params
        ]
        trees = list(zip(*places, strict=False))
        for k, tree in enumerate(trees):
            moments = jax.tree.unflatten(jax.tree.structure(self.params), [leaves[j] for j in tree])
            is_here = flip & (fault["place"] % len(trees) == k)
            for j, x in zip(
                tree, jax.tree.leaves(self._with_bit(moments, fault, is_here)), strict=True
            ):
                leaves[j] = x
        return jax.tree.unflatten(structure, leaves)


def flipped(x):
    """All numbers with the highest bit of the exponent flipped."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) ^ jnp.int32(1 << 30)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def part_of(stack, i):
    return jax.tree.map(lambda x: x[i], stack)


def inject(run, count, table):
    """Runs `count` copies with each fault, and as many without one, on the same batches."""
    rng, units = np.random.default_rng(run.seed), len(run.names.units)
    kinds = np.arange(-1, len(FAULTS))
    given = {
        "unit": np.tile(rng.permutation(np.arange(count) % units), len(kinds)),
        "place": rng.integers(0, 10**6, count * len(kinds)),
        "rate": np.resize(np.float32(RATES), count * len(kinds)),
        "kind": np.repeat(kinds, count),
    }
    keys = jax.random.split(jax.random.key(run.seed), count)
    given["seed"] = keys[np.tile(np.arange(count), len(kinds))]
    is_drift = given["kind"] == list(FAULTS).index(DRIFT)
    for chosen, steps in ((~is_drift, STEPS), (is_drift, WARM_UP)):
        part = {key: x[chosen] for key, x in given.items()}
        stack = jax.device_get(run.copies(run.params, run.state, part, steps)[2])
        losses = stack.floats[..., 0][:, AT:]
        for i, kind in enumerate(part["kind"]):
            if kind >= 0:
                fault = list(FAULTS)[kind]
                unit, rate = run.names.units[part["unit"][i]], part["rate"][i]
                found = run.read(part_of(stack, i))
                row = score(fault, found, unit, rate, losses[i], losses[i % count])
                table[run.name, fault] += row


def inject_early(run, count, table):
    """Begins some runs anew, and gives each a loss that is 10 times the largest one so far."""
    early = jax.jit(jax.vmap(run.early))
    keys, at = jax.random.split(jax.random.key(99 + run.seed), count), np.resize(EARLY, count)
    clean = np.asarray(early(keys, np.full(count, -1), np.zeros(count, "f")).floats[..., 0])
    largest = np.array([losses[:step].max() for losses, step in zip(clean, at, strict=True)])
    stack = jax.device_get(early(keys, at, np.float32(10 * largest)))
    for i, step in enumerate(at):
        found = run.read(part_of(stack, i), Detector(run.detector.names))
        table[run.name, EARLY_LOSS] += [1, any(x.step == step for x in found), 0]


def inject_on_device(run, count, table):
    """Trains on 8 replicas, and spoils one of them in one step; the next check should name it."""
    key = jax.random.key(199 + run.seed)
    params, loss, inner = globals()[run.name](key)
    tx = gcx.watch(inner, history=1, replica_axis="devices", check_every=CHECK_EVERY)

    def replica(device, factors, key, index):
        def step(carry, given):
            (params, state), (t, key) = carry, given
            of_params, of_grads = jnp.where((t == AT) & (index == device), factors, 1.0)
            params = jax.tree.map(lambda x: x * of_params, params)
            grads = jax.grad(loss)(params, jax.random.fold_in(key, index))
            grads = jax.tree.map(lambda g: of_grads * g, jax.lax.pmean(grads, "devices"))
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), gcx.last_row(state)

        given = jnp.arange(AT + CHECK_EVERY + 1), jax.random.split(key, AT + CHECK_EVERY + 1)
        return jax.lax.scan(step, (params, tx.init(params)), given)[1]

    replicas = jax.vmap(replica, (None, None, None, 0), axis_name="devices")
    replicated = jax.jit(jax.vmap(replicas, (0, None, 0, None)))
    names = names_of(params, as_granularity("leaf"), None, None)
    devices = np.random.default_rng(run.seed).integers(0, REPLICAS, count)
    for fault, factors in REPLICA_FAULTS.items():
        keys = jax.random.split(key, count)
        stack = replicated(devices, jnp.array(factors), keys, jnp.arange(REPLICAS))
        for i, device in enumerate(devices):
            rows = read_stack(jax.tree.map(lambda x, i=i: x[i, 0], stack), names)[0]
            found = rows.device[rows.has(Outcome.REPLICA_DIFFERS)]
            table[run.name, fault] += [1, len(found) > 0, device in found]


def score(fault, incidents, unit, rate, losses, clean):
    """Whether a fault counts, is detected, and is placed."""
    window = FAULTS[fault]
    if fault == DRIFT:  # within a factor of 30 of the usual norm
        window = min(window, int(np.log(30) / np.log(rate)) + 1)
    found = [x for x in incidents if AT <= x.step < AT + window]
    is_placed = any(x.leaf == unit for x in found)
    # A bit is harmful if the loss is not finite, or above those of the same batches without it.
    if "bit" in fault and (losses < 1.1 * np.maximum(clean, clean.mean())).all():
        return np.zeros(3, int)
    # A unit that is dead or drifts is detected by an incident that names it.
    is_lasting = fault == DRIFT or "from then on" in fault
    return np.array([1, is_placed if is_lasting else len(found) > 0, is_placed])


def count_false_alarms(run, steps):
    """How many of some clean steps were incidents, and of which kinds."""
    params, state, kinds = run.params, run.state, collections.Counter()
    alarms, chunks = len(run.early_alarms), max(steps // WARM_UP, 1)
    for i in range(chunks):
        fault = run.clean | {"seed": jax.random.key(10**6 * (run.seed + 1) + i)}
        params, state, rows = run.run(params, state, fault, WARM_UP)
        found = run.read(rows, run.detector)
        alarms += len(found)
        kinds.update(kind for incident in found for kind in incident.kinds)
    return alarms, (1 + chunks) * WARM_UP, kinds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--faults", type=int, default=12, help="of each kind, model and seed")
    parser.add_argument("--clean-steps", type=int, default=100_000, help="in total")
    parser.add_argument("--seeds", default="5,6", help="2 was used to choose constants")
    parser.add_argument("--quick", action="store_true", help="a few faults in one model")
    args = parser.parse_args()
    names, seeds = args.models.split(","), [int(x) for x in args.seeds.split(",")]
    if args.quick:
        names, seeds, args.faults, args.clean_steps = ["gru"], [0], 2, 400
    table, alarms = collections.defaultdict(lambda: np.zeros(3, int)), {}
    for name in names:
        total, steps, kinds = 0, 0, collections.Counter()
        for seed in seeds:
            run = Run(name, seed)
            if args.faults:
                inject(run, args.faults, table)
                inject_early(run, args.faults, table)
                inject_on_device(run, args.faults, table)
            each = args.clean_steps // (len(names) * len(seeds))
            count, clean, of_kinds = count_false_alarms(run, each)
            total, steps, kinds = total + count, steps + clean, kinds + of_kinds
        alarms[name] = total, steps, kinds
        own = {fault: table[name, fault].tolist() for fault in ROWS}
        print(name, own, *alarms[name], file=sys.stderr, flush=True)
    print("| fault | " + " | ".join(names) + " | all | placed |")
    print("| --- |" + " --- |" * (len(names) + 2))
    for fault in ROWS:
        rows = [table[name, fault] for name in names]
        shares = [
            f"{row[1] / row[0]:.0%} of {row[0]}" if row[0] else "-" for row in (*rows, sum(rows))
        ]
        n, _, placed = sum(rows)
        share = "-" if fault in PLACELESS else f"{placed / max(n, 1):.0%}"
        print(f"| {fault} | {' | '.join(shares)} | {share} |")
    for name, (count, steps, kinds) in alarms.items():
        print(f"{name}: {count} incidents in {steps} clean steps", dict(kinds))
    print(f"all: {sum(x[0] for x in alarms.values())} in {sum(x[1] for x in alarms.values())}")


if __name__ == "__main__":
    main()
