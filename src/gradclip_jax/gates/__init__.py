"""Guards and accumulations, which decide whether the transformation inside them runs."""
