"""Every public transformation, one line each: the rows of the conformance suite."""

import optax

import gradclip_jax as gcx

SGD = optax.sgd(0.5)

# Name to a maker, which is told the mapped axes where types do not tell them. Wrappers are given
# an inner optimizer, `u_clip` a clip.
TRANSFORMATIONS = {
    "clip": lambda **_: gcx.clip(0.5),
    "clip_by_global_norm": lambda **axes: gcx.clip_by_global_norm(1.0, **axes),
    "clip_by_leaf_norm": lambda **axes: gcx.clip_by_leaf_norm(1.0, **axes),
    "clip_by_group_norm": lambda **axes: gcx.clip_by_group_norm(
        {"a": 1.0}, lambda tree: {key: "a" if key == "w" else "rest" for key in tree}, **axes
    ),
    "clip_by_block_rms": lambda **axes: gcx.clip_by_block_rms(0.5, **axes),
    "adaptive_grad_clip": lambda **_: gcx.adaptive_grad_clip(0.1),
    "zero_large_norm": lambda **axes: gcx.zero_large_norm(100.0, **axes),
    "autoclip": lambda **axes: gcx.autoclip(window=8, **axes),
    "zclip": lambda **axes: gcx.zclip(warmup_steps=2, **axes),
    "adagc": lambda **axes: gcx.adagc(warmup_steps=2, **axes),
    "quantile_clip": lambda **axes: gcx.quantile_clip(**axes),
    "u_clip": lambda **axes: gcx.u_clip(gcx.clip_by_global_norm(1.0, **axes)),
    "acclip": lambda **_: gcx.acclip(),
    "spam_clip": lambda **_: gcx.spam_clip(warmup_steps=2),
    "stable_spam_clip": lambda **axes: gcx.stable_spam_clip(**axes),
    "stable_adamw": lambda **axes: gcx.stable_adamw(0.1, **axes),
    "accumulate_gradients": lambda **_: gcx.accumulate_gradients(SGD, 2),
    "skip_nonfinite": lambda **axes: gcx.skip_nonfinite(SGD, **axes),
    "skip_large_norm": lambda **axes: gcx.skip_large_norm(SGD, 100.0, **axes),
    "record_norms": lambda **axes: gcx.record_norms(4, **axes),
}

# What the invariants say differently of some, and why.
OPTIMIZERS = {"accumulate_gradients", "skip_nonfinite", "skip_large_norm", "stable_adamw"}
WRAPPERS = {"accumulate_gradients", "skip_nonfinite", "skip_large_norm", "u_clip"}
# Moments per element: the gradient at a spot may differ from device to device.
ALWAYS_SCALES = {"acclip", "stable_spam_clip"} | OPTIMIZERS
