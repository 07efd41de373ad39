"""The package as a whole: what is shipped, what importing it does, and that imports go one way."""

import graphlib
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import gradclip_jax as gcx
from files import ROOT, python

PACKAGE = ROOT / "src" / "gradclip_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
SHIPPED = {".py", ".md", ".ipynb", ".json", ".png", ".typed"}


def build(kind: str, folder: Path) -> Path:
    python("-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, cwd=ROOT)
    (path,) = folder.iterdir()
    return path


@pytest.mark.slow
def test_sdist_has_the_version_and_every_file_that_tests_and_commands_read(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = archive.getnames()
    assert names[0].startswith(f"gradclip_jax-{gcx.__version__}/")
    wanted = {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "hatch_build.py", "mkdocs.yml"}
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "notebooks"):
        paths = (path for path in (ROOT / folder).rglob("*") if path.suffix in SHIPPED)
        wanted |= {path.relative_to(ROOT).as_posix() for path in paths}
    left_out = wanted - {name.partition("/")[2] for name in names}
    assert not {x for x in left_out if "/." not in x and not x.startswith("docs/notebooks/")}


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else_and_needs_jax_and_optax_only(tmp_path):
    with zipfile.ZipFile(build("wheel", tmp_path)) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
    wanted = {path.relative_to(PACKAGE.parent).as_posix() for path in MODULES}
    assert shipped == wanted | {"gradclip_jax/py.typed"}
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == ["jax>=0.7", "optax>=0.2.5"]
    assert metadata["Requires-Python"] == ">=3.11"


IMPORT = """
import sys, jax, optax
modules, config = set(sys.modules), dict(jax.config.values)
import gradclip_jax
new = {name.split(".")[0] for name in set(sys.modules) - modules}
assert new - sys.stdlib_module_names <= {"gradclip_jax", "jax"}, new
assert dict(jax.config.values) == config
jax.config.update("jax_num_cpu_devices", 2)  # raises once a backend runs
"""


@pytest.mark.slow
def test_import_loads_nothing_more_than_jax_and_optax_changes_no_setting_and_starts_no_backend():
    python("-c", IMPORT, cwd=ROOT)


def test_imports_between_modules_and_folders_go_one_way():
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        parts = path.relative_to(PACKAGE).parts
        # Two dots lead from a module in a folder to another folder, one dot from a module beside it.
        imported = re.findall(rf"^ *from \.{{{len(parts)}}}(\w+)", path.read_text(), re.MULTILINE)
        graph.setdefault(parts[0].removesuffix(".py"), set()).update(imported)
    del graph["__init__"]  # it imports everything
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a cycle


def test_internals_of_jax_are_not_used():
    assert not [path for path in MODULES if "jax._src" in path.read_text(encoding="utf-8")]
