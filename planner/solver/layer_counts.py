"""How many layers each of several cards gets that are unlike, or are left unlike by what lies beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.hardware import Card
from penstock.planner.solver.program import Optimum, optimum
from penstock.planner.solver.terms.problem import Question

MOVES = (4, 2, 1)
"""Layers that are tried to move from one kind of card to another, at a time."""


def with_counts(question: Question) -> Question:
    """``question`` with the layers of each rank, where its cards are unlike, or something is taken of the first one: the best found, and
    as it is where nothing fits.

    The first guess ends all links together. Then layers are moved between kinds of cards while the seconds of the slowest rank fall. Cards
    of a kind have as many layers, but for one. What has layers already is the first guess, and single ones are moved. Costs a solve a kind
    of rank for each try: some 20 tries of two kinds.
    """
    beside = any(question.taken) and not question.force.host_ffn and question.hardware.gpu is not None
    if question.ranks == 1 or not (question.hardware.others or beside):
        return question
    best = question if question.layers else replace(question, layers=_ending_together(question))
    known = {best.layers: _seconds(best)}
    found, moves = True, MOVES[-1:] if question.layers else MOVES
    while found:  # where one layer more is slower, two may be faster
        found = False
        for tried in (each for layers in moves for each in _moved(best, layers)):
            if tried.layers not in known:
                known[tried.layers] = _seconds(tried)
            if known[tried.layers] < known[best.layers]:
                best, found = tried, True
                break
    return best if known[best.layers] < float("inf") else question


def slowest(question: Question) -> Optimum | None:
    """What the fastest plan takes, of the rank that takes longest; None where any has none. A solve for each kind of rank."""
    if not question.is_unlike:
        return optimum(question)
    found: dict[object, Optimum | None] = {}
    for rank in range(question.ranks):
        asked = question.of_rank(rank)
        kind = question.kind_of(asked)
        if kind not in found:
            found[kind] = optimum(asked)
    return None if None in found.values() else max((one for one in found.values() if one is not None), key=lambda one: one.total_s)


def fastest(question: Question) -> Optimum | None:
    """:func:`slowest`, of the numbers of layers that are best."""
    return slowest(with_counts(question))


def _seconds(question: Question) -> float:
    found = slowest(question)
    return float("inf") if found is None else found.total_s


def _cards(question: Question) -> list[Card]:
    """Of each rank, its number left out, so that those of a kind are equal; the first one's with what is left of it."""
    here = question.ranks // question.hardware.hosts
    first, *others = (replace(question.hardware.card(rank % here), device=0) for rank in range(question.ranks))
    return [replace(first, vram_bytes=first.vram_bytes - question.taken[0]), *others]


def _ending_together(question: Question) -> tuple[int, ...]:
    """Layers of each rank with which all links end at the same time t: what its card holds, and its link's rate * t. Where the cards hold
    all layers, those with the fastest memory get what they hold."""
    model, cards, ranks = question.model, _cards(question), range(question.ranks)
    tokens = max(1, question.workload.batch) * question.workload.max_tokens
    layer_gb = (model.weight_bytes - model.embed_bytes - model.head_bytes + tokens * model.kv_bytes_per_token) / model.layers / GB
    holds = [max(0.0, (card.vram_bytes - card.gpu.context_bytes) / GB / layer_gb) for card in cards]
    left = model.layers - sum(holds)
    rates = [card.gpu.h2d.peak for card in cards]
    wanted = [holds[rank] + left * rates[rank] / sum(rates) for rank in ranks]
    if left <= 0:
        wanted, free = [1.0] * question.ranks, float(model.layers - question.ranks)
        for rank in sorted(ranks, key=lambda rank: -cards[rank].gpu.memory_gbps):
            more = min(free, max(0.0, holds[rank] - 1))
            wanted[rank], free = wanted[rank] + more, free - more
    counts = [max(1, int(each)) for each in wanted]
    while (short := model.layers - sum(counts)) != 0:
        rank = max(
            ranks, key=lambda rank: (wanted[rank] - counts[rank]) * (1 if short > 0 else -1) - (short < 0 and counts[rank] == 1) * 1e9
        )
        counts[rank] += 1 if short > 0 else -1
    return tuple(counts)


def _moved(question: Question, layers: int) -> Iterator[Question]:
    """``question`` with so many layers moved from one kind of card to another, for each two kinds."""
    cards = _cards(question)
    kinds = [[rank for rank, card in enumerate(cards) if card == kind] for kind in _distinct(cards)]
    for giving, taking in permutations(kinds, 2):
        counts = list(question.layers)
        for _ in range(layers):
            counts[max(giving, key=counts.__getitem__)] -= 1
            counts[min(taking, key=counts.__getitem__)] += 1
        if min(counts) > 0:
            yield replace(question, layers=tuple(counts))


def _distinct(cards: list[Card]) -> list[Card]:
    return [card for number, card in enumerate(cards) if card not in cards[:number]]
