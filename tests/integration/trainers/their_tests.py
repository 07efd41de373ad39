"""Run a trainer's own tests with an adapter of this package in the place of a part of the trainer.

    python their_tests.py tunix FOLDER

FOLDER has their tests: an unpacked archive of PyPI, or a clone where the archive has no tests. The
modules in `adapters` name what they replace, the tests of that part, the number of these tests that
pass, and the tests that cannot pass, with the difference that is documented for each. `TESTS_ON_8`
need several devices. `gain`, if an adapter has it, measures a run with their part and with ours.
"""

import ast
import collections
import functools
import importlib
import inspect
import os
import sys
import textwrap

import pytest


def code_lines(source):
    """Number of lines of code: without empty lines, comments and docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
            node
        ):
            docs.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(textwrap.dedent(source).splitlines(), 1)
    return sum(n not in docs and line.strip()[:1] not in ("", "#") for n, line in lines)


def adapter_lines(source):
    """Number of lines of code of an adapter: its functions and classes."""
    parts = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef))
    parts = (part for part in parts if part.name != "gain")
    return sum(code_lines(ast.get_source_segment(source, part)) for part in parts)


class Replaced:
    """A pytest plugin that puts the adapter in its place and counts its calls."""

    def __init__(self, adapter):
        self.adapter, self.calls, self.lines = adapter, collections.Counter(), 0
        self.gain, self.gains = getattr(adapter, "gain", lambda part: ""), []
        self.outcomes, self.flags = collections.Counter(), os.environ.get("XLA_FLAGS", "")
        owners = {}
        for place in adapter.REPLACES:
            module, _, name = place.partition(":")
            *path, name = name.split(".")
            owners[place] = functools.reduce(getattr, path, importlib.import_module(module)), name
            theirs = getattr(*owners[place])
            self.lines += code_lines(inspect.getsource(theirs))
            self.gains.append(self.gain(theirs))
        for place, ours in adapter.REPLACES.items():
            self.calls[place] = 0
            self.gains.append(self.gain(ours))
            setattr(*owners[place], self.counted(place, ours))

    def counted(self, place, ours):
        if isinstance(ours, type):
            if "__init__" in vars(ours):
                ours.__init__ = self.counted(place, ours.__init__)
            return ours

        @functools.wraps(ours)
        def call(*args, **kwargs):
            self.calls[place] += 1
            return ours(*args, **kwargs)

        return call

    def pytest_collection_modifyitems(self, items):
        os.environ["XLA_FLAGS"] = self.flags  # a test module may set its own number of devices
        for item in items:
            if item.name in self.adapter.DIFFERENCES:
                reason = self.adapter.DIFFERENCES[item.name]
                # On eight devices, a test that needs one may return before it checks anything.
                strict = "device_count=8" not in self.flags
                item.add_marker(pytest.mark.xfail(reason=reason, strict=strict))

    def pytest_runtest_logreport(self, report):
        if type(report) is not pytest.TestReport:
            return  # a part of a test
        if report.when == "call" or report.outcome != "passed":
            self.outcomes["differ" if hasattr(report, "wasxfail") else report.outcome] += 1


def main(name, folder):
    adapter = importlib.import_module(f"adapters.{name}")
    os.chdir(folder)
    plugin = Replaced(adapter)
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir=."]
    on_8, is_on_8 = getattr(adapter, "TESTS_ON_8", []), "device_count=8" in plugin.flags
    status = pytest.main([*options, *adapter.TESTS, *(on_8 * is_on_8)], plugins=[plugin])
    lines = adapter_lines(inspect.getsource(adapter))
    passed, differ = plugin.outcomes["passed"], plugin.outcomes["differ"]
    print(f"{name}: {dict(plugin.outcomes)}, calls {dict(plugin.calls)}")
    gained = " -> ".join(dict.fromkeys(filter(None, plugin.gains)))
    print(f"| {name} | {plugin.lines} | {lines} | {passed} of {passed + differ} | {gained} |")
    not_run = [] if is_on_8 else [x for x in on_8 if x.split("::")[-1] not in adapter.DIFFERENCES]
    return status or not plugin.calls.total() or passed != adapter.PASSED - len(not_run)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
