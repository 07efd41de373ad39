"""Every public transformation, one line each: the rows of the conformance suite."""

import optax

import gradclip_jax as gcx

SGD = optax.sgd(0.5)

# Name to a maker. Wrappers are given an inner optimizer, `u_clip` a clip.
TRANSFORMATIONS = {
    "clip_by_value": lambda: gcx.clip_by_value(0.5),
    "clip_by_global_norm": lambda: gcx.clip_by_global_norm(1.0),
    "clip_by_leaf_norm": lambda: gcx.clip_by_leaf_norm(1.0),
    "clip_by_group_norm": lambda: gcx.clip_by_group_norm(
        {"a": 1.0}, lambda tree: {key: "a" if key == "w" else "rest" for key in tree}
    ),
    "clip_by_block_rms": lambda: gcx.clip_by_block_rms(0.5),
    "adaptive_grad_clip": lambda: gcx.adaptive_grad_clip(0.1),
    "zero_large_norm": lambda: gcx.zero_large_norm(100.0),
    "agc": lambda: gcx.agc(),
    "autoclip": lambda: gcx.autoclip(window=8),
    "zclip": lambda: gcx.zclip(warmup_steps=2),
    "adagc": lambda: gcx.adagc(warmup_steps=2),
    "quantile_clip": lambda: gcx.quantile_clip(),
    "u_clip": lambda: gcx.u_clip(gcx.clip_by_global_norm(1.0)),
    "acclip": lambda: gcx.acclip(),
    "spam_clip": lambda: gcx.spam_clip(warmup_steps=2),
    "stable_spam_clip": lambda: gcx.stable_spam_clip(),
    "stable_adamw": lambda: gcx.stable_adamw(0.1),
    "accumulate_gradients": lambda: gcx.accumulate_gradients(SGD, 2),
    "skip_nonfinite": lambda: gcx.skip_nonfinite(SGD),
    "skip_large_norm": lambda: gcx.skip_large_norm(SGD, 100.0),
    "record_norms": lambda: gcx.record_norms(4),
}

# What the invariants say differently of some, and why.
NORM_CLIPS = {"clip_by_global_norm", "clip_by_leaf_norm", "clip_by_block_rms", "zero_large_norm"}
OPTIMIZERS = {"accumulate_gradients", "skip_nonfinite", "skip_large_norm", "stable_adamw"}
WRAPPERS = {"accumulate_gradients", "skip_nonfinite", "skip_large_norm", "u_clip"}
# Moments per element: the gradient at a spot may differ from device to device.
ALWAYS_SCALES = {"acclip", "stable_spam_clip"} | OPTIMIZERS
