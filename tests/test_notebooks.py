"""Every notebook runs from top to bottom, and is stored without outputs."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_outputs_are_stripped(path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert not cell.outputs and cell.execution_count is None, (
            f"{path.name}: clear all outputs before committing; this cell has some:\n{cell.source}"
        )


@pytest.mark.slow
@each_notebook
def test_runs_from_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    # On Colab the first cell installs the package. Here it is installed, and is what we test.
    first = code_cells(notebook)[0]
    if "pip install" in first.source:
        first.source = "import gradclip_jax  # and no %pip install"
    here = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=here).execute()
    if folder := os.environ.get("NOTEBOOK_OUTPUTS"):  # the site shows them
        Path(folder).mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, Path(folder, path.name))
