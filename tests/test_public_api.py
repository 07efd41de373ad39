"""The public names: all registered, documented, listed by `help`, and nothing else in `__init__`."""

import ast
import inspect
import pydoc
import types
from pathlib import Path

import pytest

import gradclip_jax as gcx
from registry import TRANSFORMATIONS

NAMESPACES = [gcx, gcx.thresholds, gcx.granularities]
NAMES = list(gcx.__all__)
FUNCTIONS = [n for n in NAMES if inspect.isfunction(getattr(gcx, n))]
CLASSES = [n for n in NAMES if inspect.isclass(getattr(gcx, n))]
each_namespace = pytest.mark.parametrize("module", NAMESPACES, ids=lambda module: module.__name__)


def _returns_transformation(function):
    return "GradientTransformation" in str(inspect.signature(function).return_annotation)


def test_every_public_transformation_is_registered():
    made = {name for name in FUNCTIONS if _returns_transformation(getattr(gcx, name))}
    assert made == set(TRANSFORMATIONS)


def test_init_is_a_table_of_contents():
    docstring, *body = ast.parse(Path(gcx.__file__).read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom | ast.Assign | ast.Delete) for node in body)


@each_namespace
def test_all_is_what_is_public(module):
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        # The folders of the package are there because they were imported.
        and not (isinstance(value, types.ModuleType) and value not in NAMESPACES)
    }
    assert set(module.__all__) - {"__version__"} == public
    assert len(set(module.__all__)) == len(module.__all__)


@each_namespace
def test_help_lists_what_is_public(module):
    text = pydoc.plain(pydoc.render_doc(module))
    functions = [n for n in module.__all__ if callable(getattr(module, n))]
    assert [name for name in functions if name not in text] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_its_sections(name):
    function = getattr(gcx, name)
    text = inspect.getdoc(function)
    assert text.splitlines()[0].endswith(".")
    parameters = [p for p in inspect.signature(function).parameters if p != "extra_args"]
    sections = ["Returns:", "Examples:", *(["Args:"] if parameters else [])]
    if name != "metrics":  # takes any pytree
        sections.append("Raises:")
    for section in sections:
        assert section in text, f"{name} has no {section}"
    arguments = text.split("Args:")[1].split("Returns:")[0]
    for parameter in parameters:
        assert f"{parameter}: " in arguments, f"{name} does not explain {parameter}"
    assert "\n    >>> " in text.split("Examples:")[1], f"{name} shows nothing that runs"
    assert "Examples:" not in text.partition("References:")[2], f"{name} cites before it shows"


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_documented(name):
    assert inspect.getdoc(getattr(gcx, name))


@pytest.mark.parametrize("name", gcx.thresholds.__all__)
def test_rules_are_documented(name):
    text = inspect.getdoc(getattr(gcx.thresholds, name))
    assert "Args:" in text or "Attributes:" in text
    assert "Examples:" in text, f"{name} has no Examples:"
