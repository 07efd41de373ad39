"""The states of all transformations: their counters do not wrap, and checkpoints can hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import TRANSFORMATIONS

PARAMS = {"a": jnp.ones((8, 4)), "b": jnp.ones(4)}
LAST = np.iinfo(np.int32).max


# The counts of the two left out are bounded by their windows; they have tests of their own.
@pytest.mark.parametrize(
    "name", sorted(TRANSFORMATIONS.keys() - {"accumulate_gradients", "record_norms"})
)
def test_no_counter_wraps(name):
    tx = TRANSFORMATIONS[name]()
    state = tx.init(PARAMS)
    full = jax.tree.map(lambda x: jnp.full_like(x, LAST) if x.dtype == jnp.int32 else x, state)
    _, after = jax.jit(tx.update)(PARAMS, full, PARAMS)
    for path, x in jax.tree_util.tree_leaves_with_path(after):
        assert jnp.all(x >= 0), path


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_no_leaf_of_a_first_state_is_a_bool(name):
    # Checkpoints by tensorstore on several devices restore none.
    state = TRANSFORMATIONS[name]().init(PARAMS)
    assert not [x for x in jax.tree.leaves(state) if jnp.asarray(x).dtype == jnp.bool_]
