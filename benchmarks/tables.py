"""Generate every table in results/*.md from the JSON files beside it, without measuring anything.

python -m benchmarks.tables
"""

import json

from benchmarks import _report
from benchmarks.compiled import steps


def main() -> None:
    """Write all tables."""
    for path in sorted(_report.RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        if "sections" in found:
            _report.write_sections(path)
    steps.write_tables(steps.all_records())


if __name__ == "__main__":
    main()
