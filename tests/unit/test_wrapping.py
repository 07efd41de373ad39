"""Guards and accumulations pass on what they do not use, count every step, and change nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
from guard_cases import SHARDS, WHOLE, calls, sharded

SGD = optax.sgd(1.0)
acc, skip = gcx.accumulate_gradients, gcx.skip_nonfinite
spikes = functools.partial(gcx.skip_spikes, norm=10.0)
step = functools.partial(skip, check="step")
skip_if = functools.partial(gcx.skip_if, predicate=lambda *args, **kwargs: False)
FLUSH, PADDING = {"flush": True}, {"weight": 0.0}


def reader(name):
    """An inner transformation whose state is the last extra argument of this name, else -1."""

    def update(updates, state, params=None, **extra_args):
        return updates, jnp.float32(extra_args.get(name, -1))

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(-1), update)


# --- what is inside -----------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [skip, step, spikes, skip_if, gcx.dynamic_loss_scale])
def test_a_guard_that_does_not_see_the_windows_inside_it_raises(guard):
    # With a guard around a chain, two gradients of 1.5e19 would give a step of 3e19.
    for wrap in (
        gcx.watch,
        lambda tx: optax.chain(gcx.clip_by_global_norm(1.0), tx),
        lambda tx: optax.named_chain(("a", optax.masked(tx, True))),
        lambda tx: optax.partition({"a": tx, "b": SGD}, "a"),
    ):
        for inside in (acc(SGD, 4), skip(acc(SGD, 4))):
            with pytest.raises(TypeError, match="`inner` must .*accumulation.*directly around"):
                guard(wrap(inside)).init(jnp.ones(2))
    guard(acc(gcx.watch(SGD), 4)).init(jnp.ones(2))


@pytest.mark.parametrize("shape", [(1, 2), (1,), (3,)])
@pytest.mark.parametrize("wrap", [skip, step, spikes, gcx.dynamic_loss_scale, acc])
@pytest.mark.sampled
def test_gradients_of_another_shape_than_their_parameters_raise(wrap, shape):
    tx, params = wrap(SGD, every=2) if wrap is acc else wrap(SGD), jnp.zeros(2)
    for call in (tx.update, functools.partial(gcx.apply_gradients, tx)):
        with pytest.raises(TypeError, match="`(updates|grads)` must.*shape"):
            jax.jit(call)(jnp.ones(shape), tx.init(params), params)


def test_errors_name_the_guard_or_accumulation_that_raises():
    params = jnp.ones(2)
    for tx, extra_args, name in [
        (skip(gcx.skip_spikes(SGD, loss=4.0)), {}, "skip_spikes"),
        (
            gcx.dynamic_loss_scale(gcx.skip_spikes(SGD, norm=1.0, trainable=[True])),
            {},
            "skip_spikes",
        ),
        (skip(acc(SGD, 2)), {"weight": "many"}, "accumulate_gradients"),
        (acc(skip(SGD), 2), {"flush": 1}, "accumulate_gradients"),
    ]:
        state = tx.init(params)
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            tx.update(params, state, params, **extra_args)


# --- extra arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("value", "bfloat16"), ("loss", "int32")])
def test_the_inner_transformation_receives_the_weighted_mean_loss_of_the_window(name, dtype):
    losses, weights = np.array([8, 4, 2, 1], dtype), [1.0, 2.0, 0.0, 5.0]
    tx, params = acc(reader(name), 4), jnp.ones(2)
    for weighted in (False, True):
        state = tx.init(params)
        update = jax.jit(tx.update)
        for loss, weight in zip(losses, weights, strict=True):
            extra_args = {name: loss} | ({"weight": weight} if weighted else {})
            _, state = update(params, state, params, **extra_args)
        mean = np.average(losses.astype(float), weights=weights if weighted else None)
        np.testing.assert_allclose(state.inner_state, mean, rtol=1e-6)


def test_the_mean_loss_leaves_out_skipped_micro_batches_and_ends_with_its_window():
    tx = skip(acc(reader("value"), 2))
    rows = [(1, 2.0), (np.nan, 50.0), (1, 4.0), (1, 7.0), (1, 9.0), (1, None), (1, 5.0)]
    stream = [(g, {} if v is None else {"value": v}) for g, v in rows]
    stops = range(1, len(stream) + 1)
    found = [float(calls(tx, stream[:i])[1].inner_state) for i in stops]
    assert found == [-1, -1, 3, 3, 8, 8, 5]


def test_a_loss_that_varies_over_devices_raises_in_an_accumulation():
    tx = acc(SGD, 2)

    @sharded((WHOLE, SHARDS), WHOLE)
    def update(params, losses):
        return tx.update(params, tx.init(params), params, value=losses[0])[0]

    with pytest.raises(TypeError, match="^accumulate_gradients: `value` must be.*pmean"):
        update(jnp.ones(2), jnp.ones(8))


def test_traps_warn_at_the_line_of_the_user():
    params = jnp.ones(2)
    for tx, extra_args, message in [
        (skip(optax.identity()), {}, "contains no optimizer"),
        (acc(optax.identity(), 1), {}, "contains no optimizer"),
        (skip(SGD), {"weight": 2.0}, "No accumulation reads"),
        (skip(optax.MultiSteps(SGD, 2)), {"weight": 2.0}, "No accumulation reads"),
    ]:
        for apply in (gcx.apply_gradients, jax.jit(gcx.apply_gradients, static_argnums=0)):
            with pytest.warns(UserWarning, match=message) as found:
                apply(tx, params, tx.init(params), params, **extra_args)
            assert found[0].filename == __file__


# --- flush ------------------------------------------------------------------------------------------


def test_stats_of_a_state_with_two_accumulations_raise():
    tx = optax.partition({"a": acc(SGD, 2), "b": acc(SGD, 3)}, {"a": "a", "b": "b"})
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    _, state = tx.update(params, tx.init(params), params)
    with pytest.raises(TypeError, match="`state` must be a state with exactly one.* with 2"):
        gcx.diagnostics.accumulation_stats(state)


# --- counts -------------------------------------------------------------------------------------------


def test_a_micro_batch_of_weight_0_is_not_checked_and_has_no_norm():
    _, state, _ = calls(skip(acc(SGD, 3)), [(1.0, {"weight": 1.0}), (np.nan, PADDING)])
    found = gcx.metrics(state)
    assert (found["skipped_nonfinite"], found["mini_step"], found["grad_norm"]) == (0, 2, 1.0)


def test_without_an_accumulation_a_gradient_of_weight_0_is_checked():
    with pytest.warns(UserWarning, match="No accumulation"):
        assert calls(skip(SGD), [(np.nan, PADDING)])[2] == [0]


def test_has_updated_knows_the_states_of_optax():
    multi_steps = optax.MultiSteps(SGD, 2).gradient_transformation()
    assert calls(multi_steps, [1.0] * 4)[2] == [0, 1, 0, 1]
    assert calls(acc(optax.apply_if_finite(SGD, 9), 1), [1.0, np.nan, 1.0])[2] == [1, 0, 1]
