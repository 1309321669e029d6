"""What `mkdocs.yml` cannot say: README.md is a page of the site, and a link to a file that is no page is the file's name."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = "readme.md"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Headings get the anchors that GitHub gives them."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"] = {"slugify": slugify(case="lower"), "permalink": True}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add README.md."""
    from mkdocs.structure.files import File

    text = relinked((ROOT / "README.md").read_text(encoding="utf-8"), "", "docs")
    files.append(File.generated(config, README, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that lead out of ``docs/``."""
    return markdown if page.file.src_uri == README else relinked(markdown, "docs", "docs")


def relinked(text: str, folder: str, site: str) -> str:
    """``text`` of a page in ``folder`` with its links as they are on a site of the pages in ``site``: README.md is ``readme.md`` there, and
    what is no page stands without a link."""

    def replace(match: re.Match[str]) -> str:
        image, label, link = match.groups()
        target, hash_, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "README.md":
            return f"{image}[{label}]({README}{hash_}{anchor})"
        if path.startswith(site + "/") and not path.endswith(".py"):
            return f"{image}[{label}]({path.removeprefix(site + '/')}{hash_}{anchor})"
        return label if label.startswith("`") else f"`{label}`"

    return LINK.sub(replace, text)
