"""Conversion of optimizer states between Optax, this package and an earlier version of it."""
