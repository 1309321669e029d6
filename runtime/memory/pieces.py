"""The copies that bring a unit from its DRAM layout to its VRAM layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segment:
    """One contiguous piece of a unit: ``nbytes`` from ``src`` in its DRAM layout to ``dst`` in its VRAM layout."""

    src: int
    dst: int
    nbytes: int


def cut(segments: Iterable[Segment], chunk: int) -> Iterator[Segment]:
    """``segments`` in pieces of at most ``chunk`` bytes; one of no bytes stays one."""
    for segment in segments:
        for start in range(0, max(1, segment.nbytes), chunk):
            yield Segment(segment.src + start, segment.dst + start, min(chunk, segment.nbytes - start))


def within(segments: Iterable[Segment], start: int, nbytes: int) -> Iterator[Segment]:
    """What of ``segments`` comes from ``nbytes`` of the DRAM layout from ``start`` on."""
    end = start + nbytes
    for s in segments:
        src, until = s.src, s.src + s.nbytes
        if src >= end or until <= start or src == until:
            continue
        if start <= src and until <= end:
            yield s
        else:
            first = max(src, start)
            yield Segment(first, s.dst + first - src, min(until, end) - first)


class Parts:
    """Parts of buffers as they were last asked for: to take them anew for every copy costs the host more than the copy."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], tuple[int, int, torch.Tensor]] = {}

    def part(self, key: tuple[int, int, int], buffer: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
        """``nbytes`` of ``buffer``, which is always the same one for ``key``, from ``start`` on."""
        known = self._known.get(key)
        if known is None or known[:2] != (start, nbytes):
            known = self._known[key] = start, nbytes, buffer[start : start + nbytes]
        return known[2]
