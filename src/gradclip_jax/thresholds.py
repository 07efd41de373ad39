"""Rules that set a threshold by themselves: `gcx.thresholds`."""

from .clipping._rule import Rule as Rule
from .clipping._rule import relative_to_params as relative_to_params
