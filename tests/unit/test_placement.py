"""Leaves that are unreduced over a mesh axis or in host memory raise an error with the next step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx

CALLS = {
    "global_norm": lambda tx, grads: gcx.global_norm(grads),
    "clip_grad_norm": lambda tx, grads: gcx.clip_grad_norm(grads, 1.0),
    "accumulate_gradients": lambda tx, grads: tx.update(grads, tx.init(PARAMS), PARAMS),
    "skip_nonfinite": lambda tx, grads: tx.update(grads, tx.init(PARAMS), PARAMS),
}
MADE = {
    "accumulate_gradients": gcx.accumulate_gradients(optax.sgd(1.0), 2),
    "skip_nonfinite": gcx.skip_nonfinite(optax.sgd(1.0)),
}
PARAMS = {"w": jnp.ones((16, 8))}


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


def as_reduced(params):
    return jax.tree.map(lambda p: jax.sharding.reshard(p, P(None, None, reduced={"data"})), params)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


with_types = pytest.mark.skipif(
    compat.VERSION < (0, 10) or len(jax.devices()) < 8, reason="needs JAX 0.10 and eight devices"
)


@with_types
@pytest.mark.parametrize("name", CALLS)
def test_an_unreduced_gradient_raises(mesh, name):
    def use(x):
        grads = jax.grad(loss)(as_reduced(PARAMS), x)
        return CALLS[name](MADE.get(name), grads)

    message = rf"^{name}: .*unreduced.*\['w'\].*microbatched_value_and_grad"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(use, jax.device_put(jnp.ones((16, 16)), jax.NamedSharding(mesh, P("data"))))


@with_types
@pytest.mark.parametrize("name", ["accumulate_gradients", "microbatched_value_and_grad"])
def test_a_reduced_parameter_raises(mesh, name):
    x = jax.device_put(jnp.ones((16, 16)), jax.NamedSharding(mesh, P("data")))

    def use(x):
        params = as_reduced(PARAMS)
        if name == "accumulate_gradients":
            return MADE[name].init(params)
        return gcx.microbatched_value_and_grad(loss, 2)(params, x)

    with pytest.raises(TypeError, match=rf"^{name}: .*`reduced`.*microbatched_value_and_grad"):
        jax.eval_shape(use, x)


@pytest.mark.skipif(
    not hasattr(jax.typeof(0.0), "memory_space"), reason="types have no memory space"
)
@pytest.mark.parametrize("name", CALLS)
def test_a_leaf_in_host_memory_raises(name):
    def use(grads):
        host = jax.device_put(grads, jax.memory.Space.Host)
        return CALLS[name](MADE.get(name), host)

    with pytest.raises(TypeError, match=rf"^{name}: .*\['w'\].*jax\.device_put"):
        jax.eval_shape(use, PARAMS)
