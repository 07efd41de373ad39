"""Compile whole training steps for an H100 and for TPUs, without the device: ours beside Optax's.

`make bench-compiled` runs it in one environment for each platform. A step is the loss, the backward
pass, our transformation or Optax's, and AdamW; parameters and state are donated. A step that
results/steps-compiled.json already has for this commit and these versions is not compiled again.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks import _report
from benchmarks._models import MODELS, Model, ppo
from benchmarks._rows import NOTHING, OPTAX, ROWS, Maker, Step
from benchmarks.compiled import _devices, _sharded
from benchmarks.compiled._hlo import Counts, describe_collectives

Record = dict[str, Any]
PATH = _report.RESULTS / "steps-compiled.json"
NAMES = {"cuda": "H100", "tpu": "TPU v5e", "cpu": "CPU"}
PACKAGES = {"cuda": "jax-cuda12-plugin", "tpu": "libtpu", "cpu": "jaxlib"}
# The largest ratio to Optax's value, and the largest difference beyond it.
GOALS = {
    "bytes, N": (1.01, 0.0),
    "launches": (1.10, 0.0),
    "host stops": (1.0, 0.0),
    "scratch, N": (1.0, 0.1),
    "trace + compile, s": (1.15, 0.0),
}
# Columns with the ratio of ours to a step with nothing.
BESIDE_NOTHING = {"bytes / nothing": "bytes, N", "launches / nothing": "launches"}
GOALS_OF = {"PPO": {"launches": (1.05, 0.0)}}


def measure(step: Step, model: Model, platform: str, mesh: Mesh | None = None) -> Record:
    """The columns of one step."""
    found, size = compile_step(step, model, platform, mesh)
    program = found.program
    phases = {"": program.all, "held": program.held, "emitted": program.emitted}
    return {
        "phases": {name: _columns_of(counts, size) for name, counts in phases.items()},
        "collectives": describe_collectives(program.all),
        "host stops": program.stops,
        "scratch, N": round(found.scratch / size, 3),
        "trace s": round(found.trace_seconds, 2),
        "compile s": round(found.compile_seconds, 2),
    }


def compile_step(
    step: Step, model: Model, platform: str, mesh: Mesh | None = None
) -> tuple[_devices.Compiled, int]:
    """The program of a step on one device or a mesh, and the bytes of parameters on a device."""
    state, size, out = step.state(model.params), model.size, None
    if mesh is None:
        args = _devices.placed((model.params, state, model.batch), _devices.one_device(platform))
    else:
        args, size = _sharded.placed(model, state, mesh)
        out = (*(jax.tree.map(lambda x: x.sharding, tree) for tree in args[:2]), None)
    found = _devices.compile_for(platform, step.run, *args, donate=(0, 1), out_shardings=out)
    return found, size


def _columns_of(counts: Counts, size: int) -> Record:
    return {
        "bytes, N": round(counts.moved / size, 3),
        "launches": counts.launches,
    }


def chosen(platform: str, only: list[str]) -> Iterator[tuple[str, str, str, Maker]]:
    """Device, title of the model, name of the step, and what makes it."""
    device = NAMES[platform]
    for title in MODELS:
        fits = {
            name: row
            for name, row in ROWS.items()
            if all(_matches((device, title, name), part) for part in only)
        }
        counterparts = {row.theirs for row in fits.values()} | {NOTHING}
        for name in (name for name in OPTAX if fits and name in counterparts):
            yield device, title, f"optax {name}", OPTAX[name]
        for name, row in fits.items():
            yield device, title, f"gcx {name}", row.ours


def _matches(words: tuple[str, ...], only: str) -> bool:
    """Whether each part between colons is one of the words: `PPO:skip_spikes`, `H100`."""
    return all(part.strip() in words for part in only.split(":"))


def main() -> None:
    """Compiles what is chosen and not known yet, and writes results and tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="DEVICE:MODEL:ROW", help="or parts of it"
    )
    parser.add_argument("--again", action="store_true", help="also what is known")
    parser.add_argument("--results", type=pathlib.Path, default=PATH, help="of other results")
    options = parser.parse_args()
    platform = _devices.available() or "cpu"
    package = PACKAGES[platform]
    versions = {"jax": jax.__version__, "optax": metadata.version("optax")}
    versions[package] = metadata.version(package)
    commit = _report.commit()
    records: Record = json.loads(options.results.read_text()) if options.results.exists() else {}
    measure(OPTAX[NOTHING](ppo()), ppo(), platform)  # starts the compiler
    for device, title, name, maker in chosen(platform, options.only):
        key = f"{device}: {title}: {name}"
        # Optax's is the same at every commit of ours.
        about = {"device": device, **versions, **({"commit": commit} if name[:3] == "gcx" else {})}
        known = records.get(key, {}).get("about") == about and not options.again
        print(f"{key}{', known' if known else ''}", flush=True)
        if known:
            continue
        model = MODELS[title]()
        found = measure(maker(model), model, platform)
        print(f"  {json.dumps(found)}", flush=True)
        records[key] = {"about": about, **found}
        options.results.write_text(json.dumps(records, indent=1) + "\n")
    if options.results.parent == _report.RESULTS:
        write_tables(all_records())


def all_records() -> Record:
    """The records of all files: of an H100 and TPUs, and of a CPU."""
    found: Record = {}
    for path in sorted(_report.RESULTS.glob("steps-compiled*.json")):
        found |= json.loads(path.read_text())
    return found


def write_tables(records: Record) -> None:
    """Generate the tables of all devices."""
    sections: list[str] = []
    for device in NAMES.values():
        for title in MODELS:
            rows = list(_rows(records, f"{device}: {title}"))
            if rows:
                sections.append(f"**{title}, {device}**\n\n{_report.table(rows)}")
    commits: dict[str, set[str]] = {}
    for record in records.values():
        words = [f"{key} {value}" for key, value in record["about"].items() if key != "commit"]
        commits.setdefault(", ".join(words), set()).add(record["about"].get("commit", ""))
    made = ((about, ", ".join(sorted(own - {""}))) for about, own in sorted(commits.items()))
    versions = [f"{about}, commits {own}; seconds depend on the load" for about, own in made]
    _report.write_page("steps-compiled", "\n\n".join([*sections, *versions]))


def _rows(records: Record, prefix: str) -> Iterator[Record]:
    alone = records.get(f"{prefix}: optax {NOTHING}")
    if alone:
        nothing = _columns(alone, "")
        cells = {goal: f"{nothing[goal]:.4g}" for goal in GOALS}
        yield {"step": NOTHING} | cells | dict.fromkeys(BESIDE_NOTHING, "1")
    for name, row in ROWS.items():
        pair = [records.get(f"{prefix}: {x}") for x in (f"gcx {name}", f"optax {row.theirs}")]
        for phase in ("held", "emitted") if row.accumulates else ("",):
            if all(pair):
                # Optax always runs the optimizer.
                ours, theirs = _columns(pair[0], phase), _columns(pair[1], "")
                columns = {"step": f"`{name}` {phase}".strip()}
                model = prefix.split(": ")[1]
                columns |= {goal: cell(goal, ours[goal], theirs[goal], model) for goal in GOALS}
                for title, column in BESIDE_NOTHING.items() if alone else ():
                    columns[title] = f"{ours[column] / nothing[column]:.3f}"
                yield columns


def _columns(record: Record, phase: str) -> Record:
    seconds = round(record["trace s"] + record["compile s"], 2)
    return record | record["phases"][phase] | {"trace + compile, s": seconds}


def cell(goal: str, ours: float, theirs: float, model: str = "") -> str:
    """Ours / Optax's; in bold and with the ratio where the goal is missed."""
    times, more = (GOALS | GOALS_OF.get(model, {}))[goal]
    text = f"{ours:.4g} / {theirs:.4g}"
    if ours <= times * theirs + more:
        return text
    return f"**{text}**" + (f" ({ours / theirs:.2f} x)" if theirs else "")


if __name__ == "__main__":
    main()
