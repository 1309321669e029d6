"""Parts of a prompt's pass that go round the ranks one behind the other, so that all of them compute."""

from __future__ import annotations

from penstock.planner.contract.given.model import ModelSpec

MOST_PARTS = 8
"""Of a pass for each rank, at most: the last rank waits for ranks - 1 parts of all of them."""
LEAST_TOKENS = 128
"""Of a part, where a pass has as many: a smaller one takes as long, since a card's matrix products read their weights for it."""


def never_in_parts(model: ModelSpec) -> str:
    """Why passes of ``model`` go through its layers as a whole; empty where they need not."""
    if model.dealt is None:
        return "all layers are of one rank"
    if model.dealt.routed:
        return "each part would fetch routed experts of its own"
    return model.kv_stays_because


def part_sizes(model: ModelSpec, rows: int) -> list[int]:
    """Tokens of a part of a pass over ``rows`` tokens that are worth trying, the largest first; none where it stays whole."""
    if never_in_parts(model) or model.dealt is None:
        return []
    halved = (-(-rows // 2**times) for times in range(1, (MOST_PARTS * model.dealt.count).bit_length()))
    return [size for size in halved if size >= LEAST_TOKENS]


def parts_of(rows: int, part_tokens: int) -> int:
    """Parts of a pass over ``rows`` tokens, where each has ``part_tokens``; 0 is all of them."""
    return -(-rows // part_tokens) if part_tokens else 1
