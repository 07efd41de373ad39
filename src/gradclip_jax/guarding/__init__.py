"""Guards, which skip steps with non-finite or unusually large gradients, losses or updates."""
