"""What goes wrong on the SSD."""

from __future__ import annotations

from penstock.planner.common.errors import UserError
from penstock.runtime.reading.blocks import Block


class StoreError(UserError):
    """The SSD did not give what was asked of it: the line names file and offset."""


def closed() -> StoreError:
    """Somebody asks a reader that is closed."""
    return StoreError("the reader is closed; open the store again")


def cancelled(block: Block) -> StoreError:
    """The reader was closed before ``block`` was read."""
    return StoreError(f"{block.file}: read at offset {block.offset} was cancelled")
