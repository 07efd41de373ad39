"""The printed output that docs/watching.md shows is what its examples print."""

import contextlib
import io
import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "watching.md"


def test_the_page_shows_what_its_examples_print(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?",
        PAGE.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert sum(bool(shown) for _, shown in blocks) >= 4
    names: dict[str, object] = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown
