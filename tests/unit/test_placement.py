"""Leaves that are unreduced over a mesh axis or in host memory raise an error with the next step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx

PARAMS, X = {"w": jnp.ones((16, 8))}, jnp.ones((16, 16))
ACCUMULATE = gcx.accumulate_gradients(optax.sgd(1.0), 2)
SKIP = gcx.skip_nonfinite(optax.sgd(1.0))
CALLS = {
    "global_norm": gcx.global_norm,
    "clip_grad_norm": lambda grads: gcx.clip_grad_norm(grads, 1.0),
    "accumulate_gradients": lambda grads: ACCUMULATE.update(grads, ACCUMULATE.init(PARAMS), PARAMS),
    "skip_nonfinite": lambda grads: SKIP.update(grads, SKIP.init(PARAMS), PARAMS),
}


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def use_reduced(use):
    """Trace a function of parameters that are marked as reduced over a mesh axis, and a batch."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        reduced = P(None, None, reduced={"data"})
        batch = jax.device_put(X, NamedSharding(mesh, P("data")))
        jax.eval_shape(lambda x: use({"w": reshard(PARAMS["w"], reduced)}, x), batch)


with_types = pytest.mark.skipif(
    compat.VERSION < (0, 10) or len(jax.devices()) < 8, reason="needs JAX 0.10 and eight devices"
)


@with_types
@pytest.mark.parametrize("name", CALLS)
def test_an_unreduced_gradient_raises(name):
    message = rf"^{name}: .*unreduced.*\['w'\].*microbatched_value_and_grad"
    with pytest.raises(TypeError, match=message):
        use_reduced(lambda params, x: CALLS[name](jax.grad(loss)(params, x)))


@with_types
@pytest.mark.parametrize("name", ["accumulate_gradients", "microbatched_value_and_grad"])
def test_a_reduced_parameter_raises(name):
    split = gcx.microbatched_value_and_grad(loss, 2)
    use = (
        split
        if name == "microbatched_value_and_grad"
        else lambda params, x: ACCUMULATE.init(params)
    )
    with pytest.raises(TypeError, match=rf"^{name}: .*`reduced`.*microbatched_value_and_grad"):
        use_reduced(use)


@pytest.mark.skipif(
    not hasattr(jax.typeof(0.0), "memory_space"), reason="types have no memory space"
)
@pytest.mark.parametrize("name", CALLS)
def test_a_leaf_in_host_memory_raises(name):
    with pytest.raises(TypeError, match=rf"^{name}: .*\['w'\].*jax\.device_put"):
        jax.eval_shape(lambda p: CALLS[name](jax.device_put(p, jax.memory.Space.Host)), PARAMS)
