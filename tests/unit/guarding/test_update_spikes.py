"""The guard against spikes of the update norm."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx


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


def test_a_nonfinite_update_is_skipped_and_its_window_dropped():
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


def test_a_nan_micro_batch_that_flushes_a_window_with_a_large_update_counts_once_in_each_guard():
    tx = gcx.skip_spikes(gcx.accumulate_gradients(optax.sgd(1.0), 4), update=3.0)
    tx, params = gcx.skip_nonfinite(tx), jnp.zeros(1)
    _, state = tx.update(jnp.array([9.0]), tx.init(params), params)
    _, state = tx.update(jnp.array([jnp.nan]), state, params, flush=True)
    inner = state.inner_state
    assert (state.skipped_nonfinite, inner.skipped_nonfinite) == (1, 0)
    assert inner.skipped_large_update == 1 and inner.consecutive_skips == 1
    assert inner.inner_state.mini_step == 0


def test_a_skipped_update_is_not_reported():
    tx = gcx.skip_spikes(optax.sgd(1.0), norm=2.0, update=5.0)
    _, state = tx.update(jnp.array([9.0]), tx.init(jnp.zeros(1)))
    assert np.isnan(state.update_norm) and state.skipped_large_norm == 1
    assert state.skipped_large_update == state.skipped_nonfinite == 0


def test_the_ratio_of_update_to_parameter_can_be_bounded():
    rule = gcx.thresholds.relative_to_params(0.1)
    tx = gcx.skip_spikes(optax.sgd(1.0), update=rule)
    params = jnp.array([30.0, 40.0])
    state, skips = tx.init(params), []
    for size in (4.9, 5.1):
        _, state = tx.update(jnp.array([size, 0.0]), state, params)
        skips.append(int(state.skipped_large_update))
    assert skips == [0, 1] and state.update_threshold == 5
