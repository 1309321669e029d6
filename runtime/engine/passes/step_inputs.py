"""A pass's numbers (token ids, positions, page tables) brought to the compute device."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.model.rows import Step

_LONG = 32
"""Numbers in a row from which on NumPy counts them sooner."""


class StepInputs(Protocol):
    """Brings numbers to the device."""

    def put(self, numbers: Sequence[int]) -> torch.Tensor:
        """``numbers`` as int64 on the device, for kernels issued from now on."""


class CopiedInputs:
    """By a copy: at once on the CPU, behind whatever else the link carries on a card."""

    def __init__(self, device: torch.device):
        self._device = device

    def put(self, numbers: Sequence[int]) -> torch.Tensor:
        return _int64(numbers).to(self._device)


class MappedInputs:
    """Through page-locked memory that a kernel reads in place, which waits for no copy of weights. Up to ``most`` numbers a time; more are
    copied.

    Costs ``buffers`` * ``most`` * 8 bytes of page-locked DRAM. The host waits only where the device is as many passes behind as there are
    buffers.
    """

    def __init__(self, copier: CopyDevice, device: torch.device, most: int = 1 << 15, buffers: int = 4):
        self._copier, self._most, self._copied = copier, most, CopiedInputs(device)
        held = (torch.empty(most, dtype=torch.long, pin_memory=device.type == "cuda") for _ in range(buffers))
        self._buffers: deque[tuple[torch.Tensor, torch.Tensor, Event | None]] = deque(
            (host, copier.alias(host.view(torch.uint8)).view(torch.long), None) for host in held
        )

    def put(self, numbers: Sequence[int]) -> torch.Tensor:
        if len(numbers) > self._most:
            return self._copied.put(numbers)
        host, alias, read = self._buffers.popleft()
        if read is not None:
            self._copier.host_waits(read)
        host[: len(numbers)] = _int64(numbers)
        there = torch.add(alias[: len(numbers)], 0)  # a kernel: a copy might take the engine that weights wait for
        self._buffers.append((host, alias, self._copier.compute_event()))
        return there


def step_numbers(step: Step) -> array[int]:
    """Token ids of all rows, then the positions of these tokens, then the indices of those whose logits are wanted."""
    found = array("q")
    for row in step.rows:
        found.extend(row.tokens)
    for row in step.rows:
        _count(found, row.start, row.end)
    first = 0
    for row in step.rows:
        first += len(row.tokens)
        _count(found, first - row.wanted, first)
    return found


def _count(found: array[int], first: int, end: int) -> None:
    if end - first < _LONG:
        found.extend(range(first, end))
    else:
        found.frombytes(np.arange(first, end, dtype=np.int64).tobytes())


def _int64(numbers: Sequence[int]) -> torch.Tensor:
    """On the CPU. Through an array: ``torch.tensor`` takes ten times as long for a list, 2 ms for a prompt of 8192 tokens."""
    held = numbers if isinstance(numbers, array) else array("q", numbers)
    return torch.frombuffer(held, dtype=torch.long) if held else torch.empty(0, dtype=torch.long)
