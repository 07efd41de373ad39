"""The benchmarks run: on small trees, for what they print, not for how fast they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
QUICK = {
    "suite.py --only Guards": ("skip_nonfinite, apply_gradients", "optax.apply_if_finite"),
    "devices.py": ("8 devices: gcx, jit", "1 all-reduce"),
    "rounding.py": ("bfloat16, stochastic", "| float32 |"),
    "per_example_speed.py": ("clipped_value_and_grad", "CPU ms per example"),
    "end_to_end.py": ("gcx.accumulate_gradients", "optax.MultiSteps"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", QUICK)
def test_script_prints_its_tables(script):
    name, *options = script.split()
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, str(FOLDER / name), *options, "--quick"]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert printed.returncode == 0, printed.stderr[-3000:]
    for words in QUICK[script]:
        assert words in printed.stdout
