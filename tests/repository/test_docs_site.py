"""What the site is made from: notebooks become pages."""

import nbformat

from files import load


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
