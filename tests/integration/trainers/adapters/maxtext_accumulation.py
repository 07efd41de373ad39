"""MaxText: `microbatched_value_and_grad` in the place of its loop over micro-batches."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from maxtext.common.common_types import ShardMode
from measures import GRADS, error_of_mean

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


def gain(part):
    options = {"use_tunix_gradient_accumulation": False, "debug_sharding": False}
    options |= {"gradient_accumulation_steps": len(GRADS), "shard_mode": ShardMode.AUTO}
    config = SimpleNamespace(shard_optimizer_over_data=True, **options)
    model = nnx.Linear(1_000, 1, use_bias=False, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    sharding = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: sharding, nnx.state(model, nnx.Param))

    def loss(model, config, data, key, params, is_train):
        aux = dict.fromkeys(["moe_lb_loss", "indexer_loss", "mtp_loss"], jnp.float32(0))
        total = jnp.sum(jnp.float32(model(data)))
        return total, aux | {"xent_sum": total, "total_weights": jnp.float32(len(data))}

    _, _, grads = part(loss, config, model, None, shardings, GRADS, None)
    return error_of_mean(jax.tree.leaves(grads)[0])
