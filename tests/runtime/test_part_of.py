"""An expert's part of its layer's pieces is found without looking at the others': a layer may have a thousand of them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.reading.layout import Piece
from penstock.runtime.store.tensor_parts import part_of


class Counted(list[Piece]):
    """How often an item was looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("expert", [0, 1, 500, 1023])
def test_one_of_many_experts_is_found_at_once(expert: int) -> None:
    pieces = Counted(Piece(f"{e}", 8, 100, 100 * e) for e in range(1024))
    assert part_of(pieces, 100 * expert, 100) == (Piece(f"{expert}", 8, 100, 0),)
    assert pieces.looks <= 20


def test_a_part_may_begin_and_end_inside_pieces() -> None:
    pieces = [Piece("a", 0, 30, 0), Piece("b", 5, 30, 30), Piece("c", 7, 30, 60)]
    assert part_of(pieces, 20, 50) == (Piece("a", 20, 10, 0), Piece("b", 5, 30, 10), Piece("c", 7, 10, 40))
