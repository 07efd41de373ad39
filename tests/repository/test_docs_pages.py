"""The code of the pages runs on one device too, unless it is about several."""

import os
import re
import subprocess
import sys

import pytest
from test_readme import PAGES, ROOT, blocks

NEEDS_EIGHT = {"docs/experts.md", "docs/sharding.md"}
RUNS = [path for path in PAGES if blocks(path) and "notebooks" not in path.parts]
# Runs the pages named on its command line, each in a namespace of its own.
RUNNER = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import jax
from test_readme import blocks
assert jax.device_count() == 1
for name in sys.argv[2:]:
    namespace = {"__name__": "page"}
    for line, code, _ in blocks(pathlib.Path(name)):
        exec(compile("\\n" * (line - 1) + code, name, "exec"), namespace)
"""


@pytest.mark.slow
def test_pages_run_on_one_device(tmp_path):
    pages = [str(path) for path in RUNS if path.relative_to(ROOT).as_posix() not in NEEDS_EIGHT]
    environment = {**os.environ, "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = re.sub(r"(device_count=)\d+", r"\g<1>1", os.environ["XLA_FLAGS"])
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", RUNNER, str(ROOT / "tests"), *pages]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
