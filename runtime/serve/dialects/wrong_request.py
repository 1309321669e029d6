"""A request that cannot be answered as it stands."""

from __future__ import annotations


class WrongRequest(Exception):
    """Its client can mend it. ``message`` is one line: the value, what is allowed, the remedy."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
