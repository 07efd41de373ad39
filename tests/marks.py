"""Parameters of tests that `make test` leaves to `make test-slow`."""

import pytest


def slow(*values):
    """Parameters that only `make test-slow` uses."""
    return [pytest.param(x, marks=pytest.mark.slow) for x in values]


def every_third(values):
    """Parameters of which `make test` uses every third."""
    return [pytest.param(x, marks=[pytest.mark.slow] * bool(i % 3)) for i, x in enumerate(values)]
