"""`accumulate_gradients` around any optimizer, and inside any wrapper."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_recipes import page

import gradclip_jax as gcx
import trees
from accumulation_cases import emissions, gradients, is_zero, run

VALUE = jnp.float32(1.0)


PARAMS = {"w": trees.normal((4, 3), seed=7), "b": trees.normal((3,), seed=8)}


def grads_of(count, params=PARAMS):
    return [gradients(seed, params) for seed in range(count)]


# --- any optimizer inside -------------------------------------------------------------------

# Each keeps something of its own: a dtype, a value, parameters, a wrapped state.
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), mu_dtype="bfloat16"),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "novograd": lambda: optax.novograd(0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "momo": lambda: optax.contrib.momo(1.0),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
}
# They cannot be traced on float32 gradients of bfloat16 parameters.
SAME_DTYPE_ONLY = {"novograd", "apply_if_finite"}


def first_update(inner, grads, params):
    """What the inner optimizer makes of a gradient at its first step."""
    inner = optax.with_extra_args_support(inner)
    update = jax.jit(lambda grads: inner.update(grads, inner.init(params), params, value=VALUE)[0])
    return update(grads)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_takes_the_mean_of_bfloat16_gradients(name):
    # In MultiSteps this raised errors for years: Optax issues 377, 1038, 1039.
    inner, params = OPTIMIZERS[name](), jax.tree.map(lambda p: p.astype("bfloat16"), PARAMS)
    grads = grads_of(4, params)
    dtype = None if name in SAME_DTYPE_ONLY else jnp.float32
    tx = gcx.accumulate_gradients(inner, 2, accumulator_dtype=dtype)
    updates, states = run(tx, params, grads, [{"value": VALUE}] * 4)
    chex.assert_trees_all_equal_shapes_and_dtypes(states[-1], tx.init(params))
    assert emissions(states) == [False, True] * 2
    assert is_zero(updates[0]) and is_zero(updates[2])
    # The mean of two bfloat16 numbers is exact in float32.
    mean = jax.tree.map(lambda *g: sum(x.astype(jnp.float32) for x in g) / 2, *grads[:2])
    narrow = jax.tree.map(lambda m, p: m.astype(p.dtype), mean, params)
    plain = first_update(inner, narrow, params)
    chex.assert_trees_all_equal_dtypes(*updates, plain)
    wanted = plain if name in SAME_DTYPE_ONLY else first_update(inner, mean, params)
    # One rounding to bfloat16, and one of what an optimizer keeps in it. The update of schedule_free
    # is the difference of two parameters, each rounded.
    rounded = params if name == "schedule_free" else wanted
    bound = 2 * 2.0**-8 * max(np.abs(x).max() for x in jax.tree.leaves(wide(rounded)))
    chex.assert_trees_all_close(wide(updates[1]), wide(wanted), atol=float(bound))


def test_lookahead_may_be_inside():
    grads = grads_of(4)
    lookahead = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    tx = gcx.accumulate_gradients(lookahead, 2)

    step = jax.jit(functools.partial(gcx.apply_gradients, tx))
    params = optax.LookaheadParams.init_synced(PARAMS)
    state, wanted = tx.init(params), params
    for g in grads:
        params, state = step(g, state, params)
    lookahead_state = lookahead.init(wanted)
    for i in (0, 2):
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads[i : i + 2])
        updates, lookahead_state = lookahead.update(mean, lookahead_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    chex.assert_trees_all_close(params, wanted, rtol=1e-5)
    _, state = step(grads[0], state, params)
    updates, _ = gcx.flush(tx, state, params)
    np.testing.assert_allclose(updates.fast["w"], -0.1 * grads[0]["w"], rtol=1e-6)


# --- inside any wrapper ---------------------------------------------------------------------


def test_two_accumulations_in_a_partition_keep_their_own_windows():
    parts = {
        "a": gcx.accumulate_gradients(optax.sgd(0.1), 2),
        "b": gcx.accumulate_gradients(optax.sgd(0.1), 3),
    }
    tx, grads = optax.partition(parts, {"w": "a", "b": "b"}), grads_of(7)
    updates, states = run(tx, PARAMS, grads)
    assert [bool(np.any(u["w"])) for u in updates] == [False, True] * 3 + [False]
    assert [bool(np.any(u["b"])) for u in updates] == [False, False, True] * 2 + [False]
    told = [v for k, v in gcx.metrics(states[-1]).items() if k.startswith("gradient_step")]
    assert sorted(int(v) for v in told) == [2, 3]
    flushed, _ = gcx.flush(tx, states[-1], PARAMS)
    chex.assert_trees_all_close(flushed, jax.tree.map(lambda g: -0.1 * g, grads[-1]), rtol=1e-6)


# --- Flax -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_statistics_of_a_flax_fp8_layer_are_those_of_the_big_batch():
    nn = pytest.importorskip("flax.linen")
    model, x = nn.Dense(8, dot_general_cls=nn.Fp8DotGeneralOp), trees.normal((16, 4), seed=1)
    variables = model.init(jax.random.key(0), x)

    def loss(variables, x):
        # A sum over examples: the gradient of an output is that of the big batch.
        return jnp.sum(model.apply(variables, x) ** 2) / 16

    inner = {
        "params": gcx.accumulate_gradients(optax.sgd(0.1), 4, reduction="sum"),
        "_overwrite_with_gradient": page("fp8")["maximum"](4),
    }
    tx = optax.partition(inner, {name: name for name in inner})
    step = jax.jit(lambda p, s, x: gcx.apply_gradients(tx, jax.grad(loss)(p, x), s, p))
    wanted, state = variables, tx.init(variables)
    for window in range(2):
        batch = (1 + window) * x
        grads = jax.grad(loss)(wanted, batch)
        assert all(np.any(x) for x in jax.tree.leaves(grads["_overwrite_with_gradient"]))
        wanted = {
            "params": jax.tree.map(lambda p, g: p - 0.1 * g, wanted["params"], grads["params"]),
            "_overwrite_with_gradient": grads["_overwrite_with_gradient"],
        }
        for i in range(4):
            variables, state = step(variables, state, batch[i::4])
        chex.assert_trees_all_close(variables, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_variables_of_nnx_are_taken_and_returned():
    # tests/integration/trainers/test_nnx.py has the optimizer of NNX, flushed and reset.
    nnx = pytest.importorskip("flax.nnx")
    model, tx = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), gcx.accumulate_gradients(optax.adam(0.1), 3)
    params = nnx.state(model, nnx.Param)
    grads = nnx.grad(lambda model: jnp.mean(model(jnp.ones((4, 2))) ** 2))(model)
    assert sorted(gcx.Monitor(params).names.units) == ["bias", "kernel"]
    carry = params, tx.init(params)
    for _ in range(4):
        out = gcx.apply_gradients(tx, grads, *reversed(carry))
        assert jax.tree.structure(out) == jax.tree.structure(carry)
        carry = out
    updates, state = gcx.flush(tx, carry[1], params)
    assert jax.tree.structure((updates, state)) == jax.tree.structure(carry)
    assert gcx.diagnostics.accumulation_stats(state).total_updates == 2
    assert np.any(updates["kernel"][...]) and np.any(carry[0]["kernel"][...] != model.kernel[...])
