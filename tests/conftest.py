"""What every test runs under: eight virtual CPU devices, hypothesis profiles, the gpu marker."""

import os

# Read when JAX starts its first backend, so it has to be set before any test module is imported.
# Where the user asks for an accelerator (JAX_PLATFORMS=cuda), its own devices are used.
if os.environ.get("JAX_PLATFORMS", "") in ("", "cpu"):
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    ).strip()

import hypothesis
import jax
import pytest

# No deadline: the first example of a shape compiles, and takes a hundred times the second.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Asked per test and not at collection, so that collecting does not start a backend.
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("needs a GPU")


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False
