"""Let the repository's README be the package's long description.

The package index resolves no relative link. With `Repository` among the project's URLs, relative
links and images name it; without one, images and links that only point elsewhere are left out, and
other links become text. Absolute links and anchors stay.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = r"\[([^]]+)\]\((?!https?:|mailto:|#)([^)]+)\)"  # text, relative target


def readme(package: str) -> Path:
    """Find the README: the package's own in an sdist, else the repository's."""
    own = Path(package, "README.md")
    return own if own.exists() else Path(package, "..", "..", "README.md")


def described(text: str, repository: str | None) -> str:
    """Rewrite relative links: to the repository, or as plain text without one."""
    if repository is not None:
        text = re.sub("!" + LINK, rf"![\1]({repository}/raw/main/\2)", text)
        return re.sub(LINK, rf"[\1]({repository}/blob/main/\2)", text)
    text = text.partition("\n## Links\n")[0] + "\n"
    text = re.sub(rf"!{LINK}\n\n\*[^*]+\*\n\n", "", text)  # with its caption
    text = re.sub(rf"\s\({LINK}\)", "", text)
    return re.sub(LINK, r"\1", text)


class Readme(MetadataHookInterface):
    """Set `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read the README, and rewrite it."""
        text = described(readme(self.root).read_text("utf-8"), metadata["urls"].get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class Sdist(BuildHookInterface[Any]):
    """Put the README into an sdist, which has no repository around it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add it under its own name."""
        build_data["force_include"][str(readme(self.root).resolve())] = "README.md"
