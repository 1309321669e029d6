"""Words between the processes of one plan: JSON over torch.distributed's gloo, which every machine has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

FRAME = 4096
"""Bytes of a message's first part, which most messages fit in."""
_SIZE = 8
Words = dict[str, Any]


class Mail:
    """``group`` of torch.distributed, by gloo. Messages from one process come in the order in which they were told."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def tell(self, ranks: Iterable[int], words: Words) -> None:
        """Returns when each of ``ranks`` has it."""
        body = json.dumps(words, separators=(",", ":")).encode()
        head = bytearray(FRAME)
        head[:_SIZE] = len(body).to_bytes(_SIZE, "little")
        head[_SIZE : _SIZE + len(body)] = body[: FRAME - _SIZE]
        parts = [torch.frombuffer(head[:FRAME], dtype=torch.uint8)]
        if len(body) > FRAME - _SIZE:
            parts.append(torch.frombuffer(bytearray(body[FRAME - _SIZE :]), dtype=torch.uint8))
        for work in [dist.isend(part, rank, group=self._group) for rank in ranks for part in parts]:
            if work is not None:
                work.wait()

    def hear(self, rank: int) -> Words:
        """The next that ``rank`` tells; waits for it."""
        head = torch.empty(FRAME, dtype=torch.uint8)
        dist.recv(head, rank, group=self._group)
        first = head.numpy().tobytes()
        size = int.from_bytes(first[:_SIZE], "little")
        body = first[_SIZE : _SIZE + size]
        if size > len(body):
            rest = torch.empty(size - len(body), dtype=torch.uint8)
            dist.recv(rest, rank, group=self._group)
            body += rest.numpy().tobytes()
        words = json.loads(body)
        assert isinstance(words, dict)
        return words
