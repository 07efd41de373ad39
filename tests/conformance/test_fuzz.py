"""Random programs against plain Python; the same few in the suite, others without end in `make fuzz`.

1. Nests of chain, guard, accumulation and clip, with faults, weights, flush, reset, resume and a
   second compilation at any point, against `plain_model.py`.
2. `microbatched_value_and_grad` with random signatures against `jax.value_and_grad`.
3. Runs that are converted to another optimizer and back against runs that are not.
4. Faults of norm and loss in any order: no rule of `skip_spikes` locks up.
5. Every transformation on hostile gradients under `jax_debug_nans` and `jax_debug_infs`.
"""

import itertools
import math
import os
import re
from functools import cache, partial, reduce

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model as plain
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from registry import TRANSFORMATIONS

import gradclip_jax as gcx

pytestmark = pytest.mark.slow

IS_FUZZING = bool(os.environ.get("FUZZ"))


def few(examples: int, **others) -> settings:
    """So many in the suite, as many as one has patience for in `make fuzz`."""
    return settings(**others) if IS_FUZZING else settings(max_examples=examples, **others)


# --- 1. nests -------------------------------------------------------------------------------


def _fragile():
    def update(grads, params=None):
        return jnp.where(jnp.abs(grads) > plain.BAD_ABOVE, -jnp.sign(grads) * jnp.inf, -grads)

    return optax.stateless(update)


def _wide_clip(inner):
    return optax.chain(gcx.clip_by_global_norm(plain.Clip.MAX_NORM), inner)


LEAVES = {
    "momentum": (lambda: optax.sgd(0.5, momentum=0.5), plain.Momentum),
    "fragile": (_fragile, plain.Fragile),
}
AROUND = {
    "clip": (_wide_clip, plain.Clip),
    "skip_nonfinite": (gcx.skip_nonfinite, plain.SkipNonfinite),
    "skip_nonfinite step": (partial(gcx.skip_nonfinite, check="step"), plain.SkipNonfiniteStep),
    "skip_large_norm": (
        partial(gcx.skip_large_norm, max_norm=plain.SkipLargeNorm.MAX_NORM),
        plain.SkipLargeNorm,
    ),
    "loss_scale": (
        partial(
            gcx.dynamic_loss_scale, init_scale=4.0, growth_interval=3, max_scale=8.0, check="step"
        ),
        plain.LossScale,
    ),
}
for every in (1, 3):
    AROUND[f"window of {every}"] = (
        partial(gcx.accumulate_gradients, every=every),
        partial(plain.Accumulate, every),
    )


def _all_nests():
    """Names from the outside in, each at most once, one window, no guard around a loss scale."""
    kinds = list(AROUND)
    for size in range(1, len(kinds)):
        for around in itertools.permutations(kinds, size):
            guards = [name for name in around if name.startswith(("skip", "loss_scale"))]
            if "loss_scale" in guards[1:]:
                continue
            if sum(name.startswith("window") for name in around) < 2:
                yield from ((*around, leaf) for leaf in LEAVES)


NESTS = sorted(_all_nests())


@cache
def programs(nest):
    """The transformation, and two programs that take the same step."""
    *around, leaf = nest
    made = reduce(lambda tx, name: AROUND[name][0](tx), reversed(around), LEAVES[leaf][0]())
    tx = optax.with_extra_args_support(made)

    def by_apply(params, state, grad, **extra_args):
        return gcx.apply_gradients(tx, grad, state, params, **extra_args)

    def by_update(params, state, grad, **extra_args):
        updates, state = tx.update(grad, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    flush = jax.jit(lambda params, state: gcx.flush(tx, state, params))
    return tx, jax.jit(by_apply), jax.jit(by_update), flush


# No norm, of one of these or of a mean of some, is near one of the bounds.
GRADS = [(3.0, 4.0), (-0.6, 0.8), (1.0, -2.0), (30.0, 40.0), (70.0, 0.0), (0.0, 0.0), (50.0, -3.0)]
FAULTS = [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan), (50.0, 9.0), (2e4, 2e4)]


def random_calls(seed):
    """Twelve gradients and what comes with them: every fourth call is a fault of some kind."""
    rng = np.random.default_rng(seed)
    for _ in range(12):
        grads = FAULTS if rng.random() < 0.2 else GRADS
        value = math.nan if rng.random() < 0.05 else 1.0
        call = plain.Call(value, float(rng.choice([1.0, 1.0, 0.0, 2.5])), rng.random() < 0.15)
        yield grads[rng.integers(len(grads))], call


class Nest(RuleBasedStateMachine):
    @initialize(nest=st.sampled_from(NESTS))
    def start(self, nest):
        *around, leaf = nest
        gates = [plain.Clip if name == "clip" else AROUND[name][1]() for name in around]
        self.model = plain.stacked([*gates, LEAVES[leaf][1]()])
        self.nest, self.step_index = nest, 1
        self.tx = programs(nest)[0]
        self.params, self.expected = jnp.zeros(2), [0.0, 0.0]
        self.state = self.tx.init(self.params)

    def has_window(self):
        return any(name.startswith("window") for name in self.nest)

    @rule(seed=st.integers(0, 2**32 - 1))
    def steps(self, seed):
        for grad, call in random_calls(seed):
            program = programs(self.nest)[self.step_index]
            value, weight = np.float32(call.value), np.float32(call.weight)
            extra_args = {"value": value, "weight": weight, "flush": np.bool_(call.flush)}
            self.params, self.state = program(
                self.params, self.state, np.float32(grad), **extra_args
            )
            self.apply(self.model.update(list(grad), call))

    @precondition(has_window)
    @rule()
    def flush(self):
        updates, self.state = programs(self.nest)[3](self.params, self.state)
        self.params = optax.apply_updates(self.params, updates)
        if self.model.windows()[0].mini_step:
            self.apply(self.model.update([0.0, 0.0], plain.Call(0.0, 0.0, flush=True)))

    @precondition(has_window)
    @rule()
    def reset(self):
        self.state = gcx.reset_accumulation(self.state)
        self.model.windows()[0].discard()

    @rule()
    def resume(self):
        """Through the host, as through a checkpoint, and on in a program compiled anew."""
        host = jax.tree.map(np.array, (self.params, self.state))
        self.params, self.state = jax.tree.map(jnp.asarray, host)
        assert jax.tree.structure(self.state) == jax.tree.structure(self.tx.init(self.params))
        self.step_index = 3 - self.step_index

    def apply(self, update):
        self.expected = [p + u for p, u in zip(self.expected, update, strict=True)]
        np.testing.assert_allclose(self.params, self.expected, rtol=1e-5, atol=1e-4)
        found = gcx.metrics(self.state)
        totals = [x for name, x in found.items() if re.fullmatch("skipped_[a-z_]+", name)]
        skips = sum(map(int, totals))
        assert skips == self.model.skips()
        assert bool(gcx.has_updated(self.state)) == self.model.has_stepped()
        if self.has_window():
            window = self.model.windows()[0]
            counts = (int(found["mini_step"]), int(found["gradient_step"]))
            assert counts == (window.mini_step, window.gradient_step)


TestNest = Nest.TestCase
TestNest.settings = few(40, stateful_step_count=8)


# --- 2. micro-batches -----------------------------------------------------------------------


@st.composite
def signatures(draw):
    """Where batches, keys and parameters stand among the arguments, and what comes back."""
    roles = draw(
        st.permutations(["params", "batch", *draw(st.sampled_from(([], ["params"], ["batch"])))])
    )
    parameters = [i for i, role in enumerate(roles) if role == "params"]
    batches = [i for i, role in enumerate(roles) if role == "batch"]
    chosen = draw(st.lists(st.sampled_from(range(len(roles))), min_size=1, max_size=2, unique=True))
    argnums = chosen[0] if len(chosen) == 1 and draw(st.booleans()) else tuple(chosen)
    if draw(st.booleans()):  # from the end
        argnums = jax.tree.map(lambda i: i - len(roles), argnums)
    flags = {"has_aux": draw(st.booleans()), "has_weight": draw(st.booleans())}
    return tuple(roles), parameters, batches, argnums, draw(st.sampled_from([1, 2, 3])), flags


@few(20)
@given(signatures(), st.integers(0, 2**31 - 1))
def test_micro_batches_of_any_signature_are_the_batch(signature, seed):
    roles, parameters, batches, argnums, parts, flags = signature
    rng = np.random.default_rng(seed)
    args = [
        {"x": np.float32(rng.standard_normal((6, 2)))}
        if role == "batch"
        else {"w": np.float32(rng.standard_normal(2)), "b": np.float32(rng.standard_normal())}
        for role in roles
    ]

    def loss(*args, has_weight=flags["has_weight"]):
        per_example = sum(
            jnp.tanh(args[i]["x"] @ args[j]["w"] + args[j]["b"]) ** 2
            for i in batches
            for j in parameters
        )
        importance = (
            jnp.abs(args[batches[0]]["x"][:, 0]) if has_weight else jnp.ones(len(per_example))
        )
        weight = jax.lax.stop_gradient(jnp.sum(importance))
        importance = jax.lax.stop_gradient(importance)
        value = jnp.sum(importance * per_example) / weight
        aux = {"rows": per_example, "mean": value}
        if has_weight:
            return value, (weight, aux) if flags["has_aux"] else weight
        return (value, aux) if flags["has_aux"] else value

    expected = jax.jit(jax.value_and_grad(loss, argnums, has_aux=any(flags.values())))(*args)
    split = gcx.microbatched_value_and_grad(
        loss, parts, argnums=argnums, batch_argnums=tuple(batches), **flags
    )
    found = jax.jit(split)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, expected)


# --- 3. conversions there and back ----------------------------------------------------------


def _identity(inner):
    return inner


# Each as Optax has it, or without it, and as here. No norm of a gradient comes near a bound.
LAYERS = {
    "clip": (
        lambda inner: optax.chain(optax.clip_by_global_norm(1e3), inner),
        lambda inner: optax.chain(gcx.clip_by_global_norm(1e3), inner),
    ),
    "new clip": (_identity, lambda inner: optax.chain(gcx.clip_by_leaf_norm(1e3), inner)),
    "new record": (_identity, lambda inner: optax.chain(gcx.record_norms(4), inner)),
    "new spike guard": (_identity, lambda inner: gcx.skip_large_norm(inner, 1e6)),
    "guard": (lambda inner: optax.apply_if_finite(inner, 100), gcx.skip_nonfinite),
    "window": (
        lambda inner: optax.MultiSteps(inner, 3).gradient_transformation(),
        lambda inner: gcx.accumulate_gradients(inner, 3),
    ),
    "sum": (
        lambda inner: optax.MultiSteps(inner, 3, use_grad_mean=False).gradient_transformation(),
        lambda inner: gcx.accumulate_gradients(inner, 3, reduction="sum"),
    ),
}
INNER = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(optax.linear_schedule(0.1, 0.01, 20)),
}
layers = st.lists(st.sampled_from(sorted(LAYERS)), max_size=4, unique=True).filter(
    lambda names: not {"window", "sum"} <= {*names}
)


@few(12)
@example(["guard", "sum"], "sgd", 5, 2)
@given(layers, st.sampled_from(sorted(INNER)), st.integers(0, 7), st.integers(0, 7))
def test_a_run_converted_and_back_is_that_run(names, inner, before, here):
    theirs, ours = INNER[inner], INNER[inner]
    for name in reversed(names):
        theirs, ours = LAYERS[name][0](theirs), LAYERS[name][1](ours)

    def run(tx, state, params, steps):
        update = jax.jit(tx.update)
        for step in steps:
            grads = {"w": jnp.array([math.sin(step), 1.0]), "b": jnp.float32(math.cos(step))}
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    reduction = "sum" if "sum" in names else "mean"
    convert = partial(gcx.convert_state, reduction=reduction)
    start = {"w": jnp.zeros(2), "b": jnp.float32(0.0)}
    params, state = run(theirs, theirs.init(start), start, range(before))
    expected, _ = run(theirs, state, params, range(before, 18))
    found, there = run(ours, convert(ours, state, params), params, range(before, before + here))
    assert jax.tree.structure(there) == jax.tree.structure(ours.init(start))
    back = jax.jit(convert, static_argnums=0)(theirs, there, found)
    found, _ = run(theirs, back, found, range(before + here, 18))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


# --- 4. two signals -------------------------------------------------------------------------

RULES = {
    "zscore": partial(gcx.thresholds.zscore, warmup_steps=4),
    "mean_std": partial(gcx.thresholds.mean_std, 4.0, window=8, warmup_steps=4),
}
rules = st.sampled_from(sorted(RULES))


@cache
def skips_in_a_row(norm_rule, loss_rule):
    """A program that runs `skip_spikes` on rows of norm and loss."""
    norm, loss = RULES[norm_rule](), RULES[loss_rule](allow_negative=True)
    tx = gcx.skip_spikes(optax.sgd(0.1), norm=norm, loss=loss, relearn_after=5)

    def call(state, row):
        _, state = tx.update(row[:1], state, jnp.zeros(1), value=row[1])
        return state, state.consecutive_skips

    return jax.jit(lambda rows: jax.lax.scan(call, tx.init(jnp.zeros(1)), rows)[1])


@few(40)
@given(rules, rules, st.integers(0, 2**31 - 1), st.text("nlb.", min_size=1, max_size=6))
def test_faults_of_norm_and_loss_in_any_order_lock_nothing_up(norm_rule, loss_rule, seed, pattern):
    """`n` is a fault of the norm, `l` of the loss, `b` of both; each pattern goes on for ever."""
    rows = 1 + 0.1 * np.random.default_rng(seed).random((120, 2)).astype(np.float32)
    for i in range(20, 120):
        fault = pattern[i % len(pattern)]
        rows[i] *= [100.0 if fault in "nb" else 1.0, 100.0 if fault in "lb" else 1.0]
    assert int(skips_in_a_row(norm_rule, loss_rule)(rows).max()) <= 5


# --- 5. debugging modes of JAX --------------------------------------------------------------


@few(30)
@given(st.sampled_from(sorted(TRANSFORMATIONS)), st.integers(0, 2**31 - 1))
def test_no_finite_gradient_makes_jax_report_a_nan_or_an_infinity(name, seed):
    """Gradients of zero, of opposite signs, and as large and small as their squares allow."""
    rng, tx = np.random.default_rng(seed), TRANSFORMATIONS[name]()
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    with jax.debug_nans(True), jax.debug_infs(True):
        state = tx.init(params)
        for size in rng.choice([0.0, 1e-30, 1e-6, 1.0, -1.0, 1e6], 4):
            grads = {"w": jnp.full((2, 3), size), "b": jnp.full(3, size)}
            _, state = tx.update(grads, state, params)
            gcx.metrics(state)
