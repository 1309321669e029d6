"""Which requests run together, and how long their contexts grow. Pure, without torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Conversations = Sequence[str | None]
"""Of each request; None for one that stands alone."""


def batches_of(conversations: Conversations, size: int) -> list[tuple[int, ...]]:
    """The requests' numbers in batches of up to ``size``, in order. A turn waits until the batch of the turn before it is over; later
    requests go ahead of it. No batch is larger than the first one."""
    follower: dict[int, int] = {}
    latest: dict[str, int] = {}
    ready: list[int] = []
    for k, conversation in enumerate(conversations):
        if conversation in latest:
            follower[latest[conversation]] = k
        else:
            ready.append(k)
        if conversation is not None:
            latest[conversation] = k
    batches = []
    while ready:
        batches.append(tuple(heapq.heappop(ready) for _ in range(min(size, len(ready)))))
        for k in batches[-1]:
            if k in follower:
                heapq.heappush(ready, follower[k])
    return batches


def context_tokens(conversations: Conversations, own: Sequence[int], replies: Sequence[int]) -> list[int]:
    """Prompt tokens of each request: all of the turns before it, with a reply of ``replies`` tokens to each, and its ``own``."""
    before: dict[str, int] = {}
    contexts = []
    for conversation, tokens, reply in zip(conversations, own, replies, strict=True):
        contexts.append(tokens if conversation is None else before.get(conversation, 0) + tokens)
        if conversation is not None:
            before[conversation] = contexts[-1] + reply
    return contexts
