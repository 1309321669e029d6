"""One token's experts copied to one place, for recorded kernels that find no expert elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.planner.common.measures import align_up
from penstock.runtime.experts.products.expert_products import Parameters
from penstock.runtime.experts.products.expert_table import APART, Lies
from penstock.runtime.formats.kernels.on_card import plain_kernels


class StagedExperts:
    """``count`` experts that lie as ``first`` does, each in a place of its own. Takes their bytes on the device."""

    def __init__(self, count: int, first: Parameters, device: torch.device):
        self.nbytes = count * _extent(first)
        self._memory = torch.empty(count, self.nbytes // count // 8, dtype=torch.int64, device=device)
        begin = Lies.of(first).begin
        places = [(name, tensor.data_ptr() - begin, tensor) for name, tensor in first.items()]
        self.experts: Sequence[Parameters] = [
            {name: row[at : at + like.nbytes].view(like.dtype).view(like.shape) for name, at, like in places}
            for row in self._memory.view(torch.uint8)
        ]

    def gather(self, first: Parameters, numbers: torch.Tensor) -> bool:
        """What is recorded: :attr:`experts` become those as many times 256 bytes behind ``first`` as ``numbers`` say. False where there is
        no kernel for it."""
        kernels = plain_kernels(self._memory.device)
        if kernels is None:
            return False
        lowest = min(first.values(), key=torch.Tensor.data_ptr)
        kernels.gather(lowest.flatten().view(torch.uint8)[:8].view(torch.int64), numbers, self._memory)
        return True


class Staging:
    """The places that layers share: each computes before the next one copies. At most ``most_bytes`` are taken."""

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._known: dict[tuple[int, frozenset[tuple[str, int]]], StagedExperts] = {}

    def of(self, count: int, first: Parameters, device: torch.device) -> StagedExperts | None:
        """For ``count`` experts that lie as ``first`` does; None where they take more."""
        key = count, Lies.of(first).tensors
        if key not in self._known:
            taken = sum(staged.nbytes for staged in self._known.values())
            if taken + count * _extent(first) > self._most_bytes:
                return None
            self._known[key] = StagedExperts(count, first, device)
        return self._known[key]

    def clear(self) -> None:
        """Give the memory back."""
        self._known.clear()


def _extent(expert: Parameters) -> int:
    """Bytes from the first tensor on."""
    begin = Lies.of(expert).begin
    return align_up(max(tensor.data_ptr() - begin + tensor.nbytes for tensor in expert.values()), APART)
