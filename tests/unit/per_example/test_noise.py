"""Noise, sensitivity and the noise scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from accumulation_cases import run
from compat import VERSION
from guard_cases import SHARDS, WHOLE, sharded

KEY = jax.random.key(7)


def drawn(tx, updates, steps=1):
    """The update of each step, all from the same gradients."""
    state, out = tx.init(updates), []
    for _ in range(steps):
        noisy, state = tx.update(updates, state)
        out.append(noisy)
    return out


def test_noise_has_the_deviation_of_multiplier_times_sensitivity():
    tx = gcx.per_example.noisy_mean(1.5, 2.0, 4, KEY)
    (noisy,) = drawn(tx, {"w": jnp.full(40_000, 8.0)})
    values = np.asarray(noisy["w"], np.float64)
    # 40,000 numbers of deviation 0.75: the mean is off by 0.004, the deviation by 0.003.
    assert values.mean() == pytest.approx(2.0, abs=0.02)
    assert values.std() == pytest.approx(1.5 * 2.0 / 4, abs=0.015)


def test_leaves_and_steps_draw_noise_of_their_own():
    tx = gcx.per_example.noisy_mean(1.0, 1.0, 1, KEY)
    zeros = {"a": jnp.zeros(8), "b": jnp.zeros(8)}
    first, second = drawn(tx, zeros, steps=2)
    rows = [first["a"], first["b"], second["a"], second["b"]]
    assert len({tuple(np.asarray(row)) for row in rows}) == 4
    again = drawn(tx, zeros)[0]
    np.testing.assert_array_equal(again["a"], first["a"])


def test_noise_is_added_in_float32_and_rounded_once():
    tx = gcx.per_example.noisy_mean(1.0, 0.01, 1, KEY)
    wide = drawn(tx, jnp.ones(64, jnp.float32))[0]
    narrow = drawn(tx, jnp.ones(64, jnp.bfloat16))[0]
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


def test_complex_leaves_get_noise_in_both_parts():
    tx = gcx.per_example.noisy_mean(1.0, 1.0, 1, KEY)
    noisy = drawn(tx, jnp.zeros(2000, jnp.complex64))[0]
    assert np.std(noisy.real) == pytest.approx(1, abs=0.1)
    assert np.std(noisy.imag) == pytest.approx(1, abs=0.1)


def test_noise_is_drawn_once_for_all_micro_batches():
    inner = optax.chain(gcx.per_example.noisy_mean(1.0, 1.0, 4, KEY), optax.identity())
    tx = gcx.accumulate_gradients(inner, 2, reduction="sum")
    grads = jnp.ones(4)
    (held, out), _ = run(tx, grads, [grads] * 2)
    alone = drawn(gcx.per_example.noisy_mean(1.0, 1.0, 4, KEY), 2 * grads)[0]
    assert not np.any(held)
    np.testing.assert_allclose(out, alone, rtol=1e-6)


def test_sensitivity_of_each_adjacency():
    assert gcx.per_example.sensitivity(3.0) == 3.0
    assert gcx.per_example.sensitivity(3.0, "replace_one") == 6.0
    assert gcx.per_example.sensitivity({"a": 3.0, "b": 4.0}) == 5.0


def test_noise_scale_agrees_with_that_of_micro_batches_of_one():
    grads = np.random.default_rng(1).normal(size=(6, 50)).astype(np.float32) + 0.4
    found = gcx.per_example.noise_scale(jnp.linalg.norm(grads, axis=1), grads.mean(0))
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 6, noise_scale_decay=0.0)
    _, states = run(tx, jnp.zeros(50), grads)
    expected = gcx.metrics(states[-1])["gradient_noise_scale"]
    assert float(found) == pytest.approx(float(expected), rel=1e-4)


def test_one_example_shows_no_noise_scale():
    assert np.isnan(gcx.per_example.noise_scale(jnp.ones(1), jnp.ones(3)))


needs_eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


@needs_eight
def test_shards_draw_noise_of_their_own_and_replicas_the_same():
    tx = gcx.per_example.noisy_mean(1.0, 1.0, 1, KEY)
    zeros = {"shard": jnp.zeros((8, 50)), "copy": jnp.zeros(50)}
    specs = {"shard": SHARDS, "copy": WHOLE}
    found = sharded((specs,), specs)(lambda x: tx.update(x, tx.init(x))[0])(zeros)
    assert len({tuple(np.asarray(row)) for row in found["shard"]}) == 8
    copies = [np.asarray(x.data) for x in found["copy"].addressable_shards]
    assert all((copy == copies[0]).all() for copy in copies)


@needs_eight
@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize(("axis_name", "draws"), [("data", 8), ((), 1), (None, None)])
def test_axis_name_says_what_a_device_holds_where_types_do_not(mode, axis_name, draws):
    if mode == "pmap" and axis_name is None and VERSION < (0, 8):
        pytest.skip("a pmap of JAX 0.7 cannot be seen")
    tx = gcx.per_example.noisy_mean(1.0, 1.0, 1, KEY, axis_name=axis_name)

    def noise(x):
        return tx.update(x, tx.init(x))[0]

    silent = sharded(SHARDS, SHARDS, check_vma=False)
    run = jax.pmap(noise, "data") if mode == "pmap" else silent(noise)
    if axis_name is None:
        with pytest.raises(ValueError, match="^noisy_mean: `axis_name`"):
            run(jnp.zeros((8, 50)))
    else:
        noisy = run(jnp.zeros((8, 50)))
        assert len({tuple(row) for row in np.asarray(noisy)}) == draws
