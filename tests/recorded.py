"""The numbers in data/authors_numbers.json: what the authors' own code gives. No JAX in here."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PATH = Path(__file__).parent / "data" / "authors_numbers.json"


class Recording(NamedTuple):
    """One run of the authors' code.

    Attributes:
        given: the hyper-parameters it ran with.
        norms: float64[steps], the norms it saw, or None.
        leaves: for each leaf float64[steps, ...], the gradients it saw, or None.
        gave: what it gave; NaN where there was no value.
        raw: inputs and outputs as they are in the file.
    """

    given: dict[str, Any]
    norms: Any
    leaves: Any
    gave: dict[str, Any]
    raw: dict[str, Any]


@functools.cache
def _file() -> dict[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def names(method: str) -> list[str]:
    return [entry["name"] for entry in _file()["entries"] if entry["method"] == method]


def recording(method: str, name: str) -> Recording:
    (entry,) = (e for e in _file()["entries"] if (e["method"], e["name"]) == (method, name))
    shared, inputs = _file()["shared"], entry["inputs"]
    norms = leaves = None
    if "norms" in inputs:
        norms = numbers(shared["norm_sequences"][inputs["norms"]])[: inputs.get("first")]
    if "leaves" in inputs:
        steps = inputs["leaves"] if inputs["leaves"] != "adagc_leaves" else shared["adagc_leaves"]
        leaves = by_leaf(steps[: inputs.get("first")])
    return Recording(entry["hyper_parameters"], norms, leaves, entry["outputs"], entry)


def numbers(values: Any) -> np.ndarray:
    """A nested list as float64; NaN for what is not there."""
    return np.asarray(values, dtype=object).astype(np.float64)


def by_leaf(steps: Any) -> list[np.ndarray]:
    """`steps[step][leaf]` as one array `[step, ...]` for each leaf."""
    return [numbers(leaf) for leaf in zip(*steps, strict=True)]
