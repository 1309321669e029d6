"""A model of eight tokens and two drafts: how often each reply to them must be drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

TEMPERATURE, TOP_K, DRAWS = 0.9, 6, 100_000
LOGITS = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) * 1.5
"""[places, tokens]: behind the text, behind the first draft, behind both."""
DRAFTS = [int(LOGITS[0].argmax()), int(LOGITS[1].topk(2).indices[1])]


def probabilities() -> dict[tuple[int | None, ...], float]:
    """Of each reply: the drafts that were kept, and the token behind them."""
    best = torch.topk(LOGITS / TEMPERATURE, TOP_K)
    first, second, last = torch.zeros(3, 8).scatter(1, best.indices, torch.softmax(best.values, -1)).double().tolist()
    kept, both = first[DRAFTS[0]], first[DRAFTS[0]] * second[DRAFTS[1]]
    expected: dict[tuple[int | None, ...], float] = {(t,): p for t, p in enumerate(first) if t != DRAFTS[0]}
    expected |= {(DRAFTS[0], t): kept * p for t, p in enumerate(second) if t != DRAFTS[1]}
    expected |= {(*DRAFTS, t): both * p for t, p in enumerate(last)}
    return {reply: p for reply, p in expected.items() if p}


def hold_to_the_model(draw: Callable[[], Iterable[tuple[int | None, ...]]]) -> None:
    """``draw`` gives replies; it is asked until there are :data:`DRAWS` tokens. Raises AssertionError where their shares are others."""
    counts, expected = Counter[tuple[int | None, ...]](), probabilities()
    while sum(len(reply) * count for reply, count in counts.items()) < DRAWS:
        counts.update(draw())
    total, freedom = counts.total(), len(expected) - 1
    assert set(counts) == set(expected)
    chi = sum((counts[reply] - total * p) ** 2 / (total * p) for reply, p in expected.items())
    assert chi < freedom + 5 * (2 * freedom) ** 0.5  # five deviations of a chi-squared variable
