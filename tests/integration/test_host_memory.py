"""Gradients, parameters and accumulators in host memory, where the CPU backend has that."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding
from registry import SGD, TRANSFORMATIONS

import gradclip_jax as gcx

DEVICE = jax.devices()[0]
KINDS = {memory.kind for memory in DEVICE.addressable_memories()}
HERE = SingleDeviceSharding(DEVICE)
pytestmark = pytest.mark.skipif(
    not {"device", "pinned_host"} <= KINDS or not hasattr(jax.typeof(0.0), "memory_space"),
    reason="types have no memory space, or the backend has one memory",
)
MORE = {
    "max": lambda: gcx.clip_by_global_norm(1.0, ord=jnp.inf),
    "layer": lambda: gcx.clip_by_leaf_norm(1.0, num_layer_axes={"a": 1, "b": 0}),
    "row": lambda: gcx.clip_by_norm(1.0, granularity=gcx.granularities.axis(-1)),
    "row with a history": lambda: gcx.clip_by_norm(
        gcx.thresholds.percentile(10.0), granularity=gcx.granularities.layer({"a": 1, "b": 0})
    ),
    "zero": lambda: gcx.clip_by_norm(1.0, reaction="zero", nonfinite="zero"),
    "check of steps": lambda: gcx.skip_nonfinite(SGD, check="step"),
    "watch around a guard": lambda: gcx.watch(gcx.skip_nonfinite(SGD)),
}
MADE = TRANSFORMATIONS | MORE
KEEP_DEVICE_STATE = {"accumulate_gradients", "stable_adamw"}  # sums and moments


def there():
    return SingleDeviceSharding(DEVICE, memory_kind="pinned_host")


def mixed(a, b):
    """A leaf on the host and one on the device, as gradients of parameters that lie so."""
    return {"a": jax.device_put(jnp.array(a), there()), "b": jax.device_put(jnp.array(b), HERE)}


GRADS = {"a": [[3.0, 0.0], [0.0, 0.0]], "b": [4.0]}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_norm_over_both_memories(jit):
    # Optax adds the sums of leaves as they lie, which raises; MaxText then logs no norms.
    assert float(jit(gcx.global_norm)(mixed(**GRADS))) == 5.0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MADE.keys() - KEEP_DEVICE_STATE))
def test_step_over_both_memories_leaves_each_leaf_where_it_is(name):
    @jax.jit
    def steps(params, grads):
        tx = MADE[name]()
        updates, _ = tx.update(grads, tx.init(params), params)
        return updates, gcx.apply_gradients(tx, grads, tx.init(params), params)[0]

    params = mixed(**GRADS)
    for value in (1.0, jnp.nan):
        grads = {**params, "a": jax.jit(lambda x, value=value: x * value)(params["a"])}
        found = steps(params, grads)
        expected = steps(*jax.device_put((params, grads), HERE))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        for tree in found:
            for key, x in tree.items():
                assert x.sharding.memory_kind == params[key].sharding.memory_kind


def accumulate(tx, params, state, grads, *, on_host):
    """Two windows; with `on_host` the accumulator is moved within the step, before and after."""

    def step(params, state, grads):
        if on_host:
            state = state._replace(acc_grads=jax.device_put(state.acc_grads, HERE))
        params, state = gcx.apply_gradients(tx, grads, state, params)
        place = there() if on_host else HERE
        return params, state._replace(acc_grads=jax.device_put(state.acc_grads, place))

    step = jax.jit(step)
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def test_accumulator_on_the_host_gives_the_parameters_of_one_on_the_device():
    tx = gcx.accumulate_gradients(optax.chain(gcx.clip_by_global_norm(1.0), optax.adam(0.1)), 2)
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
    grads = [{k: jnp.cos(x + i) for k, x in params.items()} for i in range(4)]
    state = tx.init(params)
    expected, _ = accumulate(tx, params, state, grads, on_host=False)
    state = state._replace(acc_grads=jax.device_put(state.acc_grads, there()))
    found, state = accumulate(tx, params, state, grads, on_host=True)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)
        assert state.acc_grads[name].sharding.memory_kind == "pinned_host"


def test_gradient_in_another_memory_than_its_accumulator_is_named():
    params = {"w": jnp.ones(2), "b": jnp.ones(1)}
    tx = gcx.accumulate_gradients(optax.sgd(1.0), 2)
    state = tx.init(params)
    state = state._replace(acc_grads=jax.device_put(state.acc_grads, {"w": there(), "b": HERE}))
    with pytest.raises(TypeError, match=r"accumulate_gradients: `updates` .* updates\['w'\]"):
        jax.jit(tx.update)(params, state, params)
