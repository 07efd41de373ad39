"""axlearn: `clip_grad_norm` in the place of its `clip_by_global_norm`."""

import jax
import jax.numpy as jnp
import optax
from axlearn.common.module import current_context
from axlearn.common.optimizer_base import PartitionedGradientTransformation
from measures import after_a_nan

import gradclip_jax as gcx

LARGEST = float(jnp.finfo(jnp.float32).max)


def clip_by_global_norm(max_norm=None, *, drop_norm=None, eps=1e-8):
    def update(grads, state, params=None):
        clipped, norm = gcx.clip_grad_norm(grads, max_norm or LARGEST)
        if context := current_context():
            context.add_summary("gradient_norm", norm)
            if max_norm:
                context.add_summary("gradient_scale", jnp.minimum(1, max_norm / norm))
        is_kept = norm < (drop_norm or jnp.inf)
        return jax.tree.map(lambda x: jnp.where(is_kept, x, 0), clipped), state

    init = partition = lambda params: optax.EmptyState()
    return PartitionedGradientTransformation(init, update, partition)


REPLACES = {"axlearn.common.optimizers:clip_by_global_norm": clip_by_global_norm}
TESTS = [
    "axlearn/common/optimizers_test.py",
    "axlearn/common/learner_test.py",
    "-k",
    "gradient_clipping or LearnerTest",
]
PASSED = 43
DIFFERENCES = {}


def gain(part):
    clip = part(1.0, drop_norm=100.0)
    tx = optax.chain(optax.GradientTransformation(clip.init, clip.update), optax.sgd(1.0))
    return after_a_nan(tx)
