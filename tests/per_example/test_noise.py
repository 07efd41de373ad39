"""Noise, sensitivity and the noise scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx

KEY = jax.random.key(7)


def drawn(tx, updates, steps=1):
    state = tx.init(updates)
    out = []
    for _ in range(steps):
        noisy, state = tx.update(updates, state)
        out.append(noisy)
    return out


def test_noise_has_the_deviation_of_multiplier_times_sensitivity():
    tx = gcx.noisy_mean(1.5, 2.0, 4, KEY)
    (noisy,) = drawn(tx, {"w": jnp.full(40_000, 8.0)})
    values = np.asarray(noisy["w"], np.float64)
    # 40,000 numbers of deviation 0.75: the mean is off by 0.004, the deviation by 0.003.
    assert values.mean() == pytest.approx(2.0, abs=0.02)
    assert values.std() == pytest.approx(1.5 * 2.0 / 4, abs=0.015)


def test_leaves_and_steps_draw_noise_of_their_own():
    tx = gcx.noisy_mean(1.0, 1.0, 1, KEY)
    zeros = {"a": jnp.zeros(8), "b": jnp.zeros(8)}
    first, second = drawn(tx, zeros, steps=2)
    rows = [first["a"], first["b"], second["a"], second["b"]]
    assert len({tuple(np.asarray(row)) for row in rows}) == 4
    again = drawn(tx, zeros)[0]
    np.testing.assert_array_equal(again["a"], first["a"])


def test_noise_is_added_in_float32_and_rounded_once():
    tx = gcx.noisy_mean(1.0, 0.01, 1, KEY)
    wide = drawn(tx, jnp.ones(64, jnp.float32))[0]
    narrow = drawn(tx, jnp.ones(64, jnp.bfloat16))[0]
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


def test_complex_leaves_get_noise_in_both_parts():
    tx = gcx.noisy_mean(1.0, 1.0, 1, KEY)
    noisy = drawn(tx, jnp.zeros(2000, jnp.complex64))[0]
    assert np.std(noisy.real) == pytest.approx(1, abs=0.1)
    assert np.std(noisy.imag) == pytest.approx(1, abs=0.1)


def test_noise_is_drawn_once_for_all_micro_batches():
    inner = optax.chain(gcx.noisy_mean(1.0, 1.0, 4, KEY), optax.identity())
    tx = gcx.accumulate_gradients(inner, 2, reduction="sum")
    grads = jnp.ones(4)
    state = tx.init(grads)
    held, state = tx.update(grads, state, grads)
    out, state = tx.update(grads, state, grads)
    alone = drawn(gcx.noisy_mean(1.0, 1.0, 4, KEY), 2 * grads)[0]
    assert not np.any(held)
    np.testing.assert_allclose(out, alone, rtol=1e-6)


def test_sensitivity_of_each_adjacency():
    assert gcx.clipped_sum_sensitivity(3.0) == 3.0
    assert gcx.clipped_sum_sensitivity(3.0, "replace_one") == 6.0
    assert gcx.clipped_sum_sensitivity({"a": 3.0, "b": 4.0}) == 5.0


def test_one_example_moves_the_sum_by_no_more_than_the_sensitivity():
    def loss(w, x):
        return jnp.dot(w, x) ** 2

    run = gcx.clipped_value_and_grad(loss, 0.5, reduction="sum")
    batch = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    w = jnp.ones(3)
    whole = run(w, batch)[1]
    without = run(w, batch, weights=np.array([1, 1, 0, 1, 1]))[1]
    assert np.linalg.norm(whole - without) <= gcx.clipped_sum_sensitivity(0.5) * (1 + 1e-5)


def test_noise_scale_agrees_with_that_of_micro_batches_of_one():
    grads = np.random.default_rng(1).normal(size=(6, 50)).astype(np.float32) + 0.4
    found = gcx.noise_scale_from_norms(jnp.linalg.norm(grads, axis=1), grads.mean(0))
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 6, noise_scale_decay=0.0)
    params = jnp.zeros(50)
    state = tx.init(params)
    for g in grads:
        _, state = tx.update(jnp.asarray(g), state, params)
    assert float(found) == pytest.approx(
        float(gcx.metrics(state)["gradient_noise_scale"]), rel=1e-4
    )


def test_one_example_shows_no_noise_scale():
    assert np.isnan(gcx.noise_scale_from_norms(jnp.ones(1), jnp.ones(3)))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: gcx.noisy_mean(-1.0, 1.0, 1, KEY), ValueError, "`noise_multiplier` must be"),
        (lambda: gcx.noisy_mean(1.0, 0.0, 1, KEY), ValueError, "`sensitivity` must be"),
        (lambda: gcx.noisy_mean(1.0, 1.0, 0, KEY), ValueError, "`expected_batch_size` must be"),
        (lambda: gcx.clipped_sum_sensitivity(1.0, "zero_out"), ValueError, "`adjacency` must be"),
        (lambda: gcx.clipped_sum_sensitivity(-1.0), ValueError, "`max_norm` must be"),
        (lambda: gcx.noise_scale_from_norms(jnp.float32(1), 1.0), ValueError, "`norms` must be"),
        (
            lambda: gcx.noisy_mean(1.0, 1.0, 1, KEY).update(
                {"n": jnp.arange(3)}, gcx.noisy_mean(1.0, 1.0, 1, KEY).init(None)
            ),
            TypeError,
            r"int32\[3\] at updates\['n'\]",
        ),
    ],
)
def test_errors_name_the_argument(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
