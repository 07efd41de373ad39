"""The printed output that docs/watching.md and docs/taps.md show is what their examples print."""

import contextlib
import importlib.util
import io
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[3] / "docs"
BLOCK = re.compile(
    r"^(?:<!-- needs (\w+) -->\n)?```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("page", ["watching.md", "taps.md"])
def test_the_page_shows_what_its_examples_print(page, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert sum(bool(shown) for _, _, shown in blocks) >= 4
    names: dict[str, object] = {}
    for needed, code, shown in blocks:
        if needed and not importlib.util.find_spec(needed):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown
