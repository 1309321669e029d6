"""How the origin of a figure is written where nobody measured it: set by hand, or not to be had."""

from __future__ import annotations

BY_HAND = "set by hand"
"""Origin of a figure that the command line set."""

UNMEASURED = "not measured: "
"""How the origin of a figure begins that could not be measured; the figure itself is then 0, or a table without rows."""


def unmeasured(origin: dict[str, str]) -> dict[str, str]:
    """Figure -> why, for those that ``origin`` says were not measured."""
    return {path: text.removeprefix(UNMEASURED) for path, text in origin.items() if text.startswith(UNMEASURED)}
