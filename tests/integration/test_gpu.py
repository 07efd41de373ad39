"""What must hold on a GPU as on a CPU. Only the tests that measure memory need a GPU.

`benchmarks.steps.gpu` runs this file first, without the conftest and the plugins of the suite.
"""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradclip_jax as gcx
import oracles

# On a CPU other tests prove the same; here they show that this file is ready.
pytestmark = pytest.mark.slow

# Norms in each dtype, at both ends of the range: the largest and the smallest magnitude.
ENDS = {"float16": (3e4, 1e-6), "bfloat16": (5e16, 4e-18), "float32": (5e16, 4e-18)}
SIZES = (1, 1_000, 100_000)
PARAMS = {"w": (256, 256), "b": (256,)}


def ones():
    return {name: jnp.ones(shape) for name, shape in PARAMS.items()}


@pytest.mark.parametrize("dtype", ENDS)
def test_norms_are_right_at_both_ends_of_the_range(dtype):
    rng = np.random.default_rng(0)
    norms = jax.jit(lambda tree: [gcx.global_norm(tree), *gcx.leaf_norms(tree)])
    for end in ENDS[dtype]:
        tree = [jnp.asarray(end * rng.uniform(0.5, 1, n), dtype) for n in SIZES]
        exact = [oracles.global_norm(leaves) for leaves in (tree, *([x] for x in tree))]
        np.testing.assert_allclose(norms(tree), exact, rtol=1e-6)


def steps(tx):
    """A jitted step with donated parameters and state."""

    def step(params, state, grads):
        return gcx.apply_gradients(tx, grads, state, params)

    return jax.jit(step, donate_argnums=(0, 1))


WRAPPERS = {
    "guard": lambda: gcx.skip_nonfinite(optax.adam(0.1)),
    "guard of the step": lambda: gcx.skip_nonfinite(optax.adam(0.1), check="step"),
    "both": lambda: gcx.skip_nonfinite(gcx.accumulate_gradients(optax.adam(0.1), 4)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_skipped_step_changes_nothing_and_frees_what_was_donated(name):
    tx = WRAPPERS[name]()
    step = steps(tx)
    params, state = step(ones(), tx.init(ones()), ones())
    before = jax.tree.map(np.array, (params, state.inner_state))
    bad = jax.tree.map(lambda x: x * jnp.nan, ones())
    after, new_state = step(params, state, bad)
    jax.tree.map(np.testing.assert_array_equal, (after, new_state.inner_state), before)
    assert int(gcx.metrics(new_state)["skipped_nonfinite"]) == 1
    arrays = [x for x in jax.tree.leaves((params, state.inner_state)) if x.ndim]
    assert all(x.is_deleted() for x in arrays)


def test_a_step_that_accumulates_changes_only_the_accumulator():
    tx = gcx.accumulate_gradients(optax.adam(0.1), 4)
    params, state = ones(), tx.init(ones())
    before = jax.tree.map(np.array, (params, state.inner_state))
    params, state = steps(tx)(params, state, ones())
    jax.tree.map(np.testing.assert_array_equal, (params, state.inner_state), before)
    jax.tree.map(np.testing.assert_array_equal, state.accumulation.gradient.total, ones())


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WRAPPERS, "accumulation"])
def test_a_step_runs_in_place(name):
    """Skipped and held steps are part of the same program, which reserves no copy of a tree.

    But XLA may copy the carry of `lax.cond` in a guarded accumulation: three trees and the sum.
    """
    tx = WRAPPERS.get(name, lambda: gcx.accumulate_gradients(optax.adam(0.1), 4))()
    args = ones(), tx.init(ones()), ones()
    memory = steps(tx).lower(*args).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(ones()))
    assert memory.temp_size_in_bytes <= (4.1 if name == "both" else 0.1) * size + 65536
    assert memory.alias_size_in_bytes >= 3 * size  # parameters and both moments


def transfers(step, args, folder):
    """Number of copies to the host while five steps run, in a trace of the profiler."""
    params, state, grads = args
    params, state = jax.block_until_ready(step(params, state, grads))  # compiles
    with jax.profiler.trace(folder):
        for _ in range(5):
            params, state = step(params, state, grads)
        jax.block_until_ready(params)
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        names = [x.get("name", "") for x in json.load(file)["traceEvents"]]
    assert names
    return sum("MemcpyD2H" in name or "MemcpyDtoH" in name for name in names)


def test_a_guarded_step_does_not_wait_for_the_device(tmp_path):
    guarded, plain = gcx.skip_nonfinite(optax.adam(0.1)), optax.adam(0.1)
    counts = [
        transfers(steps(tx), (ones(), tx.init(ones()), ones()), tmp_path / str(i))
        for i, tx in enumerate((guarded, plain))
    ]
    assert counts[0] == counts[1]
