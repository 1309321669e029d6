"""Pages find their rows in KV buffers of any arrangement, and come back from there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.batch.contiguous import Pair
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.strips import Strips, clear, gather, gather_aside, scatter

LAYERS, BATCH, HEADS, CAPACITY, DIM, TOKENS = 4, 3, 2, 48, 32, 16
LAYER_BYTES = 2 * HEADS * TOKENS * DIM * 2
SHAPE = PageShape(bytes(16), TOKENS, LAYERS, LAYER_BYTES)


def one_block() -> list[Pair]:
    block = torch.zeros(LAYERS, 2, BATCH, HEADS, CAPACITY, DIM, dtype=torch.bfloat16)
    return [tuple(layer) for layer in block]


def keys_then_values() -> list[Pair]:
    block = torch.zeros(2, LAYERS, BATCH, HEADS, CAPACITY, DIM, dtype=torch.bfloat16)
    return list(zip(*block, strict=True))


def apart() -> list[Pair]:
    return [tuple(torch.zeros(BATCH, HEADS, CAPACITY, DIM, dtype=torch.bfloat16) for _ in "kv") for _ in range(LAYERS)]


def token_major() -> list[Pair]:
    """As layers in DRAM lie, so that a range of tokens is one range of memory."""
    block = torch.zeros(LAYERS, 2, CAPACITY, BATCH, HEADS, DIM, dtype=torch.bfloat16)
    return [tuple(layer.permute(0, 2, 3, 1, 4)) for layer in block]


def backwards() -> list[Pair]:
    return one_block()[::-1]


def uneven() -> list[Pair]:
    block = torch.zeros(2 * LAYERS, 2, BATCH, HEADS, CAPACITY, DIM, dtype=torch.bfloat16)
    return [tuple(block[i]) for i in (0, 1, 3, 7)]


ARRANGEMENTS = {one_block: 2, keys_then_values: 2, apart: 8, token_major: 2, backwards: 8, uneven: 4}
"""And the copies that each takes."""


def pages_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, SHAPE.payload_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def want(pages: torch.Tensor) -> torch.Tensor:
    """[layers, k and v, heads, tokens, dim] of consecutive pages, by the definition of a page."""
    layers = pages.view(torch.bfloat16).view(len(pages), LAYERS, 2, HEADS, TOKENS, DIM)
    return torch.cat(list(layers), 3)


def held(pairs: Sequence[Pair], sequence: int, start: int, end: int) -> torch.Tensor:
    return torch.stack([torch.stack([side[sequence, :, start:end] for side in pair]) for pair in pairs])


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
@pytest.mark.parametrize("take", [gather, gather_aside])
@pytest.mark.parametrize("count", [1, 2])
def test_pages_go_to_their_rows_and_come_back(arrange: Callable[[], list[Pair]], take: Callable, count: int) -> None:
    pairs = arrange()
    strips = Strips(SHAPE, pairs, lambda held: False)
    assert len(strips.on_host) == ARRANGEMENTS[arrange] and not strips.on_card and not strips.card_ranges
    pages, row = pages_of(count), 5
    scatter(strips.on_host, pages, 1, row)
    assert same_bits(held(pairs, 1, row, row + count * TOKENS), want(pages))
    borders = [0, row, row + count * TOKENS, CAPACITY]
    for sequence, (start, end) in itertools.product(range(BATCH), itertools.pairwise(borders)):
        touched = sequence == 1 and start == row
        assert bool(held(pairs, sequence, start, end).any()) == touched, "only the page's own rows were written"
    back = torch.zeros_like(pages)
    take(strips.on_host, back, 1, row)
    assert torch.equal(back, pages)


def test_pages_that_do_not_lie_side_by_side_are_a_strided_tensor() -> None:
    pairs = one_block()
    spaced = pages_of(4)[::2]
    scatter(Strips(SHAPE, pairs, lambda held: True).on_card, spaced, 0, 0)
    assert same_bits(held(pairs, 0, 0, 2 * TOKENS), want(spaced.clone()))


@pytest.mark.parametrize("where", [(0, 1, 2), (0, 2), (1,), (0, 1, 3)])
def test_each_layer_takes_its_part_of_a_page(where: tuple[int, ...]) -> None:
    """Some layers on the card, in an allocation of their own, the others in DRAM, token by token."""
    card = torch.zeros(len(where), 2, BATCH, HEADS, CAPACITY, DIM, dtype=torch.bfloat16)
    dram = token_major()
    pairs = [tuple(card[where.index(i)]) if i in where else dram[i] for i in range(LAYERS)]
    strips = Strips(SHAPE, pairs, lambda held: held.untyped_storage().data_ptr() == card.untyped_storage().data_ptr())
    ranges = {(0, 1, 2): [(0, 3)], (0, 2): [(0, 1), (2, 3)], (1,): [(1, 2)], (0, 1, 3): [(0, 2), (3, 4)]}[where]
    assert strips.card_ranges == [(a * LAYER_BYTES, b * LAYER_BYTES) for a, b in ranges]
    pages = pages_of(2)
    scatter(strips.on_card, pages, 2, 7)
    assert not any(held([pairs[i]], 2, 0, CAPACITY).any() for i in range(LAYERS) if i not in where)
    scatter(strips.on_host, pages, 2, 7)
    assert same_bits(held(pairs, 2, 7, 7 + 2 * TOKENS), want(pages))


def test_rows_of_padding_are_zeros() -> None:
    pairs = one_block()
    for side in (side for pair in pairs for side in pair):
        side.fill_(1)
    clear(Strips(SHAPE, pairs, lambda held: False).on_host, 1, 3)
    assert not held(pairs, 1, 0, 3).any() and held(pairs, 1, 3, CAPACITY).all() and held(pairs, 0, 0, CAPACITY).all()


def test_other_buffers_do_not_fit() -> None:
    pairs = one_block()
    strips = Strips(SHAPE, pairs, lambda held: False)
    assert strips.fits([tuple(side[:] for side in pair) for pair in pairs])
    assert not strips.fits(one_block()) and not strips.fits([tuple(side[:2] for side in pair) for pair in pairs])


@pytest.mark.parametrize("shape", [PageShape(bytes(16), TOKENS, LAYERS, 2 * LAYER_BYTES), PageShape(bytes(16), TOKENS, 8, LAYER_BYTES)])
def test_kv_of_another_shape_is_refused_in_one_line(shape: PageShape) -> None:
    with pytest.raises(UserError, match=f"{shape.layers} layers of {shape.layer_bytes} bytes for 16 tokens") as refused:
        Strips(shape, one_block(), lambda held: False)
    assert "\n" not in str(refused.value)


def test_narrow_rows_are_copied_in_narrow_words() -> None:
    narrow = [tuple(torch.zeros(1, 64, 32, 1, dtype=torch.bfloat16) for _ in "kv")]
    shape = PageShape(bytes(16), 16, 1, 4096)
    pages = torch.randint(0, 256, (2, 4096), dtype=torch.uint8)
    scatter(Strips(shape, narrow, lambda held: False).on_host, pages, 0, 0)
    wanted = torch.cat(list(pages.view(torch.bfloat16).view(2, 2, 64, 16, 1)), 2)
    assert same_bits(torch.stack([side[0] for side in narrow[0]]), wanted)
