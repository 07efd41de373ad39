"""The package as a whole: what is shipped, what importing it does, who imports whom, how long."""

import ast
import statistics
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gradclip_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
each_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix()
)

# Each part may import the parts it names, and itself. `__init__` may import everything.
FOUNDATION = {"_types", "_checks", "_tree_checks", "_mesh", "_xla", "_run_if", "_gate", "_states"}
MAY_IMPORT = {
    "_types": set(),
    "_version": set(),
    "_checks": {"_types"},
    "_mesh": {"_types", "_checks"},
    "_tree_checks": {"_types", "_checks", "_mesh"},
    "_xla": {"_types", "_mesh"},
    "_states": {"_types"},
    "_run_if": {"_types", "_checks", "_mesh", "_xla", "_states"},
    "_gate": {"_types", "_checks", "_mesh", "_states", "_run_if"},
    "clipping": FOUNDATION,
    "granularities": {"clipping"},
    "adaptive": FOUNDATION | {"clipping"},
    "thresholds": {"clipping", "adaptive"},
    "accumulation": FOUNDATION | {"clipping"},
    "per_example": FOUNDATION | {"clipping", "accumulation"},
    "guarding": FOUNDATION | {"clipping", "accumulation"},
    "monitoring": FOUNDATION | {"clipping"},
    "_convert": FOUNDATION | {"clipping", "guarding", "accumulation"},
    "_config": FOUNDATION
    | {"clipping", "accumulation", "adaptive", "thresholds", "granularities", "guarding"}
    | {"monitoring", "per_example"},
}


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


def test_import_loads_nothing_that_jax_and_optax_do_not():
    # Ours alone and the standard library: importing it costs what reading it costs.
    new = python(
        "-c",
        "import sys, jax, optax; before = set(sys.modules); import gradclip_jax; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})",
    ).stdout.split()
    assert set(new) - sys.stdlib_module_names <= {"gradclip_jax", "jax"}


def test_import_leaves_the_configuration_of_jax_alone():
    python(
        "-c",
        "import jax, optax; before = dict(jax.config.values); "
        "import gradclip_jax; assert dict(jax.config.values) == before",
    )


def test_import_starts_no_backend():
    # JAX refuses this setting once a backend runs: after it, the user could not choose one.
    python("-c", "import jax, gradclip_jax; jax.config.update('jax_num_cpu_devices', 2)")


@each_module
def test_imports_go_one_way(path):
    part = _part(path.relative_to(PACKAGE))
    if part == "__init__":
        return
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT what it may import"
    forbidden = _imported_parts(path) - MAY_IMPORT[part] - {part}
    assert not forbidden, f"{part} must not import {sorted(forbidden)}"


@each_module
def test_internals_of_jax_are_not_used(path):
    assert "jax._src" not in path.read_text(encoding="utf-8")


@each_module
def test_module_is_short_enough_to_read(path):
    assert len(_lines(path)) <= 300


def test_median_module_fits_on_two_screens():
    assert statistics.median(len(_lines(path)) for path in MODULES if _lines(path)) <= 120


@each_module
def test_functions_are_short_enough_to_read(path):
    """Lines of code: no docstring, no comment, no blank line, nothing of a nested function."""
    long = {name: size for name, size in _code_sizes(path).items() if size > 50}
    assert not long, f"more than 50 lines of code: {long}"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _code_sizes(path: Path) -> dict[str, int]:
    """The lines of code of each function and each method, those of nested ones left out."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lines, sizes = _lines(path), {}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, functions):
            continue
        own = set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
        for child in ast.walk(node):
            if child is not node and isinstance(child, functions):
                own -= set(range(child.lineno, (child.end_lineno or 0) + 1))
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if is_text:
                own -= set(range(child.lineno, (child.end_lineno or 0) + 1))
        code = (lines[i - 1].strip() for i in own)
        sizes[node.name] = sum(bool(text) and not text.startswith("#") for text in code)
    return sizes


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
