"""Clipping, accumulation, guarding and monitoring of gradients for JAX and Optax."""

from . import granularities as granularities
from ._version import __version__ as __version__
from . import thresholds as thresholds
from ._config import TransformConfig as TransformConfig
from ._convert import convert_state as convert_state
from ._run_if import apply_gradients as apply_gradients
from ._config import AccumulationConfig as AccumulationConfig
from .accumulation._microbatch import microbatched_value_and_grad as microbatched_value_and_grad
from .accumulation._state import AccumulationStats as AccumulationStats
from .accumulation._transform import accumulate_gradients as accumulate_gradients
from .accumulation._state import accumulated_gradients as accumulated_gradients
from .accumulation._state import accumulation_stats as accumulation_stats
from .accumulation._state import flush as flush
from .accumulation._state import has_updated as has_updated
from .accumulation._state import reset_accumulation as reset_accumulation
from .adaptive._u_clip import u_clip as u_clip
from .adaptive._stable_spam_clip import stable_spam_clip as stable_spam_clip
from .adaptive._acclip import acclip as acclip
from .adaptive._spam_clip import spam_clip as spam_clip
from .adaptive._stable_adamw import stable_adamw as stable_adamw
from .adaptive._transform import adagc as adagc
from .adaptive._transform import autoclip as autoclip
from .adaptive._transform import quantile_clip as quantile_clip
from .adaptive._transform import zclip as zclip
from .clipping._norm import global_norm as global_norm
from .clipping._norm import leaf_norms as leaf_norms
from .clipping._pure import clip_grad_norm as clip_grad_norm
from .clipping._clamp import clip_grad_value as clip_grad_value
from .clipping._clip import clip_by_norm as clip_by_norm
from .adaptive._transform import adaptive_grad_clip as adaptive_grad_clip
from .clipping._transform import clip_by_block_rms as clip_by_block_rms
from .clipping._transform import clip_by_global_norm as clip_by_global_norm
from .clipping._transform import clip_by_group_norm as clip_by_group_norm
from .clipping._transform import clip_by_leaf_norm as clip_by_leaf_norm
from .clipping._transform import clip as clip
from .clipping._transform import zero_large_norm as zero_large_norm
from .guarding._skip_nonfinite import skip_nonfinite as skip_nonfinite
from .guarding._skip_spikes import skip_large_norm as skip_large_norm
from .guarding._skip_spikes import skip_spikes as skip_spikes
from .monitoring._measure import nonfinite_leaves as nonfinite_leaves
from .monitoring._measure import suggest_max_norm as suggest_max_norm
from .monitoring._metrics import metrics as metrics
from .monitoring._record import norm_history as norm_history
from .monitoring._record import record_norms as record_norms

__all__ = [
    "acclip",
    "accumulate_gradients",
    "accumulated_gradients",
    "accumulation_stats",
    "AccumulationConfig",
    "AccumulationStats",
    "adagc",
    "adaptive_grad_clip",
    "apply_gradients",
    "autoclip",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_leaf_norm",
    "clip_by_norm",
    "clip_grad_norm",
    "clip_grad_value",
    "flush",
    "global_norm",
    "granularities",
    "has_updated",
    "leaf_norms",
    "metrics",
    "microbatched_value_and_grad",
    "nonfinite_leaves",
    "norm_history",
    "quantile_clip",
    "record_norms",
    "reset_accumulation",
    "skip_large_norm",
    "skip_nonfinite",
    "skip_spikes",
    "spam_clip",
    "stable_adamw",
    "stable_spam_clip",
    "suggest_max_norm",
    "thresholds",
    "TransformConfig",
    "u_clip",
    "zclip",
    "zero_large_norm",
]
