"""What is uploaded: one version, addresses from one setting, an sdist whose tests can run."""

import re
import subprocess
import sys
import tarfile
import tomllib
from importlib import util
from pathlib import Path

import pytest

import gradclip_jax as gcx

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted(path.name for path in (ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def hook():
    spec = util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    command = ["-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        yield archive


def shipped(archive):
    return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
def test_version_is_written_in_one_place(sdist):
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert sdist.getnames()[0].startswith(f"gradclip_jax-{gcx.__version__}/")


def test_citation_has_the_version_of_the_package():
    found = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert found[1] == gcx.__version__


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["src", "tests", "docs", "examples", "benchmarks", "notebooks"])
def test_sdist_holds_every_file_that_the_tests_read(sdist, folder):
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in {".py", ".md", ".ipynb", ".json", ".png", ".typed"}
    }
    generated = "docs/notebooks/"
    left_out = {x for x in files - shipped(sdist) if "/." not in x and not x.startswith(generated)}
    assert not left_out


def test_sdist_holds_what_the_commands_read(sdist):
    wanted = {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "hatch_build.py", "mkdocs.yml"}
    assert wanted <= shipped(sdist)


def test_links_of_the_readme_become_absolute(hook):
    text = "![a](docs/a.png) [b](docs/b.md#c), [d](https://e.org) and [f](#g)"
    assert hook.absolute_links(text, "https://x.org/r", "v1") == (
        "![a](https://x.org/r/raw/v1/docs/a.png) [b](https://x.org/r/blob/v1/docs/b.md#c), "
        "[d](https://e.org) and [f](#g)"
    )


def test_without_an_address_there_are_no_links(hook):
    assert hook.project_urls("") == {}
    assert hook.absolute_links("[b](docs/b.md)", "", "v1") == "[b](docs/b.md)"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_hash(name):
    text = (ROOT / ".github" / "workflows" / name).read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in used)


def test_a_release_is_tried_on_every_python_it_is_for():
    workflow = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    versions = {x.split()[-1] for x in PROJECT["project"]["classifiers"] if "Python :: 3." in x}
    tried = re.search(r'check-package PYTHONS="(.*)"', workflow)[1].split()
    assert {f"python{version}" for version in versions} == set(tried)


def test_every_trainer_is_run_by_the_workflow():
    makefile = (ROOT / "Makefile").read_text()
    listed = re.search(r"^TRAINERS \?= (.*)$", makefile, re.MULTILINE)[1].split()
    workflow = (ROOT / ".github" / "workflows" / "trainers.yml").read_text()
    files = {
        path.stem.removeprefix("test_")
        for path in (ROOT / "tests/integration/trainers").glob("test_*.py")
    }
    assert set(listed) == files
    assert set(re.search(r"trainer: \[(.*)\]", workflow)[1].split(", ")) == files


@pytest.mark.parametrize("tag", ["v0.0.0", "0.1.0", ""])
def test_a_tag_that_is_not_the_version_is_refused(tag):
    command = ["make", "--silent", "check-release", f"TAG={tag}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and f"The tag is '{tag}'" in done.stdout
