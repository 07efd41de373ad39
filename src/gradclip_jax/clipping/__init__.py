"""From gradient tree to norm, threshold, factor and clipped tree."""
