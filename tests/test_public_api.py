"""The public names: all registered, documented, and nothing else in `__init__`."""

import ast
import inspect
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import gradclip_jax as gcx
from registry import TRANSFORMATIONS

NAMES = sorted(name for name in vars(gcx) if not name.startswith("_"))
FUNCTIONS = [n for n in NAMES if inspect.isfunction(getattr(gcx, n))]
FOLDERS = {"accumulation", "adaptive", "clipping", "guarding", "monitoring", "thresholds"}


def _returns_transformation(function):
    return "GradientTransformation" in str(inspect.signature(function).return_annotation)


def test_every_public_transformation_is_registered():
    made = {name for name in FUNCTIONS if _returns_transformation(getattr(gcx, name))}
    assert made == set(TRANSFORMATIONS)


def test_init_is_a_table_of_contents():
    tree = ast.parse(Path(gcx.__file__).read_text())
    docstring, *imports = tree.body
    assert isinstance(docstring, ast.Expr)
    for node in imports:
        assert isinstance(node, ast.ImportFrom)
        assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_its_sections(name):
    function = getattr(gcx, name)
    text = inspect.getdoc(function)
    assert text.splitlines()[0].endswith(".")
    parameters = [p for p in inspect.signature(function).parameters if p != "extra_args"]
    sections = ["Returns:", "Example:", *(["Args:"] if parameters else [])]
    if name != "metrics":  # takes any pytree
        sections.append("Raises:")
    for section in sections:
        assert section in text, f"{name} has no {section}"
    arguments = text.split("Args:")[1].split("Returns:")[0]
    for parameter in parameters:
        assert f"{parameter}: " in arguments, f"{name} does not explain {parameter}"
    assert "\n    >>> " in text.split("Example:")[1], f"{name} shows nothing that runs"
    assert "Example:" not in text.partition("References:")[2], f"{name} cites before it shows"


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(FUNCTIONS) - FOLDERS))
def test_classes_are_documented(name):
    assert inspect.getdoc(getattr(gcx, name))


@pytest.mark.parametrize("name", sorted(n for n in vars(gcx.thresholds) if n[0].isalpha()))
def test_rules_are_documented(name):
    text = inspect.getdoc(getattr(gcx.thresholds, name))
    assert "Args:" in text or "Attributes:" in text
    assert "Example:" in text, f"{name} has no Example:"


def test_drop_in_for_optax():
    grads = {"w": jnp.array([3.0, 4.0])}
    ours, _ = gcx.clip_by_global_norm(1.0).update(grads, None)
    theirs, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    assert jnp.allclose(ours["w"], theirs["w"], rtol=1e-7)
