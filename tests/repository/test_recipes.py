"""The recipes for losses that are not one mean: against the whole batch in float64, and their memory."""

import contextlib
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_readme import blocks

import gradclip_jax as gcx
from compat import needs_eight_devices, x64
from files import ROOT

pytestmark = pytest.mark.slow


@functools.cache
def page(name):
    """The names that the code of a recipe defines."""
    namespace = {"__name__": name}
    with contextlib.redirect_stdout(io.StringIO()):
        for _, code, _ in blocks(ROOT / f"docs/recipes/{name}.md"):
            exec(compile(code, name, "exec"), namespace)
    return namespace


def in_float64(fun, *args):
    """The result of `fun` for the same arguments in float64."""
    wide = jax.tree.map(
        lambda x: np.float64(x) if np.asarray(x).dtype.kind == "f" else np.asarray(x), args
    )
    with x64():
        return jax.tree.map(np.asarray, jax.jit(fun)(*wide))


def relative_error(tree, exact):
    flat = (
        np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(t)]) for t in (tree, exact)
    )
    found, exact = flat
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def check_scratch(name, functions, *args):
    """The megabytes of scratch memory are those of the page."""
    text = (ROOT / f"docs/recipes/{name}.md").read_text()
    stated = re.search(
        r"needs ([\d.]+) MB of scratch memory instead of\s([\d.]+) MB", text
    ).groups()
    memory = [jax.jit(fun).lower(*args).compile().memory_analysis() for fun in functions]
    found = [x.temp_size_in_bytes / 1e6 for x in memory]
    np.testing.assert_allclose(found, np.float64(stated), rtol=0.25)


def test_encoders_in_parts_have_the_contrastive_gradient_of_the_batch_and_less_memory():
    names = page("contrastive")
    whole, cached = (jax.value_and_grad(names[x]) for x in ("loss_fn", "cached_loss_fn"))
    params, batch = names["params"], names["batch"]
    exact = in_float64(whole, params, batch)
    assert relative_error(jax.jit(cached)(params, batch), exact) < 1e-6
    split = gcx.microbatched_value_and_grad(names["loss_fn"], 8)
    assert relative_error(split(params, batch)[1], exact[1]) > 0.5  # the mistake of the page
    check_scratch("contrastive", (cached, whole), params, batch)


@needs_eight_devices
def test_encoders_in_parts_of_a_sharded_batch_have_the_gradient_of_the_batch():
    names = page("contrastive")
    params, batch = names["params"], names["batch"]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))
    found = jax.jit(jax.grad(names["cached_loss_fn"]))(params, sharded)
    assert relative_error(found, in_float64(jax.grad(names["loss_fn"]), params, batch)) < 1e-6


def test_the_function_for_models_of_nnx_equals_one_batch_and_draws_masks_of_its_own():
    names = page("../trainers/nnx")
    split, batch, x = (
        names["value_and_grad"],
        names["make_batch"](0),
        jnp.arange(32.0).reshape(8, 4),
    )
    model, _ = names["start"]()
    model.eval()
    loss, grads = split(names["loss_fn"], 4)(model, batch)
    (exact, _), whole = nnx.value_and_grad(names["loss_fn"], has_aux=True)(model, batch)
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    assert relative_error(grads, whole) < 1e-6

    def mean_of_masks(power):
        def loss(model, batch):
            return jnp.sum(model.dropout(jnp.arange(64.0))) ** power, jnp.float32(1)

        return split(loss, 4)(names["start"]()[0], batch)[0]

    assert mean_of_masks(2) > 1.0001 * mean_of_masks(1) ** 2  # equal if all masks are
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    split(lambda norm, x: (jnp.sum(norm(x)), jnp.float32(len(x))), 4)(norm, x)
    np.testing.assert_allclose(norm.mean[...], 0.01 * x.mean(0), rtol=1e-5)


@pytest.mark.parametrize("way", ["one call", "several calls"])
def test_shares_of_several_terms_add_up_to_the_gradient_of_the_batch(way):
    names = page("several_terms")
    params, batch, totals = names["params"], names["batch"], names["totals"]
    exact = in_float64(jax.grad(names["loss_fn"]), params, batch, totals)
    summed = {
        "one call": names["grads"],
        "several calls": jax.tree.map(jnp.negative, names["updates"]),
    }
    assert relative_error(summed[way], exact) < 1e-6
    wrong = jax.jit(names["wrong"])(params, batch)[1]
    assert relative_error(wrong, exact) > 0.02


def test_the_summed_shares_of_a_loss_are_its_value():
    names = page("several_terms")
    exact = in_float64(names["loss_fn"], names["params"], names["batch"], names["totals"])
    np.testing.assert_allclose(names["loss"], exact, rtol=1e-6)


def test_several_terms_need_the_memory_of_a_micro_batch():
    names = page("several_terms")
    batch = jax.tree.map(lambda x: np.tile(x, (64, 1)), names["batch"])
    args = names["params"], batch, names["count"](batch)
    split = gcx.microbatched_value_and_grad(names["loss_fn"], 16, reduction="sum")
    check_scratch("several_terms", (split, jax.value_and_grad(names["loss_fn"])), *args)


def test_micro_batches_of_a_group_relative_loss_have_the_gradient_of_the_batch():
    names = page("group_relative")
    params, batch = names["params"], names["rollout"](names["params"], jax.random.key(9))
    params = jax.tree.map(lambda x: x * 1.1, params)  # ratios other than 1
    whole = jax.value_and_grad(names["loss_fn"], has_aux=True)
    split = gcx.microbatched_value_and_grad(names["loss_fn"], 4, has_weight=True, has_aux=True)
    exact, found = in_float64(whole, params, batch), jax.jit(split)(params, batch)
    np.testing.assert_allclose(found[0][1][1]["kl"], exact[0][1][1]["kl"], rtol=1e-4)
    assert relative_error(found[1], exact[1]) < 1e-5
    batch = jax.tree.map(lambda x: jnp.tile(x, (16, *[1] * (x.ndim - 1))), batch)
    check_scratch("group_relative", (split, whole), params, batch)


GATES = {
    "alone": lambda tx: tx,
    "guard": lambda tx: gcx.skip_nonfinite(tx, check="step"),
    "accumulation": lambda tx: gcx.accumulate_gradients(tx, every=2),
    "all": lambda tx: gcx.watch(gcx.skip_nonfinite(gcx.accumulate_gradients(tx, every=2))),
}


@needs_eight_devices
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_moments_in_host_memory_do_not_change_a_bit_and_stay_there(gate):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    start = jax.device_put({"w": jnp.ones((64, 8))}, NamedSharding(mesh, P("data")))
    grads = [{"w": jax.random.normal(jax.random.key(i), (64, 8))} for i in range(4)]
    grads[1] = {"w": jnp.full((64, 8), jnp.nan)}

    def train(optimizer):
        tx = gate(optax.chain(gcx.clip_by_global_norm(1.0), optimizer))
        params, state = start, tx.init(start)
        step = jax.jit(functools.partial(gcx.apply_gradients, tx))
        for grad in grads:
            params, state = step(grad, state, params)
        return params, state

    params, state = train(page("host_memory")["in_host_memory"](optax.adamw(1e-2)))
    expected, other = train(optax.adamw(1e-2))
    moment = optax.tree.get(state, "mu")["w"]
    assert moment.sharding == start["w"].sharding.with_memory_kind("pinned_host")
    np.testing.assert_array_equal(params["w"], expected["w"])
    np.testing.assert_array_equal(moment, optax.tree.get(other, "mu")["w"])
    gcx.metrics(state)


def test_a_state_that_was_moved_to_host_memory_as_a_whole_raises():
    tx, params = gcx.skip_nonfinite(optax.adamw(1e-2)), {"w": jnp.ones((8, 8))}
    state = tx.init(params)
    where = jax.tree.leaves(state)[0].sharding.with_memory_kind("pinned_host")
    with pytest.raises(ValueError, match="memory_space"):
        jax.jit(tx.update)(params, jax.device_put(state, where), params)
