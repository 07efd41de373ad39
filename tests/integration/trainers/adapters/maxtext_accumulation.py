"""MaxText: `microbatched_value_and_grad` in the place of its loop over micro-batches."""

import jax
import jax.numpy as jnp
from flax import nnx

import gradclip_jax as gcx


def gradient_accumulation_loss_and_grad(
    fun, config, model, params, params_shardings, data, dropout_rng
):
    graphdef, params, keys, rest = nnx.split(model, nnx.Param, nnx.RngKey, ...)
    if config.shard_optimizer_over_data:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    every = config.gradient_accumulation_steps

    def mean_loss(params, data, key):
        own = jax.tree.map(lambda k: jax.random.fold_in(k, jax.random.bits(key)), keys)
        local = nnx.merge(graphdef, params, own, rest, copy=True)
        loss, aux = fun(local, config, data, None, None, is_train=True)
        weight = aux["total_weights"]
        loss = loss if config.use_tunix_gradient_accumulation else loss / jnp.maximum(weight, 1)
        return loss, (weight, (aux, nnx.state(local, nnx.RngCount)))

    options = {"has_weight": True, "has_aux": True, "aux_reduction": ("sum", "last")}
    value_and_grad = gcx.microbatched_value_and_grad(mean_loss, every, rng_argnums=2, **options)
    (loss, (_, (aux, counts))), grads = value_and_grad(params, data, jax.random.key(0))
    nnx.update(model, counts)
    return loss, aux, grads


REPLACES = {
    "maxtext.utils.gradient_accumulation:gradient_accumulation_loss_and_grad": gradient_accumulation_loss_and_grad
}
TESTS = ["tests/unit/gradient_accumulation_nnx_test.py"]
PASSED = 6
DIFFERENCES = {}
