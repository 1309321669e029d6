"""Copies to a card that keep its link busy while something else is timed."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Protocol

import torch

from penstock.planner.common.measures import align_down

COPIED_BYTES = 64 << 20
_BEGUN = 3
"""Copies that have ended when the link is taken to be busy."""


class Copying(AbstractContextManager["Copying"], Protocol):
    """Copies to a card go on inside."""

    def gbps_within(self, start: float, end: float) -> float:
        """GB/s between two readings of ``time.perf_counter``."""


class Copies(Copying):
    """``memory``, which is page-locked, to a card over and over, on a stream of its own, while the ``with`` block runs."""

    def __init__(self, device: torch.device, memory: torch.Tensor):
        self._device = device
        self._sources = cycle(memory[: align_down(memory.nbytes, COPIED_BYTES)].split(COPIED_BYTES))
        self._stop = threading.Event()
        self._ends: list[float] = []
        self._thread = threading.Thread(target=self._copy)

    def __enter__(self) -> Copies:
        self._thread.start()
        while len(self._ends) < _BEGUN:
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def gbps_within(self, start: float, end: float) -> float:
        """GB/s between two readings of ``time.perf_counter``."""
        inside = [at for at in self._ends if start <= at <= end]
        return (len(inside) - 1) * COPIED_BYTES / 1e9 / (inside[-1] - inside[0]) if len(inside) > 1 else 0.0

    def _copy(self) -> None:
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            into = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=self._device)
            queued: list[torch.cuda.Event] = []
            while not self._stop.is_set():
                into.copy_(next(self._sources), non_blocking=True)
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > 2:
                    queued.pop(0).synchronize()
                    self._ends.append(time.perf_counter())
            stream.synchronize()
