"""A rule that a plan breaks."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.decided.declared import FORCED


@dataclass(frozen=True)
class BrokenRule:
    """``message`` is one line: the value, what is allowed, the remedy."""

    name: str
    message: str

    def forced(self, keys: str) -> str:
        """What a user reads who set ``keys``. The remedy names the key to set, where a plan's own name stood."""
        place = self.message.partition("=")[0]
        key = next((one.key for one in FORCED.values() if one.place == place), None)
        remedy = f"; set {place.rpartition('.')[2]}="
        message = self.message if key is None else self.message.replace(remedy, f"; set {key}=")
        return f"{keys} breaks the rule '{self.name}': {message}"
