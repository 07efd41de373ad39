"""Mutation testing: change one expression of the package at random, and run the tests that cover it.

    python tests/mutants.py --count 200 --out build/mutants.jsonl

Every mutant changes one place of `--src`: an operator, a constant, a condition, a `where`, a keyword
argument, a statement. The same `--src` and `--seed` always give the same mutants, so that two versions
of the tests are compared by running both with `--tests`. A first run of every test file on instrumented
code records which functions the file calls (`<out>.coverage.json`). Each mutant then runs the files that
call its function: those of the same folder first, then the fastest. Results are appended to `--out`; a
second run continues there.
"""

import argparse
import ast
import concurrent.futures
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HITS: set[str] = set()  # "path::function" of each function that ran; filled by instrumented code
FAILED: list[str] = []
OPERATORS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.FloorDiv: "/", ast.Mod: "*", ast.BitAnd: "|",
    ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip
TWINS = {"minimum": "maximum", "min": "max", "any": "all", "sum": "max", "zeros_like": "ones_like"}
TWINS |= {twin: name for name, twin in TWINS.items() if name != "sum"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def changes(node: ast.AST, in_function: bool) -> list[str]:
    """The expressions or statements that may replace a node."""
    text = ast.unparse
    match node:
        case ast.Compare(left, [op], [right]):
            return [f"({text(left)}) {OPERATORS[type(op)]} ({text(right)})"]
        case ast.BinOp(left, op, right) if type(op) in OPERATORS and (
            in_function or not isinstance(op, ast.BitOr)  # outside of functions a union of types
        ):
            return [f"({text(left)}) {OPERATORS[type(op)]} ({text(right)})"]
        case ast.BoolOp(op, values):
            return [f" {OPERATORS[type(op)]} ".join(f"({text(x)})" for x in values)]
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            return [text(operand)]
        case ast.If(test) | ast.IfExp(test) | ast.While(test):
            return [f"not ({text(test)})"]
        case ast.Constant(bool() as value):
            return [str(not value)]
        case ast.Constant(int() | float() as value):
            return [repr(value + 1), repr(value * 2 if value else value - 1)]
        case ast.Call(func, args, keywords):
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            found = []
            if name in ("where", "select") and len(args) == 3:
                found += [text(args[1]), text(args[2])]
            if name in TWINS:
                found += [text(node).replace(text(func), text(func)[: -len(name)] + TWINS[name], 1)]
            for one in (x for x in keywords if x.arg not in (None, "strict")):
                found += [text(ast.Call(func, args, [x for x in keywords if x is not one]))]
            return found
        case ast.AugAssign() | ast.Expr(ast.Call()) if in_function:
            return ["pass"]
        case _:
            return []


def sites(path: Path) -> list[tuple[str, ast.AST, str]]:
    """(name of the innermost function, node, replacement) for each possible change of a file."""
    found: list[tuple[str, ast.AST, str]] = []

    def visit(node: ast.AST, function: str, prefix: str) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom):
            return  # the text of an error, an annotation
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("_error"):
            return
        target = node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else node
        found.extend((function, target, new) for new in changes(node, bool(function)))
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            prefix += node.name + "."
            function = function if isinstance(node, ast.ClassDef) else prefix[:-1]
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue  # `zip(..., strict=True)` only asserts
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, function, prefix)

    visit(ast.parse(path.read_text(encoding="utf-8")), "", "")
    return found


def replaced(source: str, node: ast.AST, new: str) -> str:
    """The source with the text of a node replaced. AST columns count bytes."""
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    new = new if isinstance(node, ast.stmt) else f"({new})"
    return (source.encode()[:start] + new.encode() + source.encode()[end:]).decode()


def draw(package: Path, count: int, seed: int) -> list[dict]:
    """Random mutants, the same for the same package and seed."""
    every = [(path, *site) for path in sorted(package.rglob("*.py")) for site in sites(path)]
    random.Random(seed).shuffle(every)
    mutants = []
    for path, function, node, new in every:
        source, name = path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()
        mutated = replaced(source, node, new)
        try:
            compile(mutated, name, "exec")
        except SyntaxError:
            continue
        pair = source.splitlines(), mutated.splitlines()
        diff = [
            x for x in difflib.unified_diff(*pair, n=0, lineterm="") if x[:2] not in ("--", "++")
        ]
        where = f"{name}::{function}"
        mutants += [
            {"where": where, "line": node.lineno, "diff": diff, "path": name, "new": mutated}
        ]
        if len(mutants) == count:
            break
    return mutants


def instrument(package: Path) -> None:
    """Insert a statement into each function that records the call."""
    for path in package.rglob("*.py"):
        tree, name = (
            ast.parse(path.read_text(encoding="utf-8")),
            path.relative_to(package).as_posix(),
        )

        def visit(node: ast.AST, prefix: str, name: str = name) -> None:
            for child in ast.iter_child_nodes(node):
                is_named = isinstance(child, (*FUNCTIONS, ast.ClassDef))
                visit(child, prefix + child.name + "." if is_named else prefix)
            if isinstance(node, FUNCTIONS):
                hit = f"__import__('mutants').HITS.add({f'{name}::{prefix[:-1]}'!r})"
                node.body.insert(ast.get_docstring(node) is not None, ast.parse(hit).body[0])

        visit(tree, "")
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def pytest_runtest_logreport(report) -> None:  # this file is the plugin of the instrumented run
    FAILED.extend([report.nodeid] if report.failed else [])


def pytest_sessionfinish() -> None:
    if "MUTANTS_REPORT" in os.environ:
        Path(os.environ["MUTANTS_REPORT"]).write_text(json.dumps([sorted(HITS), FAILED]))


def pytest(src: Path, tests: Path, args: list[str], timeout: float, **env: str) -> tuple[int, str]:
    path = os.pathsep.join([str(src), str(Path(__file__).parent.resolve())])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-rf", *args]
    try:
        done = subprocess.run(
            command, cwd=tests.parent, env=env, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return 1, "timeout"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (lines or done.stdout.splitlines() or [done.stderr])[-1][:200]


def coverage(package: Path, tests: Path, out: Path, pool, args: argparse.Namespace) -> dict:
    """Test file to the functions that it calls, its failures without a mutant, and its seconds."""
    if out.exists():
        return json.loads(out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder)
        instrument(Path(shutil.copytree(package, src / package.name)))

        def measured(path: Path) -> tuple[str, list]:
            report, start = src / f"{path.stem}-{abs(hash(path))}.json", time.monotonic()
            selected = ["-p", "mutants", "-m", args.markers, str(path)]
            pytest(src, tests, selected, args.timeout, MUTANTS_REPORT=str(report))
            found = json.loads(report.read_text()) if report.exists() else [[], []]
            print(
                f"{time.monotonic() - start:6.1f} s {len(found[0]):4} functions, {path}", flush=True
            )
            return path.relative_to(tests.parent).as_posix(), [*found, time.monotonic() - start]

        files = [x for x in sorted(tests.rglob("test_*.py")) if "trainers" not in x.parts]
        result = dict(pool.map(measured, files))
    out.write_text(json.dumps(result))
    return result


def outcome(mutant: dict, package: Path, tests: Path, covered: dict, args) -> dict:
    where, in_function = mutant["where"], not mutant["where"].endswith("::")
    files = [
        x
        for x in covered
        if any(hit == where or (not in_function and hit.startswith(where)) for hit in covered[x][0])
    ]
    nearest = Path(mutant["path"]).parent.name
    files.sort(key=lambda path: (Path(path).parent.name != nearest, covered[path][2]))
    if not files:
        return {"killed": False, "by": "no test runs it", "seconds": 0}
    known = [f"--deselect={failed}" for x in files for failed in covered[x][1]]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(package, Path(folder) / package.name)
        (Path(folder) / package.name / mutant["path"]).write_text(mutant["new"], encoding="utf-8")
        start, limit = time.monotonic(), 60 + 4 * sum(covered[path][2] for path in files)
        code, line = pytest(Path(folder), tests, ["-x", "-m", args.markers, *known, *files], limit)
    if code not in (0, 1, 2, 5):
        raise RuntimeError(f"pytest ended with {code}: {line}")
    return {"killed": code in (1, 2), "by": line, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).parents[1]
    parser.add_argument("--src", type=Path, default=root / "src" / "gradclip_jax")
    parser.add_argument(
        "--tests", type=Path, default=root / "tests", help="the folder of the tests"
    )
    parser.add_argument("--out", type=Path, default=Path("build/mutants.jsonl"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markers", default="not slow")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one unmutated file")
    args = parser.parse_args()
    os.nice(10)
    package, tests = args.src.resolve(), args.tests.resolve()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(x) for x in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(row["where"], str(row["diff"])) for row in rows}
    mutants = [
        x for x in draw(package, args.count, args.seed) if (x["where"], str(x["diff"])) not in done
    ]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool, args.out.open("a") as file:
        covered = coverage(package, tests, args.out.with_suffix(".coverage.json"), pool, args)
        for test in (test for _, failed, _ in covered.values() for test in failed):
            print("fails without a mutant:", test)
        runs = {pool.submit(outcome, x, package, tests, covered, args): x for x in mutants}
        for run in concurrent.futures.as_completed(runs):
            mutant = runs[run]
            rows += [{key: mutant[key] for key in ("where", "line", "diff")} | run.result()]
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            print(
                "killed  " if rows[-1]["killed"] else "SURVIVED",
                mutant["where"],
                rows[-1]["by"],
                flush=True,
            )
    for row in rows:
        if not row["killed"]:
            print(
                "", f"{row['where']}, line {row['line']}: {row['by']}", *row["diff"][1:], sep="\n"
            )
    print(f"\n{sum(row['killed'] for row in rows)} of {len(rows)} mutants killed")


if __name__ == "__main__":
    main()
