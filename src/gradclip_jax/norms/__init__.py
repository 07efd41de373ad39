"""Leaves of trees, mesh axes, masks, norm groups and norms."""
