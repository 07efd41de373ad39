"""Adaptive clipping: threshold rules that depend on earlier norms, and clips that use them."""
