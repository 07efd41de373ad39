"""`run_if` and `apply_gradients`: a step taken zero or one times, in place."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import compat
import gradclip_jax as gcx
import hlo
from accumulation_cases import gradients, params_like
from gradclip_jax._run_if import run_if

X, Y = jnp.array([1.0, -2.0, 3.0]), jnp.float32(0.5)
TAKEN = pytest.mark.parametrize("taken", [True, False])


def smooth(predicate, x, y):
    """A step that closes over `y`; a float32, an int32 and a bool travel along."""

    def step(carry):
        x, count, flag = carry
        return jnp.sin(x) * y, count + 1, ~flag

    return run_if(predicate, step, (x, jnp.int32(3), jnp.array(False)))


def loss(x, y, predicate):
    return jnp.sum(smooth(predicate, x, y)[0] ** 2)


def expected_loss(x, y, predicate):
    return jnp.sum((jnp.sin(x) * y if predicate else x) ** 2)


# --- zero or one trip -----------------------------------------------------------------------


@TAKEN
def test_the_step_runs_once_or_not_at_all(taken):
    calls = []

    def step(carry):
        jax.debug.callback(lambda: calls.append(1))
        return carry + 1

    run = jax.jit(lambda predicate, x: run_if(predicate, step, x))
    out = run(jnp.array(taken), X)
    jax.effects_barrier()
    assert len(calls) == int(taken)
    np.testing.assert_array_equal(out, X + taken)


@TAKEN
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_carry_keeps_its_dtypes(wrap, taken):
    carry = {
        "half": jnp.ones((2,), jnp.bfloat16),
        "count": jnp.int8(3),
        "complex": jnp.ones((2,), jnp.complex64),
        "key": jax.random.key(0),
        "none": None,
    }

    def step(carry):
        return {
            "half": carry["half"].astype(jnp.float32) * 3,
            "count": carry["count"].astype(jnp.int32) + 1,
            "complex": carry["complex"].real,
            "key": jax.random.split(carry["key"])[0],
            "none": None,
        }

    out = wrap(lambda predicate, carry: run_if(predicate, step, carry))(jnp.array(taken), carry)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, carry)
    assert float(out["half"][0]) == (3 if taken else 1)
    assert int(out["count"]) == (4 if taken else 3)


def test_vmap_takes_the_step_only_where_the_predicate_holds():
    predicates = jnp.array([True, False, True])
    rows, offsets = jnp.arange(6.0).reshape(3, 2), jnp.array([10, 20, 30])  # an int is closed over
    run = jax.vmap(lambda p, x, n: run_if(p, lambda c: c + n, x))
    expected = rows + jnp.where(predicates, offsets, 0)[:, None]
    np.testing.assert_array_equal(run(predicates, rows, offsets), expected)
    np.testing.assert_array_equal(jax.jit(run)(predicates, rows, offsets), expected)


# --- derivatives ----------------------------------------------------------------------------


@TAKEN
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_reverse_and_forward_derivatives_are_those_of_the_branch_taken(wrap, taken):
    predicate = jnp.array(taken)
    grads = wrap(jax.grad(loss, argnums=(0, 1)))(X, Y, predicate)
    expected = jax.grad(expected_loss, argnums=(0, 1))(X, Y, taken)
    chex.assert_trees_all_close(grads, expected, rtol=1e-6)
    tangents = (jnp.ones_like(X), jnp.ones_like(Y))
    push = wrap(lambda x, y: jax.jvp(lambda x, y: loss(x, y, predicate), (x, y), tangents)[1])
    slope = sum(jnp.sum(g) for g in expected)
    np.testing.assert_allclose(push(X, Y), slope, rtol=1e-6)


@TAKEN
def test_second_derivatives_are_those_of_the_branch_taken(taken):
    hessian = jax.jit(jax.hessian(loss))(X, Y, jnp.array(taken))
    np.testing.assert_allclose(hessian, jax.hessian(expected_loss)(X, Y, taken), atol=1e-6)


def test_derivatives_survive_vmap_and_scan():
    predicates = jnp.array([True, False])
    rows = jnp.stack([X, X])
    by_row = jax.jit(jax.vmap(jax.grad(loss), (0, None, 0)))(rows, Y, predicates)
    expected = [jax.grad(expected_loss)(X, Y, p) for p in (True, False)]
    chex.assert_trees_all_close(by_row, jnp.stack(expected), rtol=1e-6)

    def total(x):
        return jnp.sum(jax.lax.scan(lambda x, p: (smooth(p, x, Y)[0], None), x, predicates)[0])

    chex.assert_trees_all_close(jax.jit(jax.grad(total))(X), jnp.cos(X) * Y, rtol=1e-6)


def test_a_step_not_taken_cannot_poison_a_derivative():
    def out(x, predicate):
        return jnp.sum(run_if(predicate, lambda x: x * jnp.log(x - x), x))

    np.testing.assert_array_equal(jax.jit(jax.grad(out))(X, jnp.array(False)), jnp.ones_like(X))


# --- in place -------------------------------------------------------------------------------


def test_the_carry_is_neither_copied_nor_held_twice():
    size = 1 << 18
    x = jnp.ones((size,))
    fun = jax.jit(lambda p, x: run_if(p, lambda x: jnp.sin(x) * 2, x), donate_argnums=1)
    compiled = fun.lower(jnp.array(True), x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * x.nbytes
    assert not copies(compiled.as_text(), size)


def copies(text, size):
    """The instructions outside loops that copy an array of so many elements."""
    copy = re.compile(rf"\[{size}\]\S* copy(-start)?\(")
    return [line for line in hlo.instructions(text, loops=False) if copy.search(line)]


# --- apply_gradients ------------------------------------------------------------------------

TRANSFORMATIONS = {
    "chain": lambda: optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(0.1)),
    "accumulate_sum": lambda: gcx.accumulate_gradients(optax.lion(0.1), 2, reduction="sum"),
    "accumulate_noise": lambda: gcx.accumulate_gradients(optax.sgd(0.1), 2, noise_scale_decay=0.9),
    "skip_large_norm": lambda: gcx.skip_large_norm(optax.adam(0.1), 2.5),
    "accumulate_of_guard": lambda: gcx.accumulate_gradients(gcx.skip_nonfinite(optax.adam(0.1)), 2),
    "guard_of_accumulate": lambda: gcx.skip_nonfinite(gcx.accumulate_gradients(optax.adam(0.1), 2)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


def by_update(tx):
    tx = optax.with_extra_args_support(tx)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(step, tx, params, bad_at=None):
    state = tx.init(params)
    for i in range(6):
        grads = gradients(i, params)
        bad = jax.tree.map(lambda g: g * jnp.nan, grads)
        params, state = step(bad if i == bad_at else grads, state, params)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_apply_gradients_is_update_and_apply_updates(name):
    tx, params = TRANSFORMATIONS[name](), params_like()
    fast = jax.jit(functools.partial(gcx.apply_gradients, tx))
    plain = jax.jit(by_update(tx))
    for bad_at in (None, 2):
        ours, wanted = (trained(step, tx, params, bad_at) for step in (fast, plain))
        # Two programs: XLA may fuse a product and a sum in one and not in the other.
        chex.assert_trees_all_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_apply_gradients_of_low_precision_parameters_is_no_less_precise():
    # The update is not rounded to bfloat16 before it is added: the result is that of `update`
    # in float32, rounded once.
    tx = gcx.accumulate_gradients(optax.adamw(0.1), 2)
    params = params_like("bfloat16")
    grads = [gradients(i, params) for i in range(2)]
    state, exact = tx.init(params), jax.tree.map(lambda p: p.astype(jnp.float32), params)
    exact_state = tx.init(exact)
    for g in grads:
        params, state = gcx.apply_gradients(tx, g, state, params)
        g = jax.tree.map(lambda x: x.astype(jnp.float32), g)
        exact, exact_state = gcx.apply_gradients(tx, g, exact_state, exact)
    chex.assert_trees_all_equal_dtypes(params, grads[0])
    # Adam keeps its moments in bfloat16 here: each of the two adds eps to an update of 0.1.
    eps = 2.0**-8
    chex.assert_trees_all_close(
        jax.tree.map(lambda p: p.astype(jnp.float32), params), exact, rtol=eps, atol=0.1 * 2 * eps
    )


def test_apply_gradients_hands_extra_arguments_on_to_any_transformation():
    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda u: u * value, updates), value

    scale = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)
    for tx in (scale, optax.chain(scale), gcx.accumulate_gradients(scale, 1)):
        params, _ = gcx.apply_gradients(tx, X, tx.init(X), X, value=jnp.float32(2))
        np.testing.assert_array_equal(params, 3 * X)
    plain = optax.sgd(1.0)  # takes none, and is handed none
    params, _ = gcx.apply_gradients(plain, X, plain.init(X), X, value=jnp.float32(2))
    np.testing.assert_array_equal(params, 0 * X)


def test_a_held_step_returns_the_parameters_themselves():
    tx = gcx.accumulate_gradients(optax.adam(0.1), 2)
    params = params_like()
    held, _ = gcx.apply_gradients(tx, gradients(0, params), tx.init(params), params)
    assert all(a is b for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(params), strict=True))


@pytest.mark.parametrize("every", [None, 1, 2])
def test_a_parameter_without_gradient_stays_as_it_is(every):
    params = {"w": X, "n": jnp.array([1, 2])}
    grads = {"w": X, "n": np.zeros((2,), jax.dtypes.float0)}
    tx = optax.masked(optax.sgd(0.5), {"w": True, "n": False})
    tx = tx if every is None else gcx.accumulate_gradients(tx, every)
    after, state = params, tx.init(params)
    for _ in range(every or 1):
        after, state = jax.jit(lambda p, s: gcx.apply_gradients(tx, grads, s, p))(after, state)
    np.testing.assert_array_equal(after["w"], 0.5 * X)
    np.testing.assert_array_equal(after["n"], params["n"])


@pytest.mark.parametrize("every", [1, 2])
def test_strict_promotion_takes_float32_updates_to_bfloat16_parameters(every):
    tx = gcx.accumulate_gradients(optax.sgd(0.5), every)
    params = grads = jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)
    with compat.strict():
        step = jax.jit(functools.partial(gcx.apply_gradients, tx))
        for _ in range(every):
            params, state = step(grads, state, params)
    assert params.tolist() == [0.5] * 3 and params.dtype == grads.dtype
