"""From micro-batches to one step of the inner optimizer."""
