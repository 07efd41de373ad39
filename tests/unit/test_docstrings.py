"""The examples in the docstrings of public names give what they show, with nothing imported before.

Run here and not by `--doctest-modules`, which does not see functions behind a decorator.
"""

import doctest
import inspect
import re

import pytest

import gradclip_jax as gcx
from public import CLASSES, FUNCTIONS, NAMED

FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\d*\.\d+)(?:e[+-]?\d+)?|[+-]?\d+e[+-]?\d+", re.IGNORECASE)
# Made by other functions, whose examples show them.
WITHOUT = {
    "diagnostics.AccumulationStats",
    "diagnostics.Incident",
    "diagnostics.Report",
    "diagnostics.Verification",
    "granularities.Granularity",
    "per_example.Stats",
}


class Approximately(doctest.OutputChecker):
    """Floats are equal if they are to the digits that the docstring shows."""

    def check_output(self, want, got, optionflags):
        shown, printed = FLOAT.findall(want), FLOAT.findall(got)
        if len(shown) == len(printed):
            pairs = zip(shown, printed, strict=True)
            alike = iter([w if is_close(w, g) else g for w, g in pairs])
            got = FLOAT.sub(lambda _: next(alike), got)
        return super().check_output(want, got, optionflags)


def is_close(shown, printed):
    mantissa, _, exponent = shown.lower().partition("e")
    digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(float(shown) - float(printed)) <= 10.0**-digits


def documented():
    """Public name to object, with the methods of public classes."""
    found = {"gradclip_jax": gcx} | NAMED
    for name, value in CLASSES.items():
        found |= {f"{name}.{x}": getattr(value, x) for x in vars(value) if not x.startswith("_")}
    return found


EXAMPLES = {
    name: doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", {}, name, None, 0)
    for name, value in documented().items()
}


@pytest.mark.parametrize("name", [name for name, test in EXAMPLES.items() if test.examples])
def test_examples_give_what_they_show(name):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    report: list[str] = []
    runner = doctest.DocTestRunner(Approximately(), verbose=False, optionflags=flags)
    runner.run(EXAMPLES[name], out=report.append)
    assert not runner.failures, "".join(report)


def test_every_public_function_and_class_shows_an_example():
    assert {x for x in FUNCTIONS | CLASSES if not EXAMPLES[x].examples} <= WITHOUT
