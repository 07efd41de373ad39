"""Every public transformation on a mesh whose axes are part of the types (`AxisType.Explicit`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registry
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices"),
    pytest.mark.slow,
]

SPECS = {"w": P(None, "data", "model"), "b": P("model"), "v": P(None, "data"), "r": P()}
SHAPES = {"w": (3, 8, 8), "b": (8,), "v": (8, 4), "r": (3,)}
MORE = {  # norms of layers and of leaves are vectors, which are sharded in different ways
    "layers": lambda: gcx.clip_by_leaf_norm(0.5, num_layer_axes={"w": 1, "b": 0, "v": 1, "r": 0}),
}
MADE = registry.TRANSFORMATIONS | MORE


def tree(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}


@pytest.mark.parametrize("name", MADE)
def test_eight_devices_give_what_one_gives(name):
    if compat.VERSION < (0, 8) and name == "watch":
        pytest.skip("JAX 0.7 has no sharding rule for scatter")
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=axes)
    grads, params, tx = tree(0), tree(1), MADE[name]()

    def put(tree):
        return {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in tree.items()}

    on_one = jax.tree.map(jnp.asarray, params)
    expected, _ = jax.jit(tx.update)(grads, tx.init(on_one), on_one)
    placed = put(params)
    updates, _ = jax.jit(tx.update)(put(grads), tx.init(placed), placed)
    for key, x in updates.items():
        np.testing.assert_allclose(x, expected[key], rtol=1e-5, atol=1e-6)
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[key]), x.ndim)


TABLE, WIDTH, TOKENS = 64, 16, (32, 8)
TABLES = {"vocabulary": P("model"), "width": P(None, "model"), "replicated": P()}


@pytest.mark.skipif(compat.VERSION < (0, 10), reason="JAX has reduced types from 0.10 on")
@pytest.mark.parametrize("spec", TABLES.values(), ids=TABLES)
def test_gradient_of_an_embedding_whose_tokens_are_sharded_over_both_axes(spec):
    # openxla/xla#42481: summed over "model" now and "data" later it is wrong (JAX 0.10.2, 0.12.0).
    rng = np.random.default_rng(0)
    table = rng.normal(size=(TABLE, WIDTH)).astype(np.float32)
    ids = rng.integers(0, TABLE, TOKENS)

    def loss(table, ids):
        return jnp.mean(jnp.tanh(table.at[ids].get(out_sharding=P("data", "model"))) ** 2)

    expected = np.zeros_like(table, np.float64)
    tanh = np.tanh(table[ids].astype(np.float64))
    np.add.at(expected, ids, 2 * tanh * (1 - tanh**2) / tanh.size)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = (table, spec), (ids, P("data", "model"))
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in placed]
        _, grad = jax.jit(gcx.microbatched_value_and_grad(loss, 4))(*args)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-8)
