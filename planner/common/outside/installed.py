"""Which packages are installed here: the one place that asks their metadata."""

from __future__ import annotations


def installed_version(package: str) -> str | None:
    """None where ``package`` is not installed, as where a source tree is used by its path alone."""
    from importlib.metadata import PackageNotFoundError, version  # with the mail parser behind it: 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None
