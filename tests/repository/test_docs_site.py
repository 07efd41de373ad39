"""What the site is made from: notebooks become pages, and generated pages are complete."""

import nbformat

from files import ROOT, load


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    new = nbformat.v4
    picture = new.new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Figure>"})
    printed = new.new_output("stream", text="5\n")
    cells = [
        new.new_markdown_cell("# Title, see [guide](../docs/guide.md)"),
        new.new_code_cell("%pip install x"),
        new.new_code_cell("print(5)", outputs=[printed, picture]),
    ]
    page = load("docs/render_notebooks.py").as_page(new.new_notebook(cells=cells), "nb", tmp_path)
    assert page == (
        "# Title, see [guide](../guide.md)\n\n```py\nprint(5)\n```\n\n```text\n5\n```\n\n"
        "![Output 1 of nb](nb_1.png)\n"
    )
    assert (tmp_path / "nb_1.png").read_bytes() == b"hi"


def test_no_page_contains_a_placeholder_of_its_template():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert not [path.name for path in pages if "{{" in path.read_text("utf-8")]
