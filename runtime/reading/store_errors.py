"""What goes wrong on the SSD."""

from __future__ import annotations

from penstock.planner.common.errors import UserError


class StoreError(UserError):
    """The SSD did not give what was asked of it: the line names file and offset."""
