"""Clipping, accumulation, guarding and monitoring of gradients for JAX and Optax."""

from ._version import __version__ as __version__
from . import granularities as granularities
from . import thresholds as thresholds

from .clipping._norm import global_norm as global_norm
from .clipping._norm import leaf_norms as leaf_norms
from .clipping._pure import clip_grad_norm as clip_grad_norm
from .clipping._clamp import clip_grad_value as clip_grad_value
from .clipping._cotangent import clip_cotangent as clip_cotangent
from .clipping._qk_clip import qk_clip as qk_clip
from .clipping._qk_clip_mla import qk_clip_mla as qk_clip_mla

from .clipping._clip import clip_by_norm as clip_by_norm
from .clipping._transform import clip_by_global_norm as clip_by_global_norm
from .clipping._transform import clip_by_leaf_norm as clip_by_leaf_norm
from .clipping._transform import clip_by_group_norm as clip_by_group_norm
from .clipping._transform import clip_by_block_rms as clip_by_block_rms
from .adaptive._transform import adaptive_grad_clip as adaptive_grad_clip
from .clipping._transform import zero_large_norm as zero_large_norm
from .clipping._transform import clip as clip

from .adaptive._transform import autoclip as autoclip
from .adaptive._transform import zclip as zclip
from .adaptive._transform import adagc as adagc
from .adaptive._transform import quantile_clip as quantile_clip
from .adaptive._u_clip import u_clip as u_clip
from .adaptive._acclip import acclip as acclip
from .adaptive._spam_clip import spam_clip as spam_clip
from .adaptive._stable_spam_clip import stable_spam_clip as stable_spam_clip
from .adaptive._stable_adamw import stable_adamw as stable_adamw

from .accumulation._transform import accumulate_gradients as accumulate_gradients
from ._gate import apply_gradients as apply_gradients
from .accumulation._microbatch import microbatched_value_and_grad as microbatched_value_and_grad
from .accumulation._state import flush as flush
from .accumulation._state import reset_accumulation as reset_accumulation
from .accumulation._state import has_updated as has_updated
from .accumulation._state import accumulated_gradients as accumulated_gradients
from .accumulation._state import accumulation_stats as accumulation_stats
from .accumulation._state import AccumulationStats as AccumulationStats

from .guarding._skip_nonfinite import skip_nonfinite as skip_nonfinite
from .guarding._skip_spikes import skip_large_norm as skip_large_norm
from .guarding._skip_spikes import skip_spikes as skip_spikes
from .guarding._dynamic_loss_scale import dynamic_loss_scale as dynamic_loss_scale
from .guarding._scale_loss import scale_loss as scale_loss

from .per_example._clip import clipped_value_and_grad as clipped_value_and_grad
from .per_example._clip import clipped_grad_and_stats as clipped_grad_and_stats
from .per_example._clip import ExampleStats as ExampleStats
from .per_example._norms import per_example_norms as per_example_norms
from .per_example._norms import per_example_leaf_norms as per_example_leaf_norms
from .per_example._norms import per_example_costs as per_example_costs
from .per_example._norms import LeafCost as LeafCost
from .per_example._noise import clipped_sum_sensitivity as clipped_sum_sensitivity
from .per_example._noise import noise_scale_from_norms as noise_scale_from_norms
from .per_example._transform import noisy_mean as noisy_mean

from .monitoring._metrics import metrics as metrics
from .monitoring._record import record_norms as record_norms
from .monitoring._record import norm_history as norm_history
from .monitoring._measure import suggest_max_norm as suggest_max_norm
from .monitoring._measure import nonfinite_leaves as nonfinite_leaves

from ._config import TransformConfig as TransformConfig
from ._config import AccumulationConfig as AccumulationConfig
from ._convert import convert_state as convert_state

__all__ = [
    "granularities",
    "thresholds",
    "global_norm",
    "leaf_norms",
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
    "clip",
    "autoclip",
    "zclip",
    "adagc",
    "quantile_clip",
    "u_clip",
    "acclip",
    "spam_clip",
    "stable_spam_clip",
    "stable_adamw",
    "accumulate_gradients",
    "apply_gradients",
    "microbatched_value_and_grad",
    "flush",
    "reset_accumulation",
    "has_updated",
    "accumulated_gradients",
    "accumulation_stats",
    "AccumulationStats",
    "skip_nonfinite",
    "skip_large_norm",
    "skip_spikes",
    "dynamic_loss_scale",
    "scale_loss",
    "clipped_value_and_grad",
    "clipped_grad_and_stats",
    "ExampleStats",
    "per_example_norms",
    "per_example_leaf_norms",
    "per_example_costs",
    "LeafCost",
    "clipped_sum_sensitivity",
    "noise_scale_from_norms",
    "noisy_mean",
    "metrics",
    "record_norms",
    "norm_history",
    "suggest_max_norm",
    "nonfinite_leaves",
    "TransformConfig",
    "AccumulationConfig",
    "convert_state",
]
