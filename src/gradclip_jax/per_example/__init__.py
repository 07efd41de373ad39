"""Per-example gradients: norms and clipping without writing the gradients down."""
