"""From states to metrics, and norms on record."""
