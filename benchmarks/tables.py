"""Generate every table in results/*.md from the JSON files beside it, without measuring anything.

python -m benchmarks.tables
"""

import json

from benchmarks import _report
from benchmarks.compiled import steps
from benchmarks.per_example import compiled as per_example


def main() -> None:
    """Write all tables."""
    for path in sorted(_report.RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        if "sections" in found:
            _report.write_sections(path)
    steps.write_tables(steps.all_records())
    per_example.write_table()


if __name__ == "__main__":
    main()
