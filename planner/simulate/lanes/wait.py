"""What a simulated pass waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.planner.common.errors import UserError


class Wait(NamedTuple):
    """It is over as soon as ``ready``."""

    ready: Callable[[], bool]
    what: object

    def stuck(self) -> UserError:
        """Nothing can bring it about."""
        return UserError(f"the plan is stuck before {self.what}: nothing moves and nothing computes; give it more slots or layers")
