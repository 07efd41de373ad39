"""Tests inside other people's trainers: `make test-trainers` makes an environment for each.

The suite does not collect them: its environment has none of the trainers.
"""

import os
import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if os.environ.get("TRAINER") else ["*.py"]
sys.path.append(str(Path(__file__).parent))
pytest.register_assert_rewrite("pairs")
