"""The code for a GPU and for a TPU, run on a CPU, returns the same values as the code for a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradclip_jax as gcx
from trees import normal

OPTIMIZERS = {
    "watch": gcx.watch(
        gcx.clip_by_global_norm(1.0),
        granularity=gcx.granularities.layer({"stack": 1, "w": 0, "b": 0, "s": 0}),
    ),
    "clip": gcx.clip_by_leaf_norm(1.0),
    "guard": gcx.skip_nonfinite(gcx.adaptive_grad_clip(0.01)),
}


def _tree(seed: int) -> dict[str, jax.Array]:
    shapes = {"stack": (3, 8, 80), "w": (256, 70), "s": ()}
    tree = {name: normal(shape, seed=seed) for name, shape in shapes.items()}
    return tree | {"b": normal(7, jnp.bfloat16, seed=seed)}


def _outputs(tx: Any) -> list[Any]:
    jax.clear_caches()
    params, grads = _tree(0), _tree(1)

    @jax.jit
    def step(element: float) -> Any:
        changed = grads | {"stack": grads["stack"].at[1, 2, 3].set(element)}
        updates, state = tx.update(changed, tx.init(params), params)
        return updates, gcx.metrics(state)

    return [step(element) for element in (1.0, 1e30, np.nan)]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_variants_agree(name: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, used = _outputs(OPTIMIZERS[name]), list[Any]()

    def chosen(*args: Any, default: Any, **variants: Any) -> Any:
        variant = variants.get(platform, default)
        used.append(variant is not variants.get("cpu", default))
        return variant(*args)

    monkeypatch.setattr(lax, "platform_dependent", chosen)
    found = _outputs(OPTIMIZERS[name])
    jax.clear_caches()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected)
    assert any(used)
