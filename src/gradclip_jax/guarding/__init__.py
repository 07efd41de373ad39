"""From gradient, loss and update to a verdict: a step, or nothing at all."""
