"""Writes notebooks as pages, with the outputs that `make notebooks` stored in them.

The only argument is the output folder, docs/notebooks.
"""

import base64
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]


def as_page(notebook: nbformat.NotebookNode, stem: str, folder: Path) -> str:
    """Convert a notebook to Markdown; images are written to files in the same folder."""
    parts, pictures = [], 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../docs/", "](../"))
        elif "%pip install" in cell.source:
            continue
        elif cell.cell_type == "code":
            # `py`, not `python`: blocks of `python` in pages are run by the tests.
            parts.append(f"```py\n{cell.source}\n```")
            for output in cell.outputs:
                data = output.get("data", {})
                if "image/png" in data:
                    pictures += 1
                    name = f"{stem}_{pictures}.png"
                    (folder / name).write_bytes(base64.b64decode(data["image/png"]))
                    parts.append(f"![Output {pictures} of {stem}]({name})")
                elif text := output.get("text") or data.get("text/plain"):
                    parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stored in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(stored, as_version=4)
        page = folder / f"{stored.stem}.md"
        page.write_text(as_page(notebook, stored.stem, folder), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
