"""The public names: all registered and documented, and a wrong name gets a hint."""

import inspect
import re
from collections import Counter

import pytest
from registry import TRANSFORMATIONS

from files import ROOT, load
from public import CLASSES, FUNCTIONS

API = load("docs/write_api.py")


def test_every_public_transformation_is_registered():
    made = {
        name.split(".")[-1]
        for name, function in FUNCTIONS.items()
        if "GradientTransformation" in str(inspect.signature(function).return_annotation)
    }
    assert made == set(TRANSFORMATIONS)


def test_every_public_name_is_on_one_api_page_and_every_class_documented():
    listed = Counter(name for _, names in API.PAGES.values() for name in names.split())
    assert listed == Counter([*FUNCTIONS, *CLASSES])
    assert all(map(inspect.getdoc, CLASSES.values()))


def test_the_api_pages_are_those_of_the_docstrings():
    pages = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/api").glob("*.md")}
    assert pages == {name: API.page(name) for name in API.PAGES}, "run docs/write_api.py"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_explains_every_parameter(name):
    text = inspect.getdoc(FUNCTIONS[name])
    assert text.splitlines()[0].endswith(".")
    for parameter in inspect.signature(FUNCTIONS[name]).parameters:
        assert f"\n    {parameter}: " in text or parameter == "extra_args", parameter
    # The site renders the text before a colon in the first line of Returns as a type.
    returns = text.partition("\nReturns:\n")[2].partition("\n\n")[0]
    assert not re.match(r"\s*\w+ [^:\n]*:\s", returns), returns


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_shows_aliases_instead_of_unions(name):
    signature = str(inspect.signature(FUNCTIONS[name]))
    assert not re.search(r"Union\[|collections\.abc", signature)
