"""What a release needs: links from one setting, pinned actions, a tag that is the version."""

import re
import subprocess

import pytest

from files import ROOT, load

WORKFLOWS = sorted(path.name for path in (ROOT / ".github/workflows").glob("*.yml"))


def test_links_of_the_readme_become_absolute():
    hook = load("hatch_build.py")
    text = "![a](docs/a.png) [b](docs/b.md#c), [d](https://e.org) and [f](#g)"
    assert hook.absolute_links(text, "https://x.org/r", "v1") == (
        "![a](https://x.org/r/raw/v1/docs/a.png) [b](https://x.org/r/blob/v1/docs/b.md#c), "
        "[d](https://e.org) and [f](#g)"
    )
    assert hook.project_urls("") == {}
    assert hook.absolute_links("[b](docs/b.md)", "", "v1") == "[b](docs/b.md)"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_hash(name):
    text = (ROOT / ".github" / "workflows" / name).read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in used)


def test_every_trainer_is_run_by_the_workflow():
    workflow = (ROOT / ".github/workflows/trainers.yml").read_text()
    named = re.search(r"trainer: \[(.*)\]", workflow)[1].split(", ")
    paths = (ROOT / "tests/integration/trainers").glob("test_*.py")
    assert set(named) == {path.stem.removeprefix("test_") for path in paths}


@pytest.mark.parametrize("tag", ["v0.0.0", "0.1.0", ""])
def test_a_tag_that_is_not_the_version_is_refused(tag):
    command = ["make", "--silent", "check-release", f"TAG={tag}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and f"The tag is '{tag}'" in done.stdout
