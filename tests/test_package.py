"""The package as a whole: what is shipped, what importing it costs, and who imports whom."""

import ast
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
FOUNDATION = {"_types", "_checks", "_mesh", "_run_if", "_states", "_serialize"}
MAY_IMPORT = {
    "_types": set(),
    "_checks": {"_types"},
    "_mesh": {"_types", "_checks"},
    "_states": {"_types"},
    "_run_if": {"_types", "_checks", "_mesh"},
    "_serialize": {"_types", "_checks"},
    "clipping": FOUNDATION,
    "accumulation": FOUNDATION | {"clipping"},
    "adaptive": FOUNDATION | {"clipping", "accumulation"},
    "thresholds": FOUNDATION | {"clipping", "adaptive"},
    "guarding": FOUNDATION | {"clipping"},
    "per_example": FOUNDATION | {"clipping", "accumulation"},
    "monitoring": FOUNDATION | {"clipping", "guarding", "accumulation"},
    "_config": FOUNDATION
    | {"clipping", "accumulation", "adaptive", "thresholds", "guarding", "monitoring"},
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


def test_import_takes_no_noticeable_time():
    # Ours alone: JAX and Optax are imported first. It takes about 10 ms; the bound leaves room
    # for a busy machine and no byte code yet, and still fails when something heavy is imported
    # or computed: the first `jnp` call alone starts a backend, which takes longer than this.
    report = python("-X", "importtime", "-c", "import jax, optax, gradclip_jax").stderr
    microseconds = {
        name.strip(): int(cumulative)
        for _, cumulative, name in (line.split("|") for line in report.splitlines()[1:])
    }
    assert microseconds["gradclip_jax"] < 250_000


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
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


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
