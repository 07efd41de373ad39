"""What every test runs under: virtual CPU devices, a cheap compiler, hypothesis profiles, markers.

Nine tenths of the time of a test here is compilation. On the CPU the programs are therefore
compiled without LLVM's optimisations and with XLA's plain emitters, which takes a sixth of the
time. The graph optimisations of XLA (fusion, buffer assignment, collectives) stay as they are.
`FULL_COMPILE=1` compiles as users do: `.ci/run` runs the invariants that way as well.
"""

import os
import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

# Read when JAX starts its first backend, so it has to be set before any test module is imported.
# Where the user asks for an accelerator (JAX_PLATFORMS=cuda), its own devices are used.
if os.environ.get("JAX_PLATFORMS", "") in ("", "cpu"):
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags += ["--xla_force_host_platform_device_count=8"]
    if not os.environ.get("FULL_COMPILE"):
        # Measured on seven updates of the registry (JAX 0.10.2): 5.5 s of compiling become 2.9 s
        # without the fusion emitters, 1.4 s without optimisation, 1.0 s with all four.
        if version("jaxlib").split(".")[:2] in (["0", str(minor)] for minor in range(7, 11)):
            flags += ["--xla_cpu_use_fusion_emitters=false"]  # later releases do not know it
        flags += ["--xla_backend_optimization_level=0"]
        flags += ["--xla_llvm_disable_expensive_passes=true"]
        flags += ["--xla_cpu_parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(flags))
# Programs without the Python lines of each operation: a tenth less time to lower them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import gc

import hypothesis
import jax
import pytest

# Traces and programs are many objects that live long; to look for cycles among them at every 700
# new ones, as Python does, takes a twentieth of the time.
gc.set_threshold(100_000, 20, 20)

# No deadline: the first example of a shape compiles, and takes a hundred times the second.
# `make fuzz` draws new examples without end; the suite draws the same few each time.
suite = {"deadline": None, "derandomize": True, "print_blob": True, "database": None}
hypothesis.settings.register_profile("suite", **suite)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=10_000_000)
hypothesis.settings.load_profile("fuzz" if os.environ.get("FUZZ") else "suite")


_CASES: Counter[str] = Counter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # A file without a test that is selected is not imported, as that takes up to seconds.
    selected = config.option.markexpr
    if selected in ("slow", "not slow") and collection_path.match("test_*.py"):
        text = collection_path.read_text("utf-8")
        if selected == "slow":
            return None if re.search(r"mark\.(slow|sampled)|import slow", text) else True
        return True if "\npytestmark = pytest.mark.slow\n" in text else None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One process for each file, and for each row of the conformance suite: what they have
    # compiled is then compiled once. Only of use with `--dist loadgroup`.
    for item in items:
        group = item.nodeid.split("::")[0]
        if group.endswith("test_conformance.py") and hasattr(item, "callspec"):
            group += str(item.callspec.params.get("name"))
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_itemcollected(item: pytest.Item) -> None:
    # `make test` runs every third case of a sampled test; the others are slow.
    if item.get_closest_marker("sampled"):
        index = _CASES[item.nodeid.split("[")[0]]
        _CASES[item.nodeid.split("[")[0]] += 1
        if index % 3:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Asked per test and not at collection, so that collecting does not start a backend.
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("needs a GPU")


def pytest_sessionfinish() -> None:
    # So that Python does not look for cycles among all traces and programs before it exits.
    gc.freeze()


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False
