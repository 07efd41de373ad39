"""Suggested replacements for misspelled names and names from other libraries."""

import difflib
import sys
from typing import Any, Final, NoReturn

_THEIRS: Final = {
    "accumulate_gradients": "MultiSteps MultiStepsState accumulate accumulate_grad_batches "
    "gradient_accumulation_steps",
    "adaptive_grad_clip": "adaptive_gradient_clip agc unitwise_clip",
    "apply_gradients": "apply_updates",
    "clip": "clipvalue",
    "clip_by_global_norm": "max_grad_norm global_clipnorm",
    "clip_by_leaf_norm": "clipnorm",
    "clip_grad_norm": "clip_grad_norm_ clip_gradients clip_grads clip_grads_with_norm_",
    "clip_grad_value": "clip_grad_value_",
    "dynamic_loss_scale": "GradScaler DynamicLossScale DynamicScale LossScaleOptimizer",
    "global_norm": "tree_l2_norm tree_norm get_total_norm",
    "microbatched_value_and_grad": "microbatch",
    "per_example": "per_example_global_norm_clip per_example_layer_norm_clip",
    "per_example.noisy_mean": "differentially_private_aggregate",
    "record_norms": "monitor snapshot",
    "skip_large_norm": "skip_large_updates",
    "skip_nonfinite": "apply_if_finite conditionally_mask conditionally_transform "
    "skip_not_finite zero_nans",
}
"""Names of this package, and the corresponding names in other libraries."""

ELSEWHERE: Final = {name: ours for ours, names in _THEIRS.items() for name in names.split()}


def __getattr__(name: str) -> NoReturn:
    """Raise an `AttributeError` that suggests a similar name."""
    package = sys.modules[__package__ or ""]
    if name.startswith("_"):  # `copy`, `inspect` and other tools look up such names
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
    names: dict[str, str] = {}
    for public in package.__all__:
        inside: Any = getattr(getattr(package, public), "__all__", ())
        names |= {public: public} | {x: f"{public}.{x}" for x in inside}
    if name in names or name in ELSEWHERE:
        hint = f"Use `gcx.{names.get(name) or ELSEWHERE[name]}` instead."
    else:
        near = {x.lower(): path for x, path in names.items()}
        close = difflib.get_close_matches(name.lower(), near, n=2, cutoff=0.6)
        meant = " or ".join(f"`gcx.{near[x]}`" for x in close)
        hint = f"Did you mean {meant}?" if close else "See `help(gradclip_jax)` for all names."
    raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}. {hint}")
