"""What the pages by trainer show is what `make test-trainers` runs there."""

import re

import pytest

from files import ROOT

PAGES = sorted((ROOT / "docs/trainers").glob("*.md"))
# `diff` and `py`; what is in `python` is run by the tests of the pages.
SHOWN = re.compile(r"^```(diff|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_line_of_a_diff_is_in_the_test_of_its_trainer(page):
    folder = ROOT / "tests/integration/trainers"
    sources = [folder / "pairs.py"]
    if page.stem != "index":
        sources.append(folder / f"test_{page.stem}.py")
    known = {line.strip() for path in sources for line in path.read_text().splitlines()}
    shown = {
        (line[1:] if kind == "diff" else line).strip()
        for kind, block in SHOWN.findall(page.read_text())
        for line in block.splitlines()
    }
    assert shown and shown - known == set()
