"""Project URLs and the README of a package index, both from one setting of pyproject.toml: the repository's address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = re.compile(r"https://github\.com/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)")
RELATIVE = r"\((?!https?:)([^)\s]*)\)"


def urls(repository: str, version: str) -> dict[str, str]:
    """The links of the project beside its description on a package index; none without a repository."""
    if not repository:
        return {}
    found = ADDRESS.fullmatch(repository)
    if found is None:
        raise ValueError(
            f"repository is {repository!r} in pyproject.toml, expected https://github.com/OWNER/NAME or ''"
        )
    return {
        "Source": repository,
        "Documentation": f"https://{found['owner'].lower()}.github.io/{found['name']}/",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def published(readme: str, repository: str, version: str) -> str:
    """The README for a package index, where relative links lead nowhere.

    They become links to the files of this version in the repository. Without a repository the text of a link stays, and
    pictures go.
    """
    if not repository:
        readme = re.sub(rf"!\[[^\]]*\]{RELATIVE}\n\n", "", readme)
        return re.sub(rf"\[([^\]]+)\]{RELATIVE}", r"\1", readme)
    readme = re.sub(rf"!\[([^\]]*)\]{RELATIVE}", rf"![\1]({repository}/raw/v{version}/\2)", readme)
    return re.sub(rf"\]{RELATIVE}", rf"]({repository}/blob/v{version}/\1)", readme)


class ProjectMetadata(MetadataHookInterface):
    """Fills in what pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, version = self.config["repository"], metadata["version"]
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = urls(repository, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": published(readme, repository, version)}
