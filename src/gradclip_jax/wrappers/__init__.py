"""Guards and an accumulation around an optimizer, executed as one transformation."""
