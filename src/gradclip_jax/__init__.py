"""Clipping, accumulation, guarding and monitoring of gradients for JAX and Optax.

The gradient transformations of this package can be combined with those of Optax:

    import optax, gradclip_jax as gcx
    tx = optax.chain(gcx.clip_by_global_norm(1.0), optax.adamw(1e-3))

| task | names |
| --- | --- |
| clip by norm | `clip_by_global_norm`, `clip_by_leaf_norm`, `clip_by_group_norm` |
| clip by root mean square | `clip_by_block_rms` |
| clip by value | `clip_by_value` |
| clip relative to the parameters | `adaptive_grad_clip` |
| clip with an adaptive threshold | `autoclip`, `zclip`, `adagc` |
| combine granularity, threshold and reaction | `clip_by_norm`, `granularities`, `thresholds` |
| compute norms | `global_norm`, `leaf_norms`, `combine_norms` |
| clip without a transformation | `clip_grad_norm`, `clip_grad_value` |
| clip inside a model | `clip_cotangent`, `qk_clip` |
| clip inside the optimizer | `stable_adamw` |
| accumulate gradients | `accumulate_gradients`, `apply_gradients`, `microbatched_value_and_grad` |
| control an accumulation | `flush`, `has_updated`, `reset_accumulation` |
| skip bad steps | `skip_nonfinite`, `skip_spikes`, `skip_if`, `SkipRule`, `raise_if_failed` |
| train in float16 | `dynamic_loss_scale`, `scale_loss` |
| bfloat16 parameters without a float32 copy | `round_stochastically` |
| per-example gradients | `per_example` |
| monitor a run | `watch`, `Monitor`, `metrics`, `incidents`, `last_row`, `diagnostics`, `taps` |
| change the optimizer during a run | `convert_state` |
"""

from ._version import __version__ as __version__

from . import diagnostics as diagnostics, granularities as granularities
from . import per_example as per_example, taps as taps, thresholds as thresholds

from .norms._norm import combine_norms as combine_norms, global_norm as global_norm
from .norms._norm import leaf_norms as leaf_norms
from .clipping._clip import clip_grad_norm as clip_grad_norm
from .clipping._in_model import clip_cotangent as clip_cotangent, qk_clip as qk_clip
from .clipping._transform import clip_by_block_rms as clip_by_block_rms
from .clipping._transform import clip_by_global_norm as clip_by_global_norm
from .clipping._transform import clip_by_group_norm as clip_by_group_norm
from .clipping._transform import clip_by_leaf_norm as clip_by_leaf_norm
from .clipping._by_value import clip_by_value as clip_by_value, clip_grad_value as clip_grad_value
from .clipping._transform import clip_by_norm as clip_by_norm
from .clipping._transform import adagc as adagc, adaptive_grad_clip as adaptive_grad_clip
from .clipping._transform import autoclip as autoclip, zclip as zclip

from .accumulation._transform import accumulate_gradients as accumulate_gradients
from .accumulation._microbatch import microbatched_value_and_grad as microbatched_value_and_grad
from .accumulation._window import flush as flush, reset_accumulation as reset_accumulation
from .wrappers._state import has_updated as has_updated
from .wrappers._update import apply_gradients as apply_gradients
from ._metrics import metrics as metrics
from ._rounding import round_stochastically as round_stochastically
from ._stable_adamw import stable_adamw as stable_adamw

from .guarding._skip_nonfinite import skip_nonfinite as skip_nonfinite
from .guarding._skip_spikes import skip_spikes as skip_spikes
from .guarding._skip_if import SkipRule as SkipRule, skip_if as skip_if
from .guarding._raise_if_failed import raise_if_failed as raise_if_failed
from .guarding._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from .guarding._loss_scale import scale_loss as scale_loss

from .monitoring._watch import last_row as last_row, watch as watch
from .monitoring.host._monitor import Monitor as Monitor, incidents as incidents

from .conversion._convert_state import convert_state as convert_state
