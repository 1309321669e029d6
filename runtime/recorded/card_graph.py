"""Work of a card that is recorded once and launched as a whole: kernels on one stream, chains of copies on others, and points where they
meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.runtime.memory.device import CudaDevice, Event, split_copy
from penstock.runtime.recorded.capture_room import ask_for_room
from penstock.runtime.recorded.stream_words import StreamWords

WORD_STRIDE = 16
"""Numbers of 32 bits from word to word: each has a line of the CPU's cache for itself."""


class GraphPoint:
    """A point in a recorded stream: what is recorded behind it may wait for it, and after each launch it has a time."""

    __slots__ = ("edge", "timed")

    def __init__(self, stream: torch.cuda.Stream):
        self.edge, self.timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True, external=True)
        self.edge.record(stream)
        self.timed.record(stream)  # a node of the graph, unlike the edge


class Stamp:
    """A point in a stream behind a launch, with its time."""

    __slots__ = ("timed",)

    def __init__(self, stream: torch.cuda.Stream):
        self.timed = torch.cuda.Event(enable_timing=True)
        self.timed.record(stream)


class CardGraph:
    """A CUDA graph over a stream of kernels and one for each of ``chains`` of copies. It may be recorded again after
    :meth:`close`: the streams stay, and with them what libraries keep for each stream.

    The graph is launched on a stream of its own. What is launched elsewhere waits for :attr:`results`. Copies for the next launch are given
    to the chains behind it: they are no part of it, so that the next one begins while they are on their way. Words say which have come.
    Whatever waits for a word is given to the card after the copy that sets it, so no order of queues stops both. Costs what is allocated
    while it is recorded. A graph ``like`` another shares its memory and its streams; the two are launched in turn.
    """

    def __init__(self, card: CudaDevice, chains: Sequence[str], like: CardGraph | None = None):
        self._card = card
        self._graph = torch.cuda.CUDAGraph()
        self._like = like
        self._kernels: torch.cuda.Stream = torch.cuda.Stream(card.device) if like is None else like._kernels
        self._chains: dict[str, torch.cuda.Stream] = {c: torch.cuda.Stream(card.device) for c in chains} if like is None else like._chains
        self._words = StreamWords()
        self.begin: Event
        self.results: Event
        """Behind all kernels."""
        self._copied: dict[str, GraphPoint] = {}
        """Behind each chain's recorded copies."""
        self._over: torch.cuda.Event = torch.cuda.Event() if like is None else like._over
        """Behind the last launch of those that are alike."""

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Inside, what the current thread launches goes to the stream of the kernels, unrecorded."""
        here = torch.cuda.current_stream(self._card.device)
        self._kernels.wait_stream(here)
        with torch.cuda.stream(self._kernels):
            yield
        here.wait_stream(self._kernels)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, what the current thread launches is recorded."""
        pool = None if self._like is None else self._like._graph.pool()
        with torch.cuda.stream(self._kernels):
            ask_for_room(self._card.device)
        with torch.cuda.graph(self._graph, pool, self._kernels, "thread_local"):
            self.begin = self.compute_event()
            for chain in self._chains.values():
                chain.wait_event(_made_here(self.begin).edge)
            yield
            self.results = self.compute_event()
            self._copied = {name: GraphPoint(chain) for name, chain in self._chains.items()}
            for chain in self._chains.values():
                self._kernels.wait_stream(chain)

    def copy(self, chain: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self._chains[chain]):
            for to, from_ in split_copy(dst, src, self._card.borders):
                to.copy_(from_, non_blocking=True)

    def copy_event(self, chain: str) -> GraphPoint:
        return GraphPoint(self._chains[chain])

    def compute_event(self) -> GraphPoint:
        return GraphPoint(self._kernels)

    def copy_waits(self, chain: str, event: Event) -> None:
        self._chains[chain].wait_event(_made_here(event).edge)

    def compute_waits(self, event: Event) -> None:
        self._kernels.wait_event(_made_here(event).edge)

    def words(self, count: int) -> torch.Tensor:
        """Zeros, int32 [count, 16]: page-locked words that both sides see, one a row."""
        return torch.zeros((count, WORD_STRIDE), dtype=torch.int32, pin_memory=True)

    def compute_takes(self, word: torch.Tensor) -> None:
        self._take(self._kernels, word)

    def copies_take(self, chain: str, word: torch.Tensor) -> None:
        self._take(self._chains[chain], word)

    def _take(self, stream: torch.cuda.Stream, word: torch.Tensor) -> None:
        self._words.wait(stream.cuda_stream, word.data_ptr(), 1)
        self._words.write(stream.cuda_stream, word.data_ptr(), 0)

    def follow(self, chain: str, event: Event) -> Stamp:
        _made_here(event).timed.wait(self._chains[chain])
        return Stamp(self._chains[chain])

    def give(self, chain: str, word: torch.Tensor) -> Stamp:
        stream = self._chains[chain]
        self._words.write(stream.cuda_stream, word.data_ptr(), 1)
        return Stamp(stream)

    def write_word(self, address: int, value: int) -> None:
        """Behind what was recorded before, 32 bits at ``address`` of page-locked memory become ``value``; all that was written before is
        seen by then."""
        self._words.write(self._kernels.cuda_stream, address, value)

    def wait_word(self, address: int, value: int) -> None:
        """Kernels recorded next begin once 32 bits at ``address`` are ``value``."""
        self._words.wait(self._kernels.cuda_stream, address, value)

    def launch(self) -> None:
        """Launch it behind what was given to the current stream; what the current stream is given next begins behind :attr:`results`."""
        here = torch.cuda.current_stream(self._card.device)
        self._kernels.wait_stream(here)
        with torch.cuda.stream(self._kernels):
            self._graph.replay()
        self._over.record(self._kernels)
        for name, chain in self._chains.items():
            self._copied[name].timed.wait(chain)
        _made_here(self.results).timed.wait(here)

    def hold(self) -> None:
        """The next launch begins behind what the weights' copy stream was given."""
        self._kernels.wait_stream(self._card.copies)

    def yield_copies(self) -> None:
        """What the weights' copy stream is given next begins when the last launch is over, and the copies behind it."""
        self._card.copies.wait_event(self._over)
        for chain in self._chains.values():
            self._card.copies.wait_stream(chain)

    def wait_results(self) -> None:
        """Block until the last launch's kernels are over."""
        _made_here(self.results).timed.synchronize()

    def wait(self) -> None:
        """Block until the last launch is over, and the copies behind it."""
        self._over.synchronize()
        for chain in self._chains.values():
            chain.synchronize()

    def close(self) -> None:
        """Give back what it takes; nothing is launched any more."""
        self.wait()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # of the graph, whose memory nobody else may take

    def time_of(self, point: Event) -> float:
        """When the last launch came to ``point``, which it has, in seconds of ``time.perf_counter``."""
        return self._card.time_of_driver(point.timed if isinstance(point, Stamp) else _made_here(point).timed)


def _made_here(event: Event) -> GraphPoint:
    assert isinstance(event, GraphPoint)
    return event
