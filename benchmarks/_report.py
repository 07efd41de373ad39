"""Rows of results: as Markdown tables in benchmarks/README.md, and as JSON."""

import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

import jax
import optax

HERE = pathlib.Path(__file__).parent
Rows = list[dict[str, Any]]


def table(rows: Rows) -> str:
    """Rows as Markdown; the columns are those of the first row."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += [
        "| " + " | ".join(_cell(row.get(name, "")) for name in columns) + " |" for row in rows
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def environment() -> dict[str, Any]:
    """Device, versions and date."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else f"cpu ({platform.machine()})",
        "cores": os.cpu_count(),
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str:
    """The last commit of the library, with `+` where there are changes."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE.parent), *words, "--", "src"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")


def write(sections: dict[str, Rows], part: str = "", **facts: Any) -> pathlib.Path:
    """Writes results/<device>.json and the tables of this device into README.md.

    With a `part`, beside those of the device in a file and in tables of their own.
    """
    about = environment() | facts
    title = f"{about['device']} {part}".strip()
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    if path.exists():  # sections and rows that were not run again stay
        sections = _merged(json.loads(path.read_text())["sections"], sections)
    path.write_text(json.dumps({"environment": about, "sections": sections}, indent=1) + "\n")
    text = f"### {title}\n\n" + ", ".join(f"{key} {value}" for key, value in about.items()) + "\n\n"
    text += "\n\n".join(f"**{title}**\n\n{table(rows)}" for title, rows in sections.items())
    replace_between(HERE / "README.md", f"results {name}", text)
    return path


def _merged(old: dict[str, Rows], new: dict[str, Rows]) -> dict[str, Rows]:
    merged = dict(old)
    for title, rows in new.items():
        by_name = {row["what"]: row for row in old.get(title, [])}
        merged[title] = list((by_name | {row["what"]: row for row in rows}).values())
    return merged


def replace_between(path: pathlib.Path, label: str, text: str) -> None:
    """Puts text between two markers, which are added at the end of the file if missing."""
    start, end = f"<!-- {label} -->", f"<!-- end of {label} -->"
    old = path.read_text() if path.exists() else ""
    if start not in old:
        old += f"\n{start}\n{end}\n"
    before, rest = old.split(start)
    path.write_text(before + f"{start}\n{text}\n{end}" + rest.split(end)[1])
