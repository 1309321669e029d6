"""How a model is served, and the lines that a server tells."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.runtime.serve.front.front_limits import FrontLimits


@dataclass(frozen=True)
class Served:
    """How a model is served, checked already."""

    name: str
    host: str = "127.0.0.1"
    port: int = 0
    keys: Path | None = None
    local_only: bool = True
    """Only this machine's own names are answered to."""
    origins: tuple[str, ...] = ()
    drain_s: float = 30.0
    hang_s: float | None = None
    """Silence of the engine that is taken for a hang; None: by the plan."""
    limits: FrontLimits = field(default_factory=FrontLimits)
    template: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template."""


def tell(line: str) -> None:
    """A line for the log: standard error."""
    print(f"runtime: {line}", file=sys.stderr, flush=True)
