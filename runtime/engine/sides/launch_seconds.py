"""How long the host takes to launch a pass that no graph holds."""

from __future__ import annotations

from array import array
from statistics import median
from typing import Any


class LaunchSeconds:
    """Of passes on a card: seconds from a pass's beginning until all of it is launched, apart for those with prompts. A card that is
    behind does not count, but where its queue is full, or where the host waits for what routers choose. Takes 8 bytes a pass."""

    def __init__(self) -> None:
        self._seconds = {"prompts": array("d"), "steps": array("d")}

    def note(self, has_prompt: bool, seconds: float) -> None:
        """A pass was launched."""
        self._seconds["prompts" if has_prompt else "steps"].append(seconds)

    def facts(self) -> dict[str, Any]:
        """For the report: of each kind how many passes, and seconds of the first one and of a usual one; None where there was none."""
        return {
            kind: {"passes": len(each), "first_s": each[0], "median_s": median(each)} if each else None
            for kind, each in self._seconds.items()
        }
