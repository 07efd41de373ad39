"""Of what a norm is taken: `gcx.granularities`, for `clip_by_norm`.

`"global"` and `"leaf"` need no function.
"""

from .clipping._granularity import Granularity, axis, group, layer

__all__ = ["Granularity", "axis", "group", "layer"]
