"""Clipping of gradient trees by norm or value."""
