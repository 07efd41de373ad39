"""Faults of XLA for GPUs and TPUs that the library works around: docs/compiler_faults.md.

The last test fails when a workaround is no longer needed.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.compiled import _devices
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx
import hlo

PLATFORM = _devices.available()
TOPOLOGY = {"cuda": "1x4x1", "tpu": "v5e:2x2"}[PLATFORM]

PARTS = 4
ROWS, WIDTH = 4096, 32  # of the embedding, more than any activation
OPTIONS = [{}, {"accumulator_dtype": jnp.bfloat16}, {"has_weight": True}]
# Of the embedding, on two chips by data and two by model.
CASES = list(zip([P(), P("model"), P(None, "model")], OPTIONS, strict=True))
if PLATFORM == "cuda":  # where it is not replicated, fusions compute with the number of the chip
    CASES = [(P(), options) for options in OPTIONS]


def loss(params, batch):
    ids, targets = batch
    hidden = jnp.tanh(params["embed"][ids] @ params["w"])
    return jnp.mean((hidden - targets[..., None]) ** 2)


def weighted_loss(params, batch):
    return loss(params, batch), jnp.sum(batch[0] > 0)


def ours(params, batch, **options):
    fun = weighted_loss if "has_weight" in options else loss
    return gcx.microbatched_value_and_grad(fun, PARTS, **options)(params, batch)[1]


def by_hand(params, batch):
    """The same sum as many write it."""

    def add(total, i):
        part = jax.tree.map(lambda x: x.reshape(-1, PARTS, *x.shape[1:])[:, i], batch)
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, params), jnp.arange(PARTS))[0]


def compiled(function, spec):
    mesh = Mesh(np.array(_devices.devices(PLATFORM, TOPOLOGY)).reshape(2, 2), ("data", "model"))

    def shape(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {
        "embed": shape((ROWS, WIDTH), jnp.float32, spec),
        "w": shape((WIDTH, 64), jnp.float32, P()),
    }
    rows = P("data")
    batch = shape((64, 16), jnp.int32, rows), shape((64, 16), jnp.float32, rows)
    out = jax.tree.map(lambda x: x.sharding, params)
    return _devices.compile_for(PLATFORM, function, params, batch, out_shardings=out).text


def reduced_in_loop(text):
    """The elements of the largest sum over chips for each micro-batch."""
    sizes, before = hlo.all_reduced(text), hlo.all_reduced(text, loops=False)
    for size in before:
        sizes.remove(size)
    return max(sizes, default=0)


def is_wrong(text):
    """Whether chips drop what they have added up so far, and sum over chips after the loop.

    XLA splits `scatter(total, ...)` over chips as `scatter(where(chip == 0, total, 0), ...)` and a sum
    over chips. That is right as long as both are in the loop.
    """
    by_chip = {"partition-id"}  # scalars that differ from chip to chip
    drops = PLATFORM == "cuda" and " partition-id(" in text
    for line in hlo.instructions(text):
        scalar = re.match(r"(?:ROOT )?(%[\w.\-]+) = (\w+)\[1?\]\S* (.*)", line)
        if scalar and by_chip & set(re.findall(r"%?[\w.\-]+", scalar[3])):
            by_chip.add(scalar[1])
            drops |= scalar[2] == "pred"
    return drops and reduced_in_loop(text) < ROWS * WIDTH // 2


@pytest.mark.parametrize(("spec", "options"), CASES, ids=str)
def test_gradient_of_an_embedding_is_summed_over_chips_once_and_right(spec, options):
    text = compiled(lambda params, batch: ours(params, batch, **options), spec)
    assert not is_wrong(text)
    assert reduced_in_loop(text) < ROWS * WIDTH // 2  # nothing of the size of a shard


def test_xla_still_merges_the_scatter_of_an_embedding_with_the_sum():
    """Where it fails, `summand` of _devices.py can go: XLA has learned it."""
    text = compiled(by_hand, P())
    if jax.__version_info__ < (0, 12):  # libtpu 0.0.42.1 and 0.0.48.1; mended in 0.0.50.1
        assert is_wrong(text)
    else:
        assert reduced_in_loop(text) >= ROWS * WIDTH  # right, and for every micro-batch
