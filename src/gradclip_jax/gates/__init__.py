"""Guards and accumulations, which decide whether their inner transformation runs."""
