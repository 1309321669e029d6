"""The page's files by name, read once."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

INDEX = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Of each of them: the page loads nothing from elsewhere, and nobody shows it inside another."""


@cache
def _all() -> dict[str, tuple[bytes, str]]:
    found = {}
    for file in files(__package__).iterdir():
        ending = file.name.rpartition(".")[2]
        if ending in TYPES:
            found[file.name] = (file.read_bytes(), TYPES[ending])
    return found


def page_file(name: str = INDEX) -> tuple[bytes, str] | None:
    """Content and media type of the file ``name``; None where the page has no such file. No path of the file system is made of ``name``."""
    return _all().get(name)
