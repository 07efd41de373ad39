"""What CONTRIBUTING.md says is so: files, names and commands exist."""

import re
from pathlib import Path

import pytest

import gradclip_jax as gcx

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:src|tests|benchmarks|\.ci)/[\w./]*|CHANGELOG\.md)`", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_file_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"\bmake ([a-z-]+)", TEXT))))
def test_command_exists(command):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{command}:", makefile, re.MULTILINE)


NAMED = {
    "src/gradclip_jax/clipping/_granularity.py": ["class Granularity", "def axis("],
    "src/gradclip_jax/clipping/_clip.py": ["Reaction: "],
    "src/gradclip_jax/guarding/_guard.py": ["def guard("],
    "src/gradclip_jax/guarding/_skip_nonfinite.py": ["def judge(", "@register_metrics("],
    "src/gradclip_jax/_checks.py": ["def error_message("],
    "tests/clipping/test_grid.py": ["THRESHOLDS = ", "GRANULARITIES = "],
    "tests/test_fuzz.py": ["AROUND = "],
    "tests/registry.py": ["around: "],
}


@pytest.mark.parametrize("path", NAMED)
def test_what_a_step_names_is_in_its_file(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert path in TEXT
    assert [name for name in NAMED[path] if name not in text] == []


@pytest.mark.parametrize("module", [gcx.thresholds, gcx.granularities, gcx.per_example])
def test_public_list_is_in_one_file(module):
    """Nothing is defined there: every name is imported from where it is written."""
    names = [n for n in module.__all__ if n != "__version__"]
    assert all(getattr(module, name).__module__ != module.__name__ for name in names)


def test_every_public_threshold_rule_is_in_the_grid():
    text = (ROOT / "tests/clipping/test_grid.py").read_text(encoding="utf-8")
    assert [n for n in gcx.thresholds.__all__ if f"thresholds.{n}(" not in text] == []
