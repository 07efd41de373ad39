"""Gradient accumulation over micro-batches."""
