"""`monitoring` and `per_example` are annexes: without one of them, everything else works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The folder of an annex, other files that consist of it, and its names in tests of other folders.
ANNEXES = {
    "monitoring": (("taps.py", "__main__.py"), r"watch|Monitor|taps|incidents|last_row|plot_log"),
    "per_example": ((), r"per_example"),
}
PLUGIN = """
import inspect, re

def pytest_collection_modifyitems(config, items):
    own = [x for x in items if re.search(r"\\b({names})\\b", inspect.getsource(x.function))]
    config.hook.pytest_deselected(items=own)
    items[:] = [x for x in items if x not in own]
"""


@pytest.mark.slow
@pytest.mark.parametrize("annex", ANNEXES)
def test_the_rest_works_without_an_annex(annex, tmp_path):
    files, names = ANNEXES[annex]
    for folder in ("src", "tests", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", annex)
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "src/gradclip_jax"
    for name in files:
        (package / name).unlink()
    modules = "|".join([annex, *(name.removesuffix(".py") for name in files)])
    for path in (package / "__init__.py", package / "diagnostics.py"):
        # `from . import a as a, annex as annex` and `from .annex.module import name as name`
        text = re.sub(rf", ({modules}) as \1|\b({modules}) as \2, ", "", path.read_text())
        path.write_text(re.sub(rf"(?m)^from \.({modules})\b.*\n", "", text))
    (tmp_path / "without_annex.py").write_text(PLUGIN.replace("{names}", names))
    others = "clipping/test_clip.py", "guarding", "accumulation/test_transform.py"
    folders = [f"tests/unit/{name}" for name in others]
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{tmp_path}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    options = "-q", "-p", "no:cacheprovider", "-p", "xdist.plugin", "-p", "without_annex", "-n0"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", "not slow", *folders],
        **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True},
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 100
