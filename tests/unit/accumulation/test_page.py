"""The printed output that the pages about accumulation show is what their examples print."""

import contextlib
import io
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["accumulation.md", "recipes/growing_batch.md"])
def test_the_page_shows_what_its_examples_print(page):
    pytest.importorskip("flax.nnx")
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert any(shown for _, shown in blocks)
    names: dict[str, object] = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == shown
