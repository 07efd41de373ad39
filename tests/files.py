"""The repository's files: where they are, and a Python file as a module."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load(path):
    """The module in a file below the root, executed anew."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
