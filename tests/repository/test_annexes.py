"""`monitoring` and `per_example` are annexes: without one of them, everything else works."""

import os
import re
import shutil
from pathlib import Path

import pytest

from files import ROOT, python

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


def delete(annex, package):
    """Delete an annex, and the lines that import it."""
    files, _ = ANNEXES[annex]
    shutil.rmtree(package / annex)
    for name in files:
        (package / name).unlink()
    modules = "|".join([annex, *(name.removesuffix(".py") for name in files)])
    for path in (package / "__init__.py", package / "diagnostics.py"):
        # `from . import a as a, annex as annex` and `from .annex.module import name as name`
        text = re.sub(rf", ({modules}) as \1|\b({modules}) as \2, ", "", path.read_text())
        path.write_text(re.sub(rf"(?m)^from \.({modules})\b.*\n", "", text))


def run(folder, *args):
    """Run Python in a copy of the project, and return what it prints."""
    path = f"{folder / 'src'}{os.pathsep}{folder}"
    variables = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return python(*args, cwd=folder, env=os.environ | variables)


@pytest.mark.slow
@pytest.mark.parametrize("annexes", [["monitoring"], ["per_example"], list(ANNEXES)])
def test_the_rest_works_without_annexes(annexes, tmp_path):
    for folder in ("src", "tests", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for annex in annexes:
        delete(annex, tmp_path / "src/gradclip_jax")
        shutil.rmtree(tmp_path / "tests/unit" / annex)
    path = Path(run(tmp_path, "-c", "import gradclip_jax; print(gradclip_jax.__file__)").strip())
    assert path.is_relative_to(tmp_path)
    if len(annexes) == 1:
        return  # the tests without both annexes run the same modules
    names = "|".join(names for _, names in ANNEXES.values())
    (tmp_path / "without_annexes.py").write_text(PLUGIN.replace("{names}", names))
    others = "clipping/test_clip.py", "guarding", "accumulation/test_transform.py"
    options = "-q", "-p", "no:cacheprovider", "-p", "xdist.plugin", "-p", "without_annexes", "-n0"
    folders = [f"tests/unit/{name}" for name in others]
    printed = run(tmp_path, "-m", "pytest", *options, "-m", "not slow", *folders)
    assert int(re.search(r"(\d+) passed", printed)[1]) > 100
