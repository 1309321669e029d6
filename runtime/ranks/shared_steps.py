"""Steps that all ranks of a host record: what they agree on before and behind each recording, and the words by which hops go inside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.planner.contract.speculation.verify_shapes import VerifyShape
from penstock.runtime.hops.hop import HopMeter
from penstock.runtime.hops.kept_words import KeptWords
from penstock.runtime.hops.shared_memory import Shared, SharedMemory
from penstock.runtime.hops.word_ways import EMPTY, FULL, Flags, HopPlaces, WordWays
from penstock.runtime.ranks.dealt_layer import Ways


class Told(Protocol):
    """``company.company.Company``, of which this needs a few things."""

    @property
    def rank(self) -> int: ...
    def tell(self, words: dict[str, Any], count: int | None = None) -> None: ...
    def answer(self, words: dict[str, Any]) -> None: ...
    def hear(self, rank: int = 0) -> dict[str, Any]: ...


class MappedCard(Protocol):
    """``memory.device.CudaDevice``: page-locks memory, and has kernels reach it."""

    def lock(self, address: int, nbytes: int) -> str | None: ...
    def unlock(self, address: int) -> None: ...
    def alias(self, host: torch.Tensor) -> torch.Tensor: ...


class Dealt(Protocol):
    """``ranks.dealt_model.DealtModel``: how hidden states go."""

    ways: Ways | None


@dataclass(frozen=True)
class Agreed:
    """What all ranks have in common before anything is recorded."""

    refused: str | None
    """Why no step is recorded; None where steps are."""
    shapes: Sequence[VerifyShape]
    """That all of them record."""
    beside: frozenset[int]
    """Rows of those passes of which the CPU computes units, of any rank: one that has none there records them as often as the others."""


class SharedSteps:
    """Of this process among the first ``count`` ranks of ``company``, all on one host, over the dealt ``model``; ``meter`` counts hops of
    ``dtype``.

    Each method that talks is called by all of them at the same time. A step is recorded by all or by none: one that is not would let the
    others wait for ever.
    """

    def __init__(self, company: Told, count: int, model: Dealt, meter: HopMeter, dtype: torch.dtype):
        self._company, self._count, self._model, self._meter, self._dtype = company, count, model, meter, dtype
        self._memory: SharedMemory | None = None
        self._seen = torch.empty(0)
        self._places = HopPlaces(count, 0)
        self._kept = KeptWords(self._keep)

    @property
    def leads(self) -> bool:
        """Whether this rank says by which schedule all take a step."""
        return self._company.rank == 0

    def open(self, card: MappedCard, nbytes: int, refused: str | None, shapes: Sequence[VerifyShape], beside: Collection[int]) -> Agreed:
        """Share memory for hops of at most ``nbytes``, as rank 0 has them: (ranks - 1) * ranks of them, page-locked, once a host.
        ``refused``: why this rank records none. ``beside``: rows of passes in which the CPU computes units of this rank."""
        if self._company.rank:
            offered = self._company.hear()
            nbytes, shared = offered["nbytes"], offered["shared"]
        self._places = HopPlaces(self._count, nbytes)
        if refused is None and (self._company.rank == 0 or shared is not None):
            try:
                self._memory = SharedMemory(self._places.all_bytes if self._company.rank == 0 else Shared(*shared), card)
                self._seen = card.alias(self._memory.bytes)
            except (OSError, RuntimeError) as error:
                refused = f"memory of all ranks: {error}"
        if self._company.rank == 0:
            given = None if self._memory is None else list(self._memory.shared)
            self._company.tell({"what": "words", "nbytes": nbytes, "shared": given}, self._count)
        return self._settled(Agreed(refused, shapes, frozenset(beside)))

    def agree(self, refused: str | None) -> str | None:
        """Why any rank refuses, by its number where it is another one; None where none does."""
        return self._settled(Agreed(refused, (), frozenset())).refused

    def _settled(self, own: Agreed) -> Agreed:
        shapes, refused, beside = [[shape.rows, shape.tokens] for shape in own.shapes], own.refused, own.beside
        if self._company.rank:
            self._company.answer({"refused": refused, "shapes": shapes, "beside": sorted(beside)})
            said = self._company.hear()
            refused, shapes, beside = said["refused"], said["shapes"], frozenset(said["beside"])
        else:
            for rank in range(1, self._count):
                heard = self._company.hear(rank)
                if refused is None and heard["refused"] is not None:
                    refused = f"rank {rank}: {heard['refused']}"
                shapes, beside = [shape for shape in shapes if shape in heard["shapes"]], beside.union(heard["beside"])
            self._company.tell({"what": "settled", "refused": refused, "shapes": shapes, "beside": sorted(beside)}, self._count)
        return Agreed(refused, [shape for shape in own.shapes if [shape.rows, shape.tokens] in shapes], beside)

    @contextmanager
    def recording(self, flags: Flags) -> Iterator[Callable[[], None]]:
        """Inside, hidden states go by words of ``flags``. What it gives is to be called at each launch of what was recorded."""
        assert self._memory is not None, "open() comes first"
        ways = WordWays(self._company.rank, self._places, self._memory.bytes.data_ptr(), self._seen, flags)
        ways.meet(self._dtype)
        before, self._model.ways = self._model.ways, ways
        try:
            yield lambda: self._count_hops(ways)
        finally:
            self._model.ways = before

    def _count_hops(self, ways: WordWays) -> None:
        self._meter.received += ways.received
        self._meter.received_bytes += ways.received_bytes
        self._meter.sent_bytes += ways.sent_bytes

    def let_go(self) -> None:
        """Others are gone: have this rank's card go on, whatever it waits for, until :meth:`close`. What it computes means nothing."""
        if self._memory is not None:
            self._kept.start()

    def _keep(self) -> None:
        """What others send is there, and what this one sends is gone."""
        assert self._memory is not None, "words are there as long as they are kept"
        own, words = self._company.rank, self._memory.bytes.view(torch.int32)
        for peer in range(self._count):
            if peer != own:
                words[self._places.word(peer, own) // 4], words[self._places.word(own, peer) // 4] = FULL, EMPTY

    def close(self) -> None:
        """Nothing that was recorded is launched any more. A second call does nothing."""
        self._kept.close()
        self._seen = torch.empty(0)
        if self._memory is not None:
            with contextlib.suppress(OSError):
                self._memory.close()
