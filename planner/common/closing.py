"""The line of JSON that ends a verb's standard output, for programs to read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Closing:
    """What the configuration of a verb that ends so has beside its own keys."""

    json: bool | None = field(default=None, kw_only=True)
    """End standard output with one line of JSON. null: where it is no terminal."""

    def close(self, document: Mapping[str, Any]) -> None:
        """Print ``document``, the last of a verb's output. What JSON has no word for is written as text."""
        if self.json if self.json is not None else not sys.stdout.isatty():
            print(json.dumps(document, separators=(",", ":"), default=str))
