"""MaxText: `microbatched_value_and_grad` in the place of its loop over micro-batches."""

import jax
import jax.numpy as jnp
from flax import nnx

import gradclip_jax as gcx


def gradient_accumulation_loss_and_grad(
    loss_fn, config, model, params, params_shardings, data, dropout_rng
):
    graphdef, params, keys, rest = nnx.split(model, nnx.Param, nnx.RngKey, ...)
    if config.shard_optimizer_over_data:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def mean_loss(params, data, keys, rest):
        local = nnx.merge(graphdef, params, keys, rest, copy=True)
        loss, aux = loss_fn(local, config, data, None, None, is_train=True)
        weight = aux["total_weights"]
        if not config.use_tunix_gradient_accumulation:
            loss = loss / jnp.maximum(weight, 1)
        return loss, (weight, (aux, nnx.state(local, nnx.RngCount)))

    value_and_grad = gcx.microbatched_value_and_grad(
        mean_loss, config.gradient_accumulation_steps, rng_argnums=2, has_weight=True,
        has_aux=True, aux_reduction=("sum", "last"),
    )
    (loss, (_, (aux, counts))), grads = value_and_grad(params, data, keys, rest)
    nnx.update(model, counts)
    return loss, aux, grads


REPLACES = {
    "maxtext.utils.gradient_accumulation:gradient_accumulation_loss_and_grad": gradient_accumulation_loss_and_grad
}
TESTS = ["tests/unit/gradient_accumulation_nnx_test.py"]
PASSED = 6
DIFFERENCES = {}
