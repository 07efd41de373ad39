"""Clipping, accumulation, guarding and monitoring of gradients for JAX and Optax.

A gradient transformation of this package goes where one of Optax goes:

    import optax, gradclip_jax as gcx
    tx = optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-3))

Clips: `clip_by_global_norm`, `clip_by_leaf_norm`, `clip_by_group_norm`, `clip_by_block_rms`,
`adaptive_grad_clip`, `zero_large_norm`, `clip_by_value`, which Optax calls `clip`; `clip_by_norm`
is the grid they are points of.

Clips with a threshold that finds itself: `autoclip`, `zclip`, `adagc`, `quantile_clip`; any clip
with a rule of `thresholds`. Methods without broad adoption: `contrib`.

Functions of a gradient: `global_norm`, `leaf_norms`, `combine_norms`, `clip_grad_norm`,
`clip_grad_value`. Inside the model: `clip_cotangent`, `qk_clip`, `qk_clip_mla`.

Accumulation: `accumulate_gradients` with `apply_gradients`, `flush`, `has_updated`,
`reset_accumulation`, `accumulated_gradients`; in one call `microbatched_value_and_grad`.
Parameters in bfloat16 without a float32 copy: `round_stochastically`.

Guards: `skip_nonfinite`, `skip_large_norm`, `skip_spikes`; float16: `dynamic_loss_scale`,
`scale_loss`.

By example: `per_example`, clipped gradients and norms without writing them out.

To see: `watch`, `incidents`, `metrics`, `record_norms`; on the host, between steps, `diagnostics`;
activations and their cotangents, `taps`.

In the middle of a run: `convert_state`. Calls as plain values: `configs`. Of what a norm is
taken: `granularities`.
"""

import typing as _typing

from ._version import __version__ as __version__
from . import configs, contrib, diagnostics, granularities, per_example, taps, thresholds

from .clipping._norm import global_norm, leaf_norms, combine_norms
from .clipping._clip import clip_grad_norm
from .clipping._cotangent import clip_cotangent
from .clipping._qk_clip import qk_clip, qk_clip_mla
from .clipping._transform import clip_by_global_norm, clip_by_leaf_norm, clip_by_group_norm
from .clipping._transform import (
    clip_by_norm,
    clip_by_block_rms,
    zero_large_norm,
    clip_by_value,
    clip,
    clip_grad_value,
)

from .adaptive._transform import adaptive_grad_clip, autoclip, zclip, adagc, quantile_clip

from .accumulation._transform import accumulate_gradients
from .accumulation._microbatch import microbatched_value_and_grad
from .accumulation._state import flush, reset_accumulation, accumulated_gradients
from .gates._execute import apply_gradients
from ._states import has_updated
from ._rounding import round_stochastically

from .guarding._skip_nonfinite import skip_nonfinite
from .guarding._skip_spikes import skip_large_norm, skip_spikes
from .guarding._loss_scale import dynamic_loss_scale, scale_loss

from .monitoring._metrics import metrics
from .monitoring._watch import watch
from .monitoring._report import incidents
from .monitoring._record import record_norms

from ._convert import convert_state

if not _typing.TYPE_CHECKING:  # a type checker would take every name for one of ours
    from ._names import __getattr__ as __getattr__

__all__ = [
    "configs",
    "contrib",
    "diagnostics",
    "granularities",
    "per_example",
    "taps",
    "thresholds",
    "global_norm",
    "leaf_norms",
    "combine_norms",
    "clip_grad_norm",
    "clip_grad_value",
    "clip_cotangent",
    "qk_clip",
    "qk_clip_mla",
    "clip_by_norm",
    "clip_by_global_norm",
    "clip_by_leaf_norm",
    "clip_by_group_norm",
    "clip_by_block_rms",
    "adaptive_grad_clip",
    "zero_large_norm",
    "clip_by_value",
    "clip",
    "autoclip",
    "zclip",
    "adagc",
    "quantile_clip",
    "accumulate_gradients",
    "apply_gradients",
    "round_stochastically",
    "microbatched_value_and_grad",
    "flush",
    "reset_accumulation",
    "has_updated",
    "accumulated_gradients",
    "skip_nonfinite",
    "skip_large_norm",
    "skip_spikes",
    "dynamic_loss_scale",
    "scale_loss",
    "metrics",
    "watch",
    "incidents",
    "record_norms",
    "convert_state",
]
