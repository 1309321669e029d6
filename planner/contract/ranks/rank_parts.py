"""Parts of a prompt's pass that go round the ranks one behind the other, so that all of them compute."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.contract.given.model import ModelSpec

MOST_PARTS = 8
"""Of a pass for each rank, at most: the last rank waits for ranks - 1 parts of all of them."""
LEAST_TOKENS = 128
"""Of a part, where a pass has as many: a smaller one takes as long, since a card's matrix products read their weights for it."""
TILE_TOKENS = 128
"""Of which larger parts are multiples: a card's matrix products compute so many rows at a time, whether all are there or not."""


def never_in_parts(model: ModelSpec) -> str:
    """Why passes of ``model`` go through its layers as a whole; empty where they need not."""
    if model.dealt is None:
        return "all layers are of one rank"
    if model.dealt.routed:
        return "each part would fetch routed experts of its own"
    return model.kv_stays_because


def part_sizes(model: ModelSpec, rows: int) -> list[int]:
    """Tokens of a part of a pass over ``rows`` tokens that are worth trying, the largest first; none where it stays whole. Thirds would
    hide hops, for which parts wait where there are as many as ranks. Products of their rows take longer: two H100s took 12 % longer by
    thirds, four 17 % by sixths (docs/log.md, 2026-11-28)."""
    if never_in_parts(model) or model.dealt is None:
        return []
    most = MOST_PARTS * model.dealt.count
    sizes = (-(-rows // parts) for times in range(most.bit_length()) if (parts := 2 << times) <= most)
    tiled = {size if size < 2 * TILE_TOKENS else -(-size // TILE_TOKENS) * TILE_TOKENS for size in sizes if size >= LEAST_TOKENS}
    return sorted(tiled, reverse=True)


def parts_of(rows: int, part_tokens: int) -> int:
    """Parts of a pass over ``rows`` tokens, where each has at most ``part_tokens``; 0 is all of them."""
    return -(-rows // part_tokens) if part_tokens else 1


def part_lengths(rows: int, part_tokens: int) -> Sequence[int]:
    """Tokens of each of those parts: as alike as whole tiles can be, the longer ones first, since later ones attend to more."""
    parts, tile = parts_of(rows, part_tokens), TILE_TOKENS if part_tokens >= 2 * TILE_TOKENS and part_tokens % TILE_TOKENS == 0 else 1
    each, more = divmod(-(-rows // tile), parts)
    lengths = [tile * (each + (number < more)) for number in range(parts)]
    return [*lengths[:-1], rows - sum(lengths[:-1])]
