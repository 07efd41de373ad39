"""The package as a whole: what is shipped, what importing it does, and that imports go one way."""

import ast
import graphlib
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gradclip_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))


def python(*args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder))
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_the_package_and_nothing_else(wheel):
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(PACKAGE.parent).as_posix() for path in MODULES}
    assert shipped == wanted | {"gradclip_jax/py.typed"}


def test_wheel_needs_jax_and_optax_only(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == ["jax>=0.7", "optax>=0.2.5"]
    assert metadata["Requires-Python"] == ">=3.11"


@pytest.mark.slow
def test_import_loads_nothing_that_jax_and_optax_do_not():
    # Ours alone and the standard library: importing it costs what reading it costs.
    new = python(
        "-c",
        "import sys, jax, optax; before = set(sys.modules); import gradclip_jax; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})",
    ).stdout.split()
    assert set(new) - sys.stdlib_module_names <= {"gradclip_jax", "jax"}


@pytest.mark.slow
def test_import_leaves_the_configuration_of_jax_alone():
    python(
        "-c",
        "import jax, optax; before = dict(jax.config.values); "
        "import gradclip_jax; assert dict(jax.config.values) == before",
    )


def test_import_starts_no_backend():
    # JAX refuses this setting once a backend runs: after it, the user could not choose one.
    python("-c", "import jax, gradclip_jax; jax.config.update('jax_num_cpu_devices', 2)")


def test_imports_between_modules_and_folders_go_one_way():
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        part = _part(path.relative_to(PACKAGE))
        graph[part] = graph.get(part, set()) | (_imported_parts(path) - {part})
    graph.pop("__init__")  # it imports everything, and nothing imports it
    assert not any("__init__" in imported for imported in graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a cycle


def test_internals_of_jax_are_not_used():
    assert not [path for path in MODULES if "jax._src" in path.read_text(encoding="utf-8")]


def _part(relative: Path) -> str:
    """`clipping` for clipping/_norm.py, `_types` for _types.py."""
    return relative.parts[0].removesuffix(".py")


def _imported_parts(path: Path) -> set[str]:
    """The parts of this package that `path` imports, anywhere in its text."""
    package = path.relative_to(PACKAGE.parent).parent.parts
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{source}.{alias.name}" for alias in node.names]
    ours = [name.split(".") for name in names if name.split(".")[0] == "gradclip_jax"]
    return {name[1] if len(name) > 1 else "__init__" for name in ours}
