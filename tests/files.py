"""The files of the repository, and what processes that run them need."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load(path):
    """The module in a file below the root, executed anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(devices):
    """Of a process with so many CPU devices that compiles and imports as this one does."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"  # the last one counts
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def python(*args, **options):
    """What Python prints when it runs with these arguments; it has to end well."""
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
