"""The gradient noise scale, against the formula of the paper and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import trees
from accumulation_cases import run


def estimates(grads, weights):
    """(|G|^2, tr(Sigma)) of a window, by appendix A.1 of McCandlish et al. 2018, weighted."""
    total = sum(weights)
    small = sum(w * np.sum(np.square(g)) for w, g in zip(weights, grads, strict=True)) / total
    big = np.sum(np.square(sum(w * g for w, g in zip(weights, grads, strict=True)) / total))
    trace = (small - big) * total / (len(weights) - 1)
    return big - trace / total, trace


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 3, 2, 10), (5, 5)])
def test_estimates_of_one_window_are_those_of_the_paper(weights):
    grads = 0.5 + trees.normal((len(weights), 64))
    _, state = told(grads, weights, decay=0.0, every=len(weights))
    square, trace = estimates(np.float64(grads), weights)
    np.testing.assert_allclose(state.noise.squared_gradient, square, rtol=1e-5)
    np.testing.assert_allclose(state.noise.covariance_trace, trace, rtol=1e-5)


def told(grads, weights=None, decay=0.9, every=2):
    """The metric after each micro-batch."""
    tx = gcx.accumulate_gradients(optax.sgd(0.1), every, noise_scale_decay=decay)
    params = jnp.zeros_like(grads[0])
    _, states = run(tx, params, grads, weights and [{"weight": jnp.float32(w)} for w in weights])
    return [float(gcx.metrics(state)["gradient_noise_scale"]) for state in states], states[-1]


A, B = jnp.array([1.0, 0.0]), jnp.array([0.8, 0.6])
# Window (A, B): S = 1, B = 0.9, so tr(Sigma) = 0.1 * 2 / 1 = 0.2, |G|^2 = 0.9 - 0.1 = 0.8.
SCALE_AB = 0.25
LARGEST = np.finfo(np.float32).max


# (micro-batches, options, the metric after each of them)
CASES = {
    "zero before the first window": ([A, B], {}, [0, SCALE_AB]),
    "no signal stands out": ([A, -A], {}, [0, LARGEST]),
    "gradients without noise": ([A, A], {}, [0, 0]),
    "a NaN window is left out": ([A, B, jnp.nan * A, B, A], {}, [0, *[SCALE_AB] * 4]),
    "windows of one": ([A, B, A], {"every": 1}, [0, 0, 0]),
    "a micro-batch of zero weight": (
        [A, jnp.nan * A, B],
        {"weights": [1, 0, 1], "every": 3},
        [0, 0, SCALE_AB],
    ),
    "one micro-batch that counts": ([A, jnp.nan * A], {"weights": [1, 0]}, [0, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_metric_after_each_micro_batch(name):
    grads, options, expected = CASES[name]
    with jax.debug_infs(name == "no signal stands out"):
        found, _ = told(grads, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_windows_are_averaged_with_the_decay():
    # Window (2A, 2A): tr(Sigma) = 0, |G|^2 = 4.
    seen, state = told([A, B, 2 * A, 2 * A], decay=0.75)
    trace, square = 0.25 * 0.75 * 0.2, 0.25 * (0.75 * 0.8 + 4.0)
    np.testing.assert_allclose(state.noise.covariance_trace, trace, rtol=1e-5)
    np.testing.assert_allclose(state.noise.squared_gradient, square, rtol=1e-5)
    np.testing.assert_allclose(seen[-1], trace / square, rtol=1e-5)


def test_a_flushed_window_counts_by_what_it_holds():
    tx = gcx.accumulate_gradients(optax.sgd(0.1), 100, noise_scale_decay=0.9)
    _, states = run(tx, A, [A, B])
    _, state = gcx.flush(tx, states[-1], A)
    np.testing.assert_allclose(gcx.metrics(state)["gradient_noise_scale"], SCALE_AB, rtol=1e-5)


def test_it_does_not_change_the_updates():
    make = functools.partial(gcx.accumulate_gradients, optax.adam(0.1), 2)
    plain, measuring = (run(make(noise_scale_decay=d), A, [A, B, A])[0] for d in (None, 0.9))
    np.testing.assert_array_equal(plain, measuring)


def test_without_a_decay_nothing_is_measured():
    state = gcx.accumulate_gradients(optax.sgd(0.1), 2).init(A)
    assert state.noise == () and "gradient_noise_scale" not in gcx.metrics(state)
