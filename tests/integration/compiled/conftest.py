"""Puts the programs of benchmarks/, what compiles them and tests/hlo.py in reach."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]
