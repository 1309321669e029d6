"""Who asks: API keys, and how much of each is under way."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import read_plain
from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.front_limits import FrontLimits

SHORTEST_KEY = 16
"""Characters. What is shorter can be guessed."""


@dataclass(frozen=True)
class Caller:
    """Whoever has one API key; all who have none are one."""

    name: str = ""
    """What the key's digest begins with: the key is nowhere kept."""

    def salt(self, cache_salt: str) -> str:
        """Requests of one salt share KV pages."""
        return f"{self.name}:{cache_salt}"


class Keys:
    """The keys that open a server; none opens it to all."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def read(cls, path: Path) -> Keys:
        """One key a line; a line that begins with # is none. UserError where there is none, or one that can be guessed."""
        try:
            lines = [line.strip() for line in read_plain(path).decode().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"keys={path}: cannot be read ({why}); give a file with one API key a line") from error
        found = []
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            if len(line) < SHORTEST_KEY or not line.isascii() or not line.isprintable() or " " in line:
                allowed = f"an API key has {SHORTEST_KEY} ASCII characters or more and no spaces"
                raise UserError(f"{path}, line {number}: {allowed}; make one with: openssl rand -hex 24")
            found.append(line)
        if not found:
            raise UserError(f"{path}: no API key in it; write one a line, made with: openssl rand -hex 24")
        return cls(found)

    def caller(self, given: str | None) -> Caller | None:
        """Whose key ``given`` is; None: nobody's. Takes the same time for each wrong key, however much of it is right."""
        if not self._digests:
            return Caller()
        digest = hashlib.sha256((given or "").encode("utf-8", "surrogateescape")).digest()
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        return Caller(digest.hex()[:16]) if any(known) else None


class Crowd:
    """Requests of each caller: how many are under way, how many of them wait."""

    def __init__(self, limits: FrontLimits):
        self._limits = limits
        self._under_way: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    @property
    def under_way(self) -> int:
        """Of all callers."""
        return self._under_way.total()

    def enter(self, caller: Caller) -> None:
        """One more, that waits. ApiError 429 where its key has enough."""
        for counted, limit, what in (
            (self._under_way, self._limits.requests_per_key, "under way"),
            (self._waiting, self._limits.waiting_per_key, "waiting"),
        ):
            if counted[caller.name] >= limit:
                raise ApiError(
                    429, f"{limit} requests of this key are {what}; wait until one is answered", code="too_many_requests", retry_after_s=1
                )
        self._under_way[caller.name] += 1
        self._waiting[caller.name] += 1

    def began(self, caller: Caller) -> None:
        """One of those that waited does not any more."""
        self._take(self._waiting, caller)

    def leave(self, caller: Caller, waited: bool) -> None:
        """One is over; ``waited``: it never began."""
        self._take(self._under_way, caller)
        if waited:
            self._take(self._waiting, caller)

    @staticmethod
    def _take(counted: Counter[str], caller: Caller) -> None:
        counted[caller.name] -= 1
        if counted[caller.name] <= 0:
            del counted[caller.name]
