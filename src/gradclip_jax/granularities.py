"""Of what a norm is taken: `gcx.granularities`, for `clip_by_norm`.

`"global"` and `"leaf"` need no function.
"""

from .clipping._granularity import Granularity as Granularity
from .clipping._granularity import axis as axis
from .clipping._granularity import group as group
from .clipping._granularity import layer as layer

__all__ = ["Granularity", "axis", "group", "layer"]
