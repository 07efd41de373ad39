"""What a name that others have is called here."""

import difflib
import sys
from typing import Any, Final, NoReturn

from ._checks import error_message

ELSEWHERE: Final[dict[str, str]] = {
    # Optax
    "MultiSteps": "accumulate_gradients",
    "MultiStepsState": "accumulate_gradients",
    "adaptive_gradient_clip": "adaptive_grad_clip",
    "agc": "adaptive_grad_clip",
    "apply_if_finite": "skip_nonfinite",
    "apply_updates": "apply_gradients",
    "conditionally_mask": "skip_nonfinite",
    "conditionally_transform": "skip_nonfinite",
    "differentially_private_aggregate": "per_example.noisy_mean",
    "microbatch": "microbatched_value_and_grad",
    "monitor": "record_norms",
    "per_example_global_norm_clip": "per_example",
    "per_example_layer_norm_clip": "per_example",
    "skip_large_updates": "skip_large_norm",
    "skip_not_finite": "skip_nonfinite",
    "snapshot": "record_norms",
    "tree_l2_norm": "global_norm",
    "tree_norm": "global_norm",
    "unitwise_clip": "adaptive_grad_clip",
    "zero_nans": "skip_nonfinite",
    # PyTorch, Lightning, Hugging Face
    "GradScaler": "dynamic_loss_scale",
    "accumulate": "accumulate_gradients",
    "accumulate_grad_batches": "accumulate_gradients",
    "clip_grad_norm_": "clip_grad_norm",
    "clip_grad_value_": "clip_grad_value",
    "clip_gradients": "clip_grad_norm",
    "clip_grads": "clip_grad_norm",
    "clip_grads_with_norm_": "clip_grad_norm",
    "get_total_norm": "global_norm",
    "gradient_accumulation_steps": "accumulate_gradients",
    "max_grad_norm": "clip_by_global_norm",
    # Flax, Haiku, JMP, Keras, TensorFlow
    "DynamicLossScale": "dynamic_loss_scale",
    "DynamicScale": "dynamic_loss_scale",
    "LossScaleOptimizer": "dynamic_loss_scale",
    "clipnorm": "clip_by_leaf_norm",
    "clipvalue": "clip",
    "global_clipnorm": "clip_by_global_norm",
}


def __getattr__(name: str) -> NoReturn:
    """Says what a name is called here, or which name is meant."""
    package = sys.modules[__package__ or ""]
    if name.startswith("_"):  # asked for by `copy`, `inspect` and the like, and never shown
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
    names: dict[str, str] = {}
    for public in package.__all__:
        inside: Any = getattr(getattr(package, public), "__all__", ())
        names |= {public: public} | {x: f"{public}.{x}" for x in inside}
    if name in names or name in ELSEWHERE:
        hint = f"It is called `gcx.{names.get(name) or ELSEWHERE[name]}` here."
    else:
        near = {x.lower(): path for x, path in names.items()}
        close = difflib.get_close_matches(name.lower(), near, n=2, cutoff=0.6)
        meant = " or ".join(f"`gcx.{near[x]}`" for x in close)
        hint = f"Did you mean {meant}?" if close else "`help(gradclip_jax)` lists them."
    raise AttributeError(
        error_message(package.__name__, "name", "one of its public names", repr(name), hint)
    )
