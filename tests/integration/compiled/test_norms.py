"""The squares of a norm are those of scaled elements, whatever produced the gradient."""

import re

import jax
import jax.numpy as jnp
import pytest
from benchmarks.compiled import _devices

import gradclip_jax as gcx

PLATFORM = _devices.available()

PRODUCERS = {
    "itself": lambda x: x,
    "negation": lambda x: -x,
    "negative scale": lambda x: -0.5 * x,
    "broadcast of a scalar": lambda x: jnp.broadcast_to(-x[0, 0], x.shape),
    "gather": lambda x: x[jnp.arange(256) // 2],
    "dot": lambda x: -(x @ x),
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_elements_are_scaled_before_they_are_squared(name):
    def norm(x):
        return gcx.global_norm(PRODUCERS[name](x))

    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    (x,) = _devices.placed((shape,), _devices.one_device(PLATFORM))
    lowered = jax.jit(norm).trace(x).lower(lowering_platforms=(PLATFORM,))
    text = lowered.compile().as_text()
    squared = re.findall(r"multiply\((%[\w.\-]+), \1\)", text)
    assert squared
    for operand in squared:
        made = re.search(rf"{re.escape(operand)} = \S+ (\w+)\(", text)
        assert made and made[1] == "multiply", text
