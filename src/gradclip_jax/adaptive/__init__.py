"""Adaptive clipping: threshold rules fed by earlier norms, and clips with larger state."""
