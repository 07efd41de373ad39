"""Metadata that follows from where the repository is: the project's URLs, the README's links.

The README links to files beside it. On a package page there are none, so the links become
absolute, at the tag of the release.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)\s]+)\)")


class RepositoryHook(MetadataHookInterface):
    """Fills in `urls` and `readme`, from `repository` in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table `[project]`."""
        version = re.search(
            r'__version__ = "(.*)"', Path(self.root, "src/gradclip_jax/_version.py").read_text()
        )
        assert version
        repository = self.config["repository"].rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute_links(readme, repository, f"v{version[1]}"),
        }
        metadata["urls"] = project_urls(repository)


def project_urls(repository: str) -> dict[str, str]:
    """What the package page lists beside the text; nothing while the repository is not known."""
    pages = {
        "Source": "",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Documentation": "/tree/main/docs",
        "Issues": "/issues",
    }
    return {name: repository + page for name, page in pages.items()} if repository else {}


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Relative links and images of a Markdown text as addresses in the repository, at a tag."""

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found["image"] else "blob"
        return f"{found['image']}[{found['text']}]({repository}/{kind}/{tag}/{found['path']})"

    return LINK.sub(absolute, text) if repository else text
