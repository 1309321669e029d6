"""Where a token's experts lie, as recorded kernels read it."""

from __future__ import annotations

import torch

from penstock.runtime.experts.products.expert_table import APART, ExpertTable
from penstock.runtime.experts.products.expert_views import PlacedTensors, SlotViews
from penstock.runtime.reading.layout import TensorLayout

CPU = torch.device("cpu")
SLOT = 4 * APART


def laid(*places: tuple[str, int]) -> tuple[TensorLayout, ...]:
    return tuple(TensorLayout(name, (16,), torch.uint8, offset, 16) for name, offset in places)


USUAL = laid(("down", 512), ("up", 0))


def slots(count: int) -> list[torch.Tensor]:
    """Behind each other, at multiples of ``APART`` from the first."""
    return list(torch.zeros(count * SLOT, dtype=torch.uint8).split(SLOT))


def placed(slot: torch.Tensor, tensors: tuple[TensorLayout, ...] = USUAL) -> PlacedTensors:
    return SlotViews({(0, 0): tensors}).of((0, 0), 0, slot)


def test_kernels_find_where_the_experts_of_this_launch_lie() -> None:
    held = slots(5)
    table = ExpertTable(3, placed(held[2]), CPU, lambda host: host)
    for chosen in ((0, 4, 2), (1, 3, 0)):
        assert table.fill([placed(held[slot]) for slot in chosen])
        table.fetch()
        assert table.numbers.tolist() == [4 * (slot - 2) for slot in chosen]


def test_experts_that_lie_otherwise_have_no_place_in_it() -> None:
    held = slots(3)
    table = ExpertTable(2, placed(held[0]), CPU, lambda host: host)
    usual = placed(held[1])
    assert table.fill([usual, usual])
    table.fetch()
    others = [
        placed(held[2], laid(("down", 256), ("up", 0))),
        placed(held[2], laid(("down", 0), ("up", 512))),
        placed(held[2], laid(("down", 512), ("gate", 0))),
        placed(held[2][16:]),
    ]
    for other in others:
        assert not table.fill([usual, other])
    assert not table.fill([usual]) and not table.fill([usual, usual, usual])
    table.fetch()
    assert table.numbers.tolist() == [4, 4], "what was refused is not half written"
