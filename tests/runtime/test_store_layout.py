"""Where parameters lie in a buffer: as close to the file's own order as their shapes allow."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.planner.common.measures import ALIGN
from penstock.runtime.moving.device_layout import alike
from penstock.runtime.reading.layout import (
    PARAMETER_ALIGN,
    READ_ALONG_BYTES,
    Extent,
    Parameter,
    Piece,
    Source,
    UnitLayout,
    lay_in_place,
    lay_packed,
)

FILE, OTHER = Path("a"), Path("b")


def whole(name: str, nbytes: int) -> Parameter:
    return Parameter(name, (nbytes // 2,), torch.bfloat16, nbytes, (Piece(name, 0, nbytes, 0),))


def assert_bytes_lie_right(layout: UnitLayout, parameters: list[Parameter], sources: dict[str, Source]) -> None:
    """Every byte of every piece is carried to its place by exactly the extents that cover it, and nothing overlaps."""
    offset_of = {t.name: t.offset for t in layout.tensors}
    carried = {}
    for e in layout.extents:
        assert e.dest >= 0 and e.dest + e.nbytes <= layout.nbytes
        for i in range(e.nbytes):
            assert e.dest + i not in carried
            carried[e.dest + i] = (e.file, e.offset + i)
    for p in parameters:
        for piece in p.pieces:
            source = sources[piece.tensor]
            for i in range(piece.nbytes):
                assert carried[offset_of[p.name] + piece.dest + i] == (source.file, source.offset + piece.offset + i)


def test_neighbours_in_a_file_are_one_extent_and_small_gaps_are_read_along() -> None:
    sources = {"x": Source(FILE, 5000), "y": Source(FILE, 5200), "z": Source(FILE, 5400 + READ_ALONG_BYTES // 2)}
    parameters = [whole("z", 100), whole("x", 200), whole("y", 200)]
    layout = lay_in_place(parameters, sources)
    assert [(e.offset, e.owns_pages) for e in layout.extents] == [(5000, True)]
    assert_bytes_lie_right(layout, parameters, sources)


def test_far_apart_and_other_files_are_extents_of_their_own_on_pages_of_their_own() -> None:
    sources = {"x": Source(FILE, 5000), "y": Source(FILE, 5200 + 3 * READ_ALONG_BYTES), "z": Source(OTHER, 5100)}
    parameters = [whole(name, 200) for name in "xyz"]
    layout = lay_in_place(parameters, sources)
    assert len(layout.extents) == 3
    pages = [set(range(e.dest // ALIGN, (e.dest + e.nbytes - 1) // ALIGN + 1)) for e in layout.extents]
    assert len(set().union(*pages)) == sum(map(len, pages))
    assert all(e.dest % ALIGN == e.offset % ALIGN for e in layout.extents)
    assert_bytes_lie_right(layout, parameters, sources)


def test_small_runs_beyond_the_largest_two_lie_behind_the_last_large_one_as_in_vram() -> None:
    """As one expert of six stacks: each run on pages of its own would take more than plans count, and a copy more."""
    sizes = {"a": 30000, "b": 16000, "c": 2000, "d": 1002, "e": 40, "f": 22}
    sources = {name: Source(FILE, 40 + 3 * READ_ALONG_BYTES * i) for i, name in enumerate(sizes)}
    parameters = [whole(name, nbytes) for name, nbytes in sizes.items()]
    layout = lay_in_place(parameters, sources)
    assert [(e.nbytes, e.owns_pages) for e in layout.extents[:2]] == [(30000, True), (16000, False)]
    assert all(e.dest % ALIGN == e.offset % ALIGN for e in layout.extents[:2])
    assert layout.nbytes <= sum(sizes.values()) + 2 * 2 * ALIGN
    assert [segment.src for segment in next(alike([layout])).segments] == [e.dest for e in layout.extents[:2]]
    assert_bytes_lie_right(layout, parameters, sources)


def test_small_runs_have_a_place_of_their_own_where_the_last_large_one_lies_oddly() -> None:
    sources = {name: Source(FILE, 40 + 3 * READ_ALONG_BYTES * i + (name == "b")) for i, name in enumerate("abc")}
    parameters = [Parameter(n, (k,), torch.uint8, k, (Piece(n, 0, k, 0),)) for n, k in (("a", 30000), ("b", 16000))] + [whole("c", 200)]
    layout = lay_in_place(parameters, sources)
    assert [e.owns_pages for e in layout.extents] == [True, True, False]
    assert layout.tensors[2].offset % PARAMETER_ALIGN == 0 and layout.tensors[1].offset % 2 == 1
    assert_bytes_lie_right(layout, parameters, sources)


def test_experts_of_whole_pages_keep_their_place_in_the_page() -> None:
    size, names = 2 * ALIGN, [f"{e}.{w}" for e in range(3) for w in ("w1", "w2", "w3")]
    sources = {name: Source(FILE, 40 + i * size) for i, name in enumerate(names)}
    gate_up = tuple(Piece(f"{e}.{w}", 0, size, (2 * e + i) * size) for e in range(3) for i, w in enumerate(("w1", "w3")))
    down = tuple(Piece(f"{e}.w2", 0, size, e * size) for e in range(3))
    parameters = [
        Parameter("gate_up", (6, ALIGN), torch.bfloat16, 6 * size, gate_up),
        Parameter("down", (3, ALIGN), torch.bfloat16, 3 * size, down),
    ]
    layout = lay_in_place(parameters, sources)
    assert all(e.dest % ALIGN == e.offset % ALIGN and not e.owns_pages for e in layout.extents)
    assert [e.offset for e in layout.extents] == sorted(e.offset for e in layout.extents)
    assert_bytes_lie_right(layout, parameters, sources)


def test_a_parameter_at_an_odd_place_of_the_file_is_moved_to_an_even_one() -> None:
    sources = {"x": Source(FILE, 5001)}
    layout = lay_in_place([whole("x", 200)], sources)
    assert layout.tensors[0].offset % 2 == 0 and not layout.extents[0].owns_pages
    assert_bytes_lie_right(layout, [whole("x", 200)], sources)


def test_a_packed_layout_is_dense_and_256_byte_aligned() -> None:
    sources = {"x": Source(FILE, 5000), "y": Source(FILE, 5200)}
    parameters = [whole("y", 300), whole("x", 200)]
    layout = lay_packed(parameters, sources)
    assert [t.offset for t in layout.tensors] == [0, 512] and layout.nbytes == ALIGN and layout.payload_bytes == 500
    assert layout.extents == (Extent(FILE, 5000, 200, 512), Extent(FILE, 5200, 300, 0))
    assert_bytes_lie_right(layout, parameters, sources)
