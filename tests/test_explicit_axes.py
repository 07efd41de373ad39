"""Every public transformation on a mesh whose axes are part of the types (`AxisType.Explicit`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import compat
import gradclip_jax as gcx
import registry

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices"),
    pytest.mark.slow,
]

SPECS = {"w": P(None, "data", "model"), "b": P("model"), "v": P(None, "data"), "r": P()}
SHAPES = {"w": (3, 8, 8), "b": (8,), "v": (8, 4), "r": (3,)}
MORE = {  # norms of layers and of leaves are vectors, which are sharded in different ways
    "layers": lambda: gcx.clip_by_leaf_norm(0.5, stack_axes={"w": 1, "b": 0, "v": 1, "r": 0}),
    "per_leaf": lambda: gcx.record_norms(4, per_leaf=True),
}
MADE = registry.TRANSFORMATIONS | MORE


def tree(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}


@pytest.mark.parametrize("name", MADE)
def test_eight_devices_give_what_one_gives(name):
    if compat.VERSION < (0, 8) and name in ("record_norms", "per_leaf"):
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
