"""Gradients that stay unreduced under explicit axes: summed over devices once a window."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from registry import TRANSFORMATIONS

import compat
import gradclip_jax as gcx
import hlo
import trees
from accumulation_cases import collectives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compat.VERSION < (0, 10), reason="JAX has unreduced types from 0.10 on"),
]

EVERY, SIZE = 3, 16
PARAMS = {"w": trees.normal((16, 8), seed=1), "v": trees.normal((8, 16), seed=2)}
X = trees.normal((2 * EVERY, SIZE, 16), seed=3)
ROWS = np.asarray(X).reshape(-1, 16)[:64]
WEIGHTS = jnp.array([1.0, 3.0, 0.0, 2.0, 2.0, 5.0])
N = sum(x.size for x in PARAMS.values())


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - x) ** 2)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


def keep(params):
    """Their gradients stay unreduced."""
    return jax.tree.map(lambda p: jax.sharding.reshard(p, P(None, None, reduced={"data"})), params)


def place(tree, mesh, *spec):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


@pytest.fixture
def params(mesh):
    """Replicated."""
    return place(jax.tree.map(np.asarray, PARAMS), mesh)


def whole(grads):
    """Summed over devices."""
    return jax.tree.map(lambda g: jax.sharding.reshard(g, P(None, None)), grads)


def train(tx, params, state, xs, weights, gradient):
    """Parameters and state after each micro-batch of the batch in a jitted step."""

    @functools.partial(jax.jit, static_argnames="emit")
    def step(params, state, x, weight, emit=None):
        grads = gradient(params, x)
        extra = {} if emit is None else {"emit": emit}
        return gcx.apply_gradients(tx, grads, state, params, weight=weight, **extra)

    for x, weight in zip(xs, weights, strict=True):
        params, state = step(params, state, x, weight)
    return params, state, step


INNER = {
    "adam": lambda: optax.adam(0.1),
    "clip": lambda: optax.chain(gcx.clip_by_global_norm(0.1), optax.sgd(1.0)),
    "guard": lambda: gcx.skip_nonfinite(optax.adam(0.1)),
}


@pytest.mark.parametrize("zero", [False, True], ids=["data parallel", "ZeRO-1"])
@pytest.mark.parametrize("name", INNER)
def test_a_window_is_reduced_once_and_equals_that_of_one_device(mesh, params, name, zero):
    tx = gcx.accumulate_gradients(INNER[name](), EVERY)
    state = jax.jit(lambda params: tx.init(keep(params)))(params)
    if zero:
        inner = jax.tree.map(
            lambda x: place(x, mesh, "data") if x.ndim else x, state.inner_opt_state
        )
        state = state._replace(inner_opt_state=inner)
    assert state.acc_grads["w"].sharding.spec.unreduced == {"data"}

    def gradient(params, x):
        return jax.grad(loss)(keep(params), x)

    xs = [place(x, mesh, "data") for x in np.asarray(X)]
    trained, state_after, step = train(tx, params, state, xs, WEIGHTS, gradient)
    flushed = jax.jit(lambda s, p: gcx.flush(tx, s, p))(
        step(params, state, xs[0], WEIGHTS[0])[1], params
    )[0]
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(state_after), strict=True):
        assert jax.typeof(before) == jax.typeof(after)
    assert jax.tree.map(jax.typeof, trained) == jax.tree.map(jax.typeof, params)

    held = step.lower(params, state, xs[0], WEIGHTS[0], emit=False).compile().as_text()
    assert collectives(held) == {}
    for closes in (True, None):  # known to close, and counted: then behind a branch
        text = step.lower(params, state, xs[0], WEIGHTS[0], emit=closes).compile().as_text()
        assert collectives(text) == {}
        if not zero:  # each element once, and perhaps a few scalars
            assert N <= sum(hlo.all_reduced(text, branches=True)) <= N + 4
            assert set(collectives(text, branches=True)) == {"all-reduce"}

    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))):
        one = jax.tree.map(jnp.asarray, jax.device_get(PARAMS))
        xs, weights = np.asarray(X), np.asarray(WEIGHTS)
        wanted, _, _ = train(tx, one, tx.init(one), xs, weights, jax.grad(loss))
        _, opened = tx.update(jax.grad(loss)(one, X[0]), tx.init(one), one)
        wanted_flush, _ = gcx.flush(tx, opened, one)
    chex.assert_trees_all_close(
        jax.device_get((trained, flushed)),
        jax.device_get((wanted, wanted_flush)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("has_weight", [False, True])
def test_inside_one_step_the_gradient_is_reduced_once_after_the_loop(mesh, params, has_weight):
    def fun(params, x):
        return (loss(params, x), jnp.float32(2)) if has_weight else loss(params, x)

    batch = place(ROWS, mesh, "data")
    value_and_grad = gcx.microbatched_value_and_grad(fun, 4, has_weight=has_weight)

    @jax.jit
    def take(params, batch):
        value, grads = value_and_grad(keep(params), batch)
        return value, whole(grads)

    text = take.lower(params, batch).compile().as_text()
    inside = sum(hlo.all_reduced(text)) - sum(hlo.all_reduced(text, loops=False))
    assert inside <= 4  # the value of each micro-batch
    assert N <= sum(hlo.all_reduced(text, loops=False)) <= N + 1
    value, grads = take(params, batch)
    wanted = jax.value_and_grad(fun, has_aux=has_weight)(params, batch)
    assert jax.tree.map(jax.typeof, grads) == jax.tree.map(jax.typeof, wanted[1])
    if has_weight:
        (value, _), ((wanted_value, _), wanted_grads) = value, wanted
        wanted = wanted_value, wanted_grads
    chex.assert_trees_all_close((value, grads), wanted, rtol=1e-5, atol=1e-6)


def test_a_bad_micro_batch_of_weight_zero_adds_nothing_to_what_stays_unreduced(mesh, params):
    def fun(params, x):
        weight = jnp.where(jnp.isfinite(jnp.sum(x)), 2.0, 0.0)
        return loss(params, x), weight

    rows = ROWS.copy()
    good = rows.reshape(16, 4, 16)[:, 1:].reshape(-1, 16)
    rows[::4] = np.nan  # every fourth example is of the first micro-batch
    value_and_grad = gcx.microbatched_value_and_grad(fun, 4, has_weight=True)

    take = jax.jit(lambda params, batch: whole(value_and_grad(keep(params), batch)[1]))
    found = jax.device_get(take(params, place(rows, mesh, "data")))
    chex.assert_trees_all_close(found, jax.grad(loss)(PARAMS, good), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_weight", [False, True])
def test_what_is_not_typed_as_reduced_comes_back_whole(mesh, params, has_weight):
    def fun(params, x):
        value = loss(params, x) + jnp.sum(jnp.sort(params["w"]) ** 2)
        return (value, jnp.float32(2)) if has_weight else value

    batch = place(ROWS, mesh, "data")
    take = jax.jit(gcx.microbatched_value_and_grad(fun, 4, has_weight=has_weight))
    _, ours = take(params, batch)
    _, wanted = jax.value_and_grad(fun, has_aux=has_weight)(params, batch)
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, wanted)
    chex.assert_trees_all_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["global_norm", *sorted(TRANSFORMATIONS.keys() - {"accumulate_gradients"})]
)
def test_all_but_an_accumulation_say_what_to_do_with_an_unreduced_gradient(mesh, params, name):
    def use(params, x):
        grads = jax.grad(loss)(keep(params), x)
        if name == "global_norm":
            return gcx.global_norm(grads)
        tx = TRANSFORMATIONS[name]()
        return tx.update(grads, tx.init(PARAMS), PARAMS)

    message = r"unreduced over 'data' at \w+\['v'\].*accumulate_gradients"
    with pytest.raises(TypeError, match=message):
        jax.jit(use)(params, place(np.asarray(X[0]), mesh, "data"))


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("updates", {}),  # `init` is given parameters that are not typed as `reduced`
        ("rounding", {"rounding": "stochastic", "accumulator_dtype": jnp.bfloat16}),
        ("reduction", {"reduction": "max"}),
        ("noise_scale_decay", {"noise_scale_decay": 0.9}),
    ],
)
def test_what_needs_the_whole_gradient_says_so(mesh, params, argument, options):
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2, **options)

    @jax.jit
    def step(params, x):
        state = tx.init(keep(params) if options else params)
        return tx.update(jax.grad(loss)(keep(params), x), state, params)

    with pytest.raises(TypeError, match=f"^accumulate_gradients: `{argument}` must be") as caught:
        step(params, place(np.asarray(X[0]), mesh, "data"))
    assert options or "at updates['v']" in str(caught.value)
