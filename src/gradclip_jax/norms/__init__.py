"""Leaves, mesh axes, masks, norm groups and norms, which all other folders use."""
