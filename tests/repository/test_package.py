"""The package as a whole: what is shipped, what importing it does, who imports whom, how long."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import warnings
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gradclip_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
each_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix()
)

# Each part may import the parts it names, and itself. `__init__` may import everything.
FOUNDATION = {"_types", "_checks", "_tree_checks", "_devices", "_mesh", "_run_if"} | {
    "gates",
    "_rounding",
    "_states",
}
MAY_IMPORT = {
    "_types": set(),
    "_version": set(),
    "_checks": {"_types"},
    "_names": {"_checks"},
    "_mesh": {"_types", "_checks", "_devices"},
    "_devices": {"_types", "_checks"},
    "_tree_checks": {"_types", "_checks", "_mesh"},
    "_states": {"_types", "_checks"},
    "_run_if": {"_types", "_checks", "_devices", "_mesh"},
    "_rounding": {"_types", "_checks", "_tree_checks", "_devices", "_mesh", "_states"},
    "gates": {"_types", "_checks", "_tree_checks", "_devices", "_mesh", "_states", "_run_if"},
    "clipping": FOUNDATION,
    "granularities": {"clipping"},
    "adaptive": FOUNDATION | {"clipping"},
    "contrib": FOUNDATION | {"clipping", "adaptive"},
    "thresholds": {"clipping", "adaptive"},
    "accumulation": FOUNDATION | {"clipping"},
    "per_example": FOUNDATION | {"clipping", "accumulation"},
    "guarding": FOUNDATION | {"clipping", "accumulation"},
    "monitoring": FOUNDATION | {"clipping", "adaptive", "guarding"},
    "diagnostics": {"accumulation", "clipping", "monitoring"},
    "configs": {"_config"},
    "_convert": FOUNDATION | {"clipping", "guarding", "accumulation", "monitoring"},
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
def test_devices_and_compilers_have_one_room(path):
    """Docstrings of public functions may say what a device costs their users."""
    if path.name in ("_devices.py", "_run_if.py"):
        return
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text = text.replace(ast.get_docstring(node, clean=False) or "\0", "")
    decides = r"platform_dependent|optimization_barrier|__version_info__"
    names = r"\bXLA\b|\b[GTC]PU\b|\bH\d00\b|\bv\de\b|JAX \(?\d"
    assert re.findall(f"{decides}|{names}", text) == []


@each_module
def test_a_long_module_is_asked_why(path):
    """A file is one idea; past 400 lines it may be two."""
    if len(_lines(path)) > 400:
        warnings.warn(f"{path.name} has {len(_lines(path))} lines", stacklevel=1)


@each_module
def test_a_long_function_says_why(path):
    """Lines of code: no docstring, no comment, no blank line, nothing of a nested function."""
    long = {name for name, size in _code_sizes(path).items() if size > 60}
    assert long <= LONG_FOR_A_REASON.keys()


# Function to why it is best read in one piece.
LONG_FOR_A_REASON: dict[str, str] = {}

# Words that only their author understands, or that say nothing: what to write in their place.
DIALECT = {
    "apart": "separately, or say what is left out",
    "found": "the noun: states, leaves, result",
    "how": "the noun: options, mode",
    "now": "gate, current, or the noun",
    "seen": "counted, checked",
    "served": "which rule serves which unit: assignment",
    "slot": "entry",
    "span": "range",
    "stands": "is",
    "taken": "stepped, copied",
    "told": "given",
    "wanted": "required",
    "way": "mode",
    "said of": "for",
    "a flag is up": "is True",
    "has not": "lacks",
}
# Folders and files that still hold some of them. May only become shorter.
STILL_IN_DIALECT: set[str] = set()


def _dialect_of(path: Path) -> set[str]:
    """The words of `DIALECT` among the identifiers that a file binds, and in its comments."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {getattr(node, "name", None) or "" for node in ast.walk(tree)}
    names -= {"has_updated"}  # a step is taken, as the field says
    words = {word for name in names for word in re.findall(r"[a-z]+", name.lower())}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = " ".join(x.string.lower() for x in tokens if x.type == tokenize.COMMENT)
    phrases = {word for word in DIALECT if " " in word and word in comments}
    return words & DIALECT.keys() | phrases


@each_module
def test_names_and_comments_are_plain_english(path):
    part = _part(path.relative_to(PACKAGE))
    found = {} if part in STILL_IN_DIALECT else {w: DIALECT[w] for w in _dialect_of(path)}
    assert not found


def test_the_list_of_what_is_still_in_dialect_has_nothing_too_many():
    has_some = {_part(path.relative_to(PACKAGE)) for path in MODULES if _dialect_of(path)}
    assert has_some >= STILL_IN_DIALECT


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
