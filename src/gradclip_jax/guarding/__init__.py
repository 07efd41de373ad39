"""Guards: gradients, loss and step to a verdict, apply or skip the step."""
