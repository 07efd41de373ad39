"""Puts the programs of benchmarks/ and what compiles them in reach."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
