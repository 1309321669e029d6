"""An expert on its way from the SSD, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.planner.common.measures import align_down
from penstock.runtime.reading.blocks import pieces_of
from penstock.runtime.reading.native.native_order import Order
from penstock.runtime.store.base import Extent, UnitLayout

Key = tuple[int, int]
"""(decoder layer, expert)."""


Carrying = Callable[[Key, int], Order[Sequence[Extent]] | None]
"""By which order an expert comes from the SSD to a slot of DRAM, and from there to the card; None where the consumer copies
its parts itself."""


@dataclass(eq=False, slots=True)
class Fetch:
    """An expert on its way: parts are submitted in order, and arrive in any."""

    key: Key
    slot: int
    parts: Sequence[Sequence[Extent]]
    left: int
    """Of what the consumer is told: a part, or all of an order."""
    submitted: int = 0
    under_way: int = 0
    demanded: bool = False
    dropped: bool = False
    arrived: list[int] = field(default_factory=list)
    """Parts that arrived and that the consumer has not fetched."""


SPARED = 1 / 8
"""Share of a part that may be left empty."""


def most_of(expert_bytes: int) -> int:
    """Bytes of the largest part in which an expert is brought to a card: two matrices of three. A third is left to copy when all is read,
    and the host is called twice."""
    return -(-2 * expert_bytes // 3)


def parts_of(layout: UnitLayout, most_bytes: int) -> list[tuple[Extent, ...]]:
    """The reads that bring a unit, in groups of ``most_bytes``; nothing is cut for the last :data:`SPARED` of them. The largest tensor
    comes last: what is looked at is mostly small, and is looked at while the drive reads on."""
    if sum([extent.nbytes for extent in layout.extents]) <= most_bytes:
        return [tuple(layout.extents)]
    parts: list[list[Extent]] = [[]]
    room = most_bytes
    largest = max(layout.extents, key=lambda extent: extent.nbytes)
    for extent in (*(e for e in layout.extents if e is not largest), largest):
        cut = extent.nbytes > room > most_bytes * SPARED and align_down(extent.offset + room) > extent.offset
        fits = room if cut else most_bytes
        first = next(pieces_of(extent, fits), extent)
        rest = replace(extent, offset=extent.offset + first.nbytes, nbytes=extent.nbytes - first.nbytes, dest=extent.dest + first.nbytes)
        for piece in (first, *pieces_of(rest, most_bytes)):
            if parts[-1] and piece.nbytes > room:
                parts.append([])
                room = most_bytes
            parts[-1].append(piece)
            room -= piece.nbytes
    return [tuple(part) for part in parts]
