"""The replay example: an incident is the same in another process, and rewinding undoes a bad stretch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay.py"


def run(*args):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    return folder, run("train", folder)


def test_a_fresh_process_comes_to_the_same_verdict_bit_for_bit(trained):
    folder, said = trained
    (first,) = re.findall(r"step 330: skipped.*", said)
    again = run("replay", folder / "incident")
    assert first in again and "the same verdict, bit for bit" in again


def test_with_rewinding_the_loss_is_that_of_a_clean_run_and_without_it_is_not(trained):
    losses = {
        name: float(loss) for name, loss in re.findall(r"(.+): loss (\S+)$", trained[1], re.M)
    }
    clean = [losses["clean"], losses["clean, another seed"]]
    assert losses["spoilt, with rewinding"] < max(clean) * 1.2
    assert losses["spoilt"] > 3 * max(clean)
