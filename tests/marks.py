"""Parameters of tests that `make test` leaves to `make test-slow`."""

import pytest


def slow(*values):
    """Parameters that only `make test-slow` uses."""
    params = (x if isinstance(x, tuple) else (x,) for x in values)
    return [pytest.param(*x, marks=pytest.mark.slow) for x in params]
