"""Incidents that guards and clips keep, and the guard against spikes of the update."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

PARAMS = {"wi": np.ones((2, 3), "f"), "wo": np.ones(2, "f")}


def grads_of(wi, wo):
    return {"wi": np.full((2, 3), wi, "f"), "wo": np.full(2, wo, "f")}


def run(tx, stream, losses=None):
    """The state after a stream of gradients, and which of them were skipped."""
    losses = np.full(len(stream), 3.0, "f") if losses is None else np.float32(losses)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *stream)

    def step(state, given):
        grads, loss = given
        _, state = tx.update(grads, state, PARAMS, value=loss)
        return state, ~gcx.has_updated(state)

    run_all = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))
    return run_all(tx.init(PARAMS), (stacked, losses))


def test_a_guard_keeps_what_it_skipped_with_the_leaf_and_the_cause():
    tx = gcx.skip_nonfinite(optax.sgd(0.1), incidents=4)
    one_bad = grads_of(1, 1)
    one_bad["wi"][1, 2] = np.inf
    stream = [grads_of(1, 1), grads_of(1, np.nan), one_bad, grads_of(1, 1), grads_of(1e20, 1)]
    state, skipped = run(tx, stream, [3, 3, 3, np.nan, 3])
    assert skipped.tolist() == [False, True, True, True, True]
    nan, infinity, loss, squares = gcx.incidents(state)
    assert (nan.step, nan.kinds, nan.leaf) == (1, ("nan", "skipped"), "wo")
    assert (nan.bad_elements, nan.share, nan.leaf_rise) == (2, 1.0, 1.0)
    assert (infinity.step, infinity.kinds, infinity.leaf) == (2, ("infinity", "skipped"), "wi")
    assert (loss.step, loss.kinds) == (3, ("loss", "skipped"))
    assert (squares.kinds, squares.leaf) == (("update", "skipped"), "wi")
    assert squares.norm == pytest.approx(6**0.5 * 1e20, rel=1e-5)
    assert gcx.metrics(state)["incident_count"] == 4 and gcx.metrics(state)["incident_step"] == 4
    assert str(nan) == "step 1: skipped, gradient norm NaN; 2 bad elements in wo; loss 3"


def test_a_guard_of_spikes_keeps_values_and_thresholds():
    tx = gcx.skip_spikes(optax.sgd(1.0), norm=100.0, loss=4.0, update=50.0, incidents=8)
    stream = [grads_of(1, 1), grads_of(80, 0), grads_of(1, 1), grads_of(0, 40), grads_of(1, 1)]
    state, skipped = run(tx, stream, [3, 3, 5, 3, 3])
    assert skipped.tolist() == [False, True, True, True, False]
    norm, loss, update = gcx.incidents(state)
    assert norm.kinds == ("norm", "skipped") and norm.norm_threshold == 100
    assert norm.norm == pytest.approx(80 * 6**0.5, rel=1e-6)
    assert loss.kinds == ("loss", "skipped") and (loss.loss, loss.loss_threshold) == (5, 4)
    assert update.kinds == ("update", "skipped") and update.update_threshold == 50
    assert update.update_norm == pytest.approx(40 * 2**0.5, rel=1e-6)
    expected = (
        "step 3: skipped, gradient norm 57, usual; 100 % of it in wo; update norm 57 above 50; "
        "loss 3, usual"
    )
    assert str(update) == expected
    counts = [int(getattr(state, f"skipped_large_{key}")) for key in ("norm", "loss", "update")]
    assert counts == [1, 1, 1]


def test_a_clip_keeps_what_it_clipped_and_what_was_not_finite():
    layer = gcx.granularities.layer({"wi": 1, "wo": 0})
    for clip in (
        gcx.clip_by_global_norm(2.0, incidents=2),
        gcx.clip_by_norm(2.0, granularity=layer, incidents=2),
    ):
        tx = optax.chain(clip, optax.sgd(1.0))
        stream = [grads_of(9, 9), grads_of(0.1, 0.1), grads_of(8, 1), grads_of(np.nan, 1)]
        state, _ = run(tx, stream)
        clipped, nan = gcx.incidents(state)
        assert (clipped.step, clipped.kinds) == (2, ("norm", "clipped"))
        assert clipped.norm == pytest.approx(386**0.5, rel=1e-6) and clipped.norm_threshold == 2
        assert (clipped.leaf, clipped.second_leaf) == ("wi", "wo")
        assert clipped.share == pytest.approx(384 / 386, rel=1e-6)
        assert (nan.step, nan.kinds) == (3, ("nan",))
        assert gcx.metrics(state)["incident_count"] == 3


def test_a_loss_that_is_infinite_is_said_to_be_the_cause():
    tx = gcx.skip_nonfinite(optax.sgd(0.1), incidents=2)
    state, _ = run(tx, [grads_of(1, 1)], [np.inf])
    (incident,) = gcx.incidents(state)
    assert incident.kinds == ("loss", "skipped") and incident.loss == np.inf


def test_each_skip_is_kept_once_by_the_guard_that_counts_it():
    inner = gcx.skip_large_norm(optax.sgd(1.0), 10.0, incidents=4)
    stream = [grads_of(1, 1), grads_of(np.nan, 1), grads_of(90, 1), grads_of(1, 1)]
    nested = gcx.skip_nonfinite(inner, incidents=4)
    state, _ = run(nested, stream)
    assert [(x.step, x.kinds[0]) for x in gcx.incidents(state)] == [(1, "nan"), (2, "norm")]
    # Inside an accumulation a guard counts windows, around it micro-batches.
    around = gcx.skip_nonfinite(gcx.accumulate_gradients(inner, 2), incidents=4)
    state, _ = run(around, [*stream, grads_of(1, 1)])
    assert [(x.step, x.kinds[0]) for x in gcx.incidents(state)] == [(0, "norm"), (1, "nan")]
    # A watch keeps those of all that is inside it.
    state, _ = run(gcx.watch(nested, spike_threshold=np.inf), stream)
    assert [(x.step, x.kinds[0]) for x in gcx.incidents(state)] == [(1, "nan"), (2, "norm")]


def test_a_state_without_incidents_converts_to_one_with_them_and_back():
    plain, kept = (
        gcx.skip_nonfinite(
            optax.chain(gcx.clip_by_norm(gcx.thresholds.ema(), incidents=n)), incidents=n
        )
        for n in (None, 2)
    )
    state, _ = run(plain, [grads_of(1, 1), grads_of(np.nan, 1)])
    new = gcx.convert_state(kept, state, PARAMS)
    assert new.skipped_nonfinite == 1 and gcx.incidents(new) == []
    np.testing.assert_array_equal(
        jax.tree.leaves(new.inner_state[0].rules), jax.tree.leaves(state.inner_state[0].rules)
    )
    _, new = kept.update(grads_of(np.nan, 1), new, PARAMS)
    assert len(gcx.incidents(new)) == 1
    back = gcx.convert_state(plain, new, PARAMS)
    assert back.skipped_nonfinite == 2 and back.incidents is None
    watched = gcx.convert_state(gcx.watch(kept), new, PARAMS)
    assert watched.inner_state.skipped_nonfinite == 2 and gcx.incidents(watched) == []
    assert gcx.convert_state(kept, watched, PARAMS).incidents.incident_count == 1


# The norm of the update


class Model:
    """`skip_spikes(momentum, update=mean_std(3, window=8, warmup_steps=4))` on lists of floats."""

    def __init__(self, relearn_after):
        self.trace, self.history, self.row = 0.0, [], 0
        self.relearn_after = relearn_after

    def step(self, grad):
        """Whether a step was skipped, and the threshold of its update."""
        if not math.isfinite(grad):
            return True, None
        trace = 0.5 * self.trace + grad
        norm, threshold = abs(trace), math.inf
        if len(self.history) >= 4:
            mean = sum(self.history) / len(self.history)
            variance = sum((x - mean) ** 2 for x in self.history) / len(self.history)
            threshold = mean + 3 * max(math.sqrt(variance), 0.01 * mean)
        is_spike, self.history = norm > threshold, [*self.history, norm][-8:]
        if is_spike and self.row >= self.relearn_after:
            is_spike, self.history = False, [norm]
        self.row = self.row + 1 if is_spike else 0
        self.trace = self.trace if is_spike else trace
        return is_spike, threshold


@pytest.mark.slow
@pytest.mark.parametrize("relearn_after", [2, 25])
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: gcx.skip_nonfinite(tx, check="step")])
def test_spikes_of_the_update_are_skipped_as_in_plain_python(relearn_after, wrap):
    rng = np.random.default_rng(relearn_after)
    sizes = 1 + 0.1 * rng.standard_normal(60)
    sizes[[9, 20, 21]] *= 30
    sizes[30] = np.nan
    sizes[40:] *= 4
    rule = gcx.thresholds.mean_std(3.0, window=8, warmup_steps=4)
    guard = gcx.skip_spikes(
        optax.chain(optax.trace(0.5), optax.scale(-1.0)), update=rule, relearn_after=relearn_after
    )
    tx = wrap(guard)

    def step(state, size):
        _, state = tx.update(jnp.stack([0.6 * size, 0.8 * size]), state)
        found = gcx.metrics(state)
        return state, (~gcx.has_updated(state), found["update_threshold"], found["update_norm"])

    run_all = jax.jit(lambda xs: jax.lax.scan(step, tx.init(jnp.zeros(2)), xs))
    state, (skipped, thresholds, norms) = run_all(jnp.float32(sizes))
    model = Model(relearn_after)
    expected = [model.step(size) for size in sizes]
    assert skipped.tolist() == [is_skipped for is_skipped, _ in expected]
    for i, (_, threshold) in enumerate(expected):
        if threshold is not None:
            assert min(float(thresholds[i]), 1e30) == pytest.approx(min(threshold, 1e30), rel=1e-4)
    assert skipped[9] and np.isfinite(norms[9]) and norms[9] > thresholds[9]
    spikes = sum(is_skipped for is_skipped, _ in expected) - 1
    assert gcx.metrics(state)["skipped_large_update"] == spikes
    assert gcx.metrics(state)["skipped_nonfinite"] == 1


def test_an_update_that_is_not_finite_is_skipped_and_a_window_of_it_dropped():
    inner = optax.stateless(lambda updates, _: jax.tree.map(lambda x: 1 / (x - 2), updates))
    tx = gcx.skip_spikes(gcx.accumulate_gradients(inner, 2), update=3.0)
    state, updates = tx.init(jnp.zeros(1)), []
    step = jax.jit(tx.update)
    for grad in (2.0, 2.0, 3.0, 3.0, 2.1, 2.1):
        update, state = step(jnp.array([grad]), state)
        updates.append(float(update[0]))
    assert updates == [0, 0, 0, 1, 0, 0]
    found = gcx.metrics(state)
    assert (found["skipped_nonfinite"], found["skipped_large_update"]) == (1, 1)
    assert found["consecutive_skips"] == 1 and found["update_norm"] == pytest.approx(10, rel=1e-4)


def test_the_ratio_of_update_to_parameter_can_be_bounded():
    rule = gcx.thresholds.relative_to_params(0.1)
    tx = gcx.skip_spikes(optax.sgd(1.0), update=rule)
    params = jnp.array([30.0, 40.0])
    state, skips = tx.init(params), []
    for size in (4.9, 5.1):
        _, state = tx.update(jnp.array([size, 0.0]), state, params)
        skips.append(int(state.skipped_large_update))
    assert skips == [0, 1] and state.update_threshold == 5


@pytest.mark.slow
def test_the_update_is_judged_alike_on_all_devices():
    from guard_cases import on_shards

    params = {"s": jnp.zeros(16), "w": jnp.zeros(2)}
    grads = {"s": jnp.full(16, 3.0), "w": jnp.array([0.0, 5.0])}  # norm 13
    for bound, skips in ((12.9, 1), (13.1, 0)):
        tx = gcx.skip_spikes(optax.sgd(1.0), update=bound, incidents=2)
        _, _, streak = on_shards(tx)(grads, params)
        assert streak.tolist() == [skips] * 8
