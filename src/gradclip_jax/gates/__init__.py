"""Gates, which are guards and accumulations, and the executor of the optimizer inside them."""
