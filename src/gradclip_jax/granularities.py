"""Granularities for `clip_by_norm`, which determine the elements that share one norm.

The granularities `"global"` and `"leaf"` are passed as strings.
"""

from .norms._granularity import Granularity, axis, group, layer

__all__ = ["Granularity", "axis", "group", "layer"]
