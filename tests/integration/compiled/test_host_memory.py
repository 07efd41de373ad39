"""The memory that the recipe for optimizer state in host memory states, compiled for a TPU."""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from benchmarks.compiled import _devices
from jax.tree_util import keystr

import gradclip_jax as gcx
from files import ROOT

pytestmark = pytest.mark.skipif(_devices.available() != "tpu", reason="needs the compiler of TPUs")
PARAMS = {f"w{i}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for i in range(4)}
RECIPE = (ROOT / "docs/recipes/host_memory.md").read_text()
wrapper = {}
with contextlib.redirect_stdout(io.StringIO()):
    exec(re.search(r"```python\n(.*?)\noptimizer =", RECIPE, re.S)[1], wrapper)


def clipped(adamw):
    return optax.chain(gcx.clip_by_global_norm(1.0), adamw)


HOST = clipped(wrapper["in_host_memory"](optax.adamw(1e-2)))
TABLE = {
    "clip and AdamW": clipped(optax.adamw(1e-2)),
    "the same, with the wrapper": HOST,
    "with an accumulation and the wrapper": gcx.accumulate_gradients(HOST, every=4),
    "with a guard and the wrapper": gcx.skip_nonfinite(HOST),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_has_the_memory_of_the_compiled_step(name):
    where, on_host = _devices.one_device("tpu"), jax.memory.Space.Host
    state = jax.eval_shape(TABLE[name].init, PARAMS)

    def moments(change, tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: change(x) if re.search(r"\.[mn]u\[", keystr(path)) else x, tree
        )

    def step(grads, state, params):
        if name != "clip and AdamW":  # tell the tracer what the shapes do not
            state = moments(lambda x: jax.device_put(x, on_host), state)
        return TABLE[name].update(grads, state, params)

    params, state = _devices.placed((PARAMS, state), where)
    if name != "clip and AdamW":
        kind = where.with_memory_kind("pinned_host")
        state = moments(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=kind), state)
    step = jax.jit(step, donate_argnums=1).trace(params, state, params)
    memory = step.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    size = sum(x.size * 4 for x in jax.tree.leaves(PARAMS))
    found = [
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
    ]
    row = re.search(rf"\| {name} \| (.*) \|", (ROOT / "docs/benchmark_results.md").read_text())
    assert [round(2 * x / size) / 2 for x in found] == [float(x) for x in row[1].split(" | ")]
