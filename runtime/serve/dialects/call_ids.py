"""Ids that a reply gives what it holds."""

from __future__ import annotations

import secrets
import string

_SIGNS = string.ascii_letters + string.digits
_CALL_SIGNS = 9
"""Mistral's templates take an id of nine letters and digits, and no other."""


def call_id(prefix: str = "call") -> str:
    """Of a call; ``prefix`` is the dialect's."""
    return f"{prefix}_{_drawn(_CALL_SIGNS)}"


def fresh_id(prefix: str) -> str:
    """Of anything else."""
    return f"{prefix}_{_drawn(24)}"


def _drawn(count: int) -> str:
    return "".join(secrets.choice(_SIGNS) for _ in range(count))
