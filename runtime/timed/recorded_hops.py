"""A hop inside a recorded step, as graphs on two cards take it: `hops/word_ways.py` between processes that share page-locked memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, Protocol

import torch

from penstock.runtime.hops.hop import Hop
from penstock.runtime.hops.shared_memory import Shared, SharedMemory
from penstock.runtime.hops.word_ways import HopPlaces, WordWays
from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.recorded.stream_words import StreamWords

TRIPS = 8
"""There and back in a recorded round."""
WARM = 10
"""Rounds before those that count."""
Trip = Callable[[], None]
"""Once there and back, as one rank sees it."""


class Meeting(Protocol):
    """Ranks that call the same at the same time; hops go between the first two."""

    @property
    def rank(self) -> int: ...
    def told(self, words: Any) -> Any:
        """What rank 0 has for ``words``."""

    def gathered(self, value: float) -> list[float]:
        """``value`` of every rank, once all have come."""


class CardWords:
    """Words of the current stream."""

    def __init__(self) -> None:
        self._words = StreamWords()

    def write_word(self, address: int, value: int) -> None:
        self._words.write(torch.cuda.current_stream().cuda_stream, address, value)

    def wait_word(self, address: int, value: int) -> None:
        self._words.wait(torch.cuda.current_stream().cuda_stream, address, value)


def shared_by(meeting: Meeting, nbytes: int, lock: CudaDevice | None) -> SharedMemory:
    """So many bytes that all ranks have, page-locked by ``lock``. OSError or RuntimeError where this rank does not get them."""
    made, why = None, None
    try:
        made = SharedMemory(nbytes, lock) if meeting.rank == 0 else None
    except (OSError, RuntimeError) as error:
        why = error
    told = meeting.told(None if made is None else tuple(made.shared))
    if why is not None or told is None:
        raise why or RuntimeError("rank 0 has no memory to share")
    return made or SharedMemory(Shared(*told), lock)


def there_and_back(rank: int, hop: Hop, hidden: torch.Tensor) -> Trip:
    """By ``hop`` from rank 0 to rank 1, then from that."""

    def trip() -> None:
        for sender in (0, 1):
            (hop.send if rank == sender else hop.receive)(hidden)

    return trip


class Recorded:
    """``trips``, each on a stream of its own: :data:`TRIPS` there and back behind one that is not timed. RuntimeError where they are not
    recorded."""

    def __init__(self, trips: Sequence[Trip]):
        self._graphs, self._streams = [torch.cuda.CUDAGraph() for _ in trips], [torch.cuda.Stream() for _ in trips]
        self._begin, self._end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        for trip, graph, stream in zip(trips, self._graphs, self._streams, strict=True):
            with torch.cuda.graph(graph, None, stream, "thread_local"):
                trip()
                if stream is self._streams[0]:
                    self._begin.record(stream)
                for _ in range(TRIPS):
                    trip()
                if stream is self._streams[0]:
                    self._end.record(stream)

    def us(self, rounds: int) -> list[float]:
        """Microseconds of a hop in each of ``rounds``, as the card sees it."""
        found = []
        for _ in range(rounds + WARM):
            for graph, stream in zip(self._graphs, self._streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            for stream in self._streams:
                stream.synchronize()
            found.append(self._begin.elapsed_time(self._end) * 1e3 / 2 / TRIPS)
        return found[WARM:]


def recorded_hop_s(meeting: Meeting, device: torch.device, nbytes: int, rounds: int) -> float:
    """Seconds of a hop of ``nbytes`` inside graphs: the median of ``rounds``. 0.0 where one of both ranks cannot: memory is not shared or
    locked, or the driver knows no words. Then nothing is launched, for a card would wait for the other one for ever."""
    hop_us = 0.0
    with ExitStack() as held, torch.inference_mode():
        recorded = _recorded(meeting, device, nbytes, held)
        if all(meeting.gathered(meeting.rank >= 2 or recorded is not None)) and recorded is not None:
            hop_us = median(recorded.us(rounds))
        meeting.gathered(0.0)
    return hop_us / 1e6


def _recorded(meeting: Meeting, device: torch.device, nbytes: int, held: ExitStack) -> Recorded | None:
    places, lock = HopPlaces(2, nbytes), CudaDevice(device.index)
    try:
        memory = shared_by(meeting, places.all_bytes, lock)
        held.callback(memory.close)
        if meeting.rank >= 2:
            return None
        ways = WordWays(meeting.rank, places, memory.bytes.data_ptr(), lock.alias(memory.bytes), CardWords())
        ways.meet(torch.bfloat16)
        hidden = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        return Recorded([there_and_back(meeting.rank, ways.of(1 - meeting.rank), hidden)])
    except (OSError, RuntimeError):
        return None
