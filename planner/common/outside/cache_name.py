"""By which name models of `transformers` take a cache, and give it back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

NEW, OLD = "cache", "past_key_values"
"""Since transformers 5.24, which warns of the other one, and before."""


def cache_name(forward: Callable[..., Any]) -> str:
    """That of ``forward``, of a model or of one of its modules; the older one where it names neither."""
    named = inspect.signature(forward).parameters
    return NEW if NEW in named and OLD not in named else OLD
