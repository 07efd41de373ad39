"""Gates, guards and accumulations, and the executor that runs the optimizer inside them."""
