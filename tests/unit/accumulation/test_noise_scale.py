"""`diagnostics.noise_scale`, on the norms that a run logs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip_jax as gcx

SIZE, DEVIATION, MICRO, EVERY = 1000, 0.5, 16, 4


def test_a_log_of_an_accumulation_gives_the_known_noise_scale():
    # Gradients of single examples are N(mean, DEVIATION^2) in each of SIZE elements.
    mean = np.linspace(-0.1, 0.1, SIZE)
    known = SIZE * DEVIATION**2 / np.sum(mean**2)
    rng = np.random.default_rng(0)
    tx = gcx.accumulate_gradients(gcx.clip_by_global_norm(1e6), EVERY)
    params = jnp.zeros(SIZE)
    state, update, norm = tx.init(params), jax.jit(tx.update), jax.jit(gcx.global_norm)
    small, big = [], []
    for _ in range(100):
        grads = mean + DEVIATION / MICRO**0.5 * rng.normal(size=(EVERY, SIZE))
        for grad in jnp.float32(grads):
            small.append(float(norm(grad)) ** 2)
            _, state = update(grad, state, params)
        big.append(float(gcx.metrics(state)["grad_norm"]) ** 2)
    small = np.mean(np.reshape(small, (-1, EVERY)), axis=1)
    found = gcx.diagnostics.noise_scale(small, big, MICRO, EVERY * MICRO)
    assert found == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize(
    ("small", "big", "expected"),
    [
        ([2.0, 2.0], [2.0, 2.0], 0.0),
        ([2.0, 2.0], [0.5, 0.5], np.inf),
        ([3.0, np.nan, 5.0, np.inf], [1.5, 1.0, 2.5, np.inf], 16.0),
        ([np.nan], [1.0], np.nan),
    ],
    ids=["no noise", "no signal", "steps that are not finite", "no finite step"],
)
def test_edge_cases(small, big, expected):
    np.testing.assert_equal(gcx.diagnostics.noise_scale(small, big, 8, 32), expected)
