"""The table of trainers shows what the adapters replace, and each adapter is short."""

import importlib.util

import pytest

from files import ROOT

FOLDER = ROOT / "tests/integration/trainers"
ADAPTERS = sorted((FOLDER / "adapters").glob("*.py"))


def their_tests():
    spec = importlib.util.spec_from_file_location("their_tests", FOLDER / "their_tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_the_table_has_the_lines_of_the_adapter_and_the_tests_that_pass(path):
    source = path.read_text()
    lines = their_tests().adapter_lines(source)
    code = source[source.index("\nPASSED = ") :].partition("\n\n\ndef ")[0]
    values = {}
    exec(code, values)
    total = values["PASSED"] + len(values["DIFFERENCES"])
    page = (ROOT / "docs/trainers/index.md").read_text()
    row = next(row for row in page.splitlines() if f"adapters/{path.name}" in row)
    assert f"| {lines} | {values['PASSED']} of {total} |" in row
