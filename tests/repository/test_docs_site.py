"""The site: every public name on one API page, every page in the navigation, nothing fetched."""

import importlib.util
import inspect
import operator
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import nbformat
import pytest

import gradclip_jax as gcx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
# Folders of the package are attributes of it, and no names of the API.
FOLDERS = {path.name for path in Path(gcx.__file__).parent.iterdir() if path.is_dir()}


def public_names():
    names = {name for name in vars(gcx) if not name.startswith("_")} - (
        FOLDERS - {"per_example", "contrib"}
    )
    modules = {name for name in names if isinstance(getattr(gcx, name), type(gcx))}
    inside = {f"{module}.{name}" for module in modules for name in getattr(gcx, module).__all__}
    return (names - modules) | inside


def test_every_public_name_is_on_one_api_page():
    listed = Counter(
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: gradclip_jax\.(\S+)$", page.read_text(), re.MULTILINE)
    )
    assert listed == Counter(public_names())


@pytest.mark.parametrize("name", sorted(public_names()))
def test_the_text_of_returns_is_not_rendered_as_a_type(name):
    # In a Google docstring the text before a colon in the first line is the type.
    doc = inspect.getdoc(operator.attrgetter(name)(gcx)) or ""
    returns = doc.partition("\nReturns:\n")[2].partition("\n\n")[0]
    assert not re.match(r"\s*\w+ [^:\n]*:\s", returns), returns


def test_every_page_is_in_the_navigation_once():
    named = Counter(re.findall(r"[\w/]+\.md$", CONFIG.partition("\nnav:")[2], re.MULTILINE))
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert named == Counter(pages | notebooks)


def test_every_page_is_in_llms_txt_once():
    listed = CONFIG.partition("      sections:\n")[2].partition("\nvalidation:")[0]
    patterns = re.findall(r"[\w/*]+\.md", listed)
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    found = Counter(
        page for page in pages | notebooks for pattern in patterns if fnmatch(page, pattern)
    )
    assert found == Counter(pages | notebooks)


def test_recipes_are_all_in_their_list():
    listed = re.findall(r"\]\((\w+\.md)\)", (DOCS / "recipes" / "index.md").read_text())
    pages = {path.name for path in (DOCS / "recipes").glob("*.md")} - {"index.md"}
    assert Counter(listed) == Counter(pages)


def test_the_site_fetches_nothing():
    assert "font: false" in CONFIG
    assert not re.search(r"https?://", CONFIG)


def test_notebooks_install_the_clone_they_are_in():
    first = {
        next(
            cell.source
            for cell in nbformat.read(path, as_version=4).cells
            if cell.cell_type == "code"
        )
        for path in (ROOT / "notebooks").glob("*.ipynb")
    }
    (source,) = first
    assert '"src" / "gradclip_jax"' in source and "%pip install" in source


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", DOCS / "render_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_notebook_becomes_a_page_with_its_outputs(render, tmp_path):
    new = nbformat.v4
    picture = new.new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Figure>"})
    printed = new.new_output("stream", text="5\n")
    cells = [
        new.new_markdown_cell("# Title, see [guide](../docs/guide.md)"),
        new.new_code_cell("%pip install x"),
        new.new_code_cell("print(5)", outputs=[printed, picture]),
    ]
    page = render.as_page(new.new_notebook(cells=cells), "nb", tmp_path)
    assert page == (
        "# Title, see [guide](../guide.md)\n\n```py\nprint(5)\n```\n\n```text\n5\n```\n\n"
        "![Output 1 of nb](nb_1.png)\n"
    )
    assert (tmp_path / "nb_1.png").read_bytes() == b"hi"
