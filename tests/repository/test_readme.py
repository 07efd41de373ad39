"""Every ```python block of README.md and docs/*.md runs, in order, in one namespace per file.

A ```text block right after it is what it prints. A block with `<!-- not run -->` on the line before it is left out, one with `<!-- needs a, b -->`
where one of these packages is not installed.
"""

import contextlib
import importlib.util
import io
import re
import textwrap
from pathlib import Path

import pytest

from files import ROOT, environment, python

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(
    r"^(?P<skip><!-- (?:not run|needs (?P<needs>[\w, ]+)) -->\n)?^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```"
    r"(?:\n+^(?P=indent)```text\n(?P<shown>.*?)^(?P=indent)```)?",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """The blocks of `page` that are to run: the line each starts on, its code and its output."""
    text = page.read_text(encoding="utf-8")
    return [
        (
            text.count("\n", 0, found.start("code")) + 1,
            textwrap.dedent(found["code"]),
            found["shown"] and textwrap.dedent(found["shown"]),
        )
        for found in BLOCK.finditer(text)
        if not found["skip"]
        or (found["needs"] and all(map(importlib.util.find_spec, found["needs"].split(", "))))
    ]


def run(page: Path) -> None:
    namespace = {"__name__": page.stem}
    for line, code, shown in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Blank lines in front: a traceback then names the line of the page itself.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        assert shown in (None, printed.getvalue()), f"the block on line {line} prints"


@pytest.mark.parametrize(
    "page",
    [pytest.param(x, marks=() if x == README else pytest.mark.slow) for x in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a block may write a file
    monkeypatch.setenv("MPLBACKEND", "agg")
    run(page)


@pytest.mark.slow
def test_a_page_about_devices_runs_on_one_or_says_that_it_needs_eight(tmp_path):
    programs = {page: "".join(code for _, code, _ in blocks(page)) for page in PAGES}
    about_devices = [page for page in PAGES if re.search("mesh|pmap|devices", programs[page])]
    pages = [page for page in about_devices if "device_count=8" not in page.read_text("utf-8")]
    assert pages
    code = "import pathlib, sys, jax, test_readme; assert jax.device_count() == 1\n"
    code += "for page in sys.argv[1:]: test_readme.run(pathlib.Path(page))"
    variables = environment(1) | {"MPLBACKEND": "agg"}
    python("-c", code, *pages, cwd=tmp_path, env=variables)


def test_no_page_contains_a_placeholder_of_its_template():
    assert not [page.name for page in PAGES if "{{" in page.read_text("utf-8")]
