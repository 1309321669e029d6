"""Work of a card that is recorded once and launched again: kernels, copies beside them, and points where they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from penstock.runtime.memory.bare_copies import BareCopies
from penstock.runtime.memory.device import CudaDevice, Event, split_at
from penstock.runtime.recorded.card_pieces import CardPieces
from penstock.runtime.recorded.stream_words import StreamWords


class Point:
    """Where a stream has come to, each time anew that it comes there, with its time."""

    __slots__ = ("timed",)

    def __init__(self) -> None:
        self.timed = torch.cuda.Event(enable_timing=True)


class CardPass:
    """A stream of kernels beside the weights' copy stream. It may be recorded again after :meth:`close`: the stream stays, and with it what
    libraries keep for each stream.

    Kernels are recorded as CUDA graphs. All that copies, or waits for copies, lies between two of them and is given to the card at each
    launch: copies that a graph holds are slower (docs/log.md, 2026-11-27). So a pass that nothing comes to is one graph. Outside
    :meth:`recording` whatever is given is given to the card at once.

    What is launched elsewhere waits for :attr:`results`. Costs what is allocated while it is recorded. A pass ``like`` another shares its
    memory and its stream; the two are launched in turn.
    """

    def __init__(self, card: CudaDevice, like: CardPass | None = None):
        self._card = card
        self._kernels: torch.cuda.Stream = torch.cuda.Stream(card.device) if like is None else like._kernels
        self._copy = BareCopies(card.copies.cuda_stream)
        self.pieces: CardPieces = CardPieces(card.device, self._kernels, None if like is None else like.pieces)
        """Words that these are given are nodes of a graph, where they take less time than between two."""
        self._acts: list[Callable[[], object]] = []
        """Of a launch, in order."""
        self._recording = False
        self._words = StreamWords()
        self.begin: Event
        self.results: Event
        """Behind all kernels."""

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Inside, what the current thread launches goes to the stream of the kernels, unrecorded."""
        with self.pieces.warming():
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, what the current thread launches is recorded, and so is what is given here."""
        self._acts.clear()
        with self.pieces.recording():
            self._recording = True
            try:
                self.begin = self.compute_event()
                yield
                self.results = self.compute_event()
            finally:
                self._recording = False

    def _give(self, act: Callable[[], object]) -> None:
        """Behind the kernels that were recorded so far, at each launch; else now."""
        if not self._recording:
            act()
            return
        if self.pieces.begun:
            self._acts.append(partial(self.pieces.launch, self.pieces.cut()))
        self._acts.append(act)

    def _point(self, stream: torch.cuda.Stream) -> Point:
        point = Point()
        self._give(partial(point.timed.record, stream))
        return point

    def at_launch(self, act: Callable[[], None]) -> None:
        """``act`` is called at each launch, in its place: what it gives here differs from launch to launch."""
        self._give(act)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        to, begin = dst.data_ptr(), src.data_ptr()
        for at, nbytes in split_at(self._card.borders, begin, src.numel()):
            self._give(partial(self._copy, to + at, begin + at, nbytes))

    def copy_event(self) -> Point:
        return self._point(self._card.copies)

    def compute_event(self) -> Point:
        return self._point(self._kernels)

    def copy_waits(self, event: Event) -> None:
        self._give(partial(_made_here(event).timed.wait, self._card.copies))

    def compute_waits(self, event: Event) -> None:
        self._give(partial(_made_here(event).timed.wait, self._kernels))

    def write_word(self, address: int, value: int) -> None:
        """Behind what was recorded before, 32 bits at ``address`` of page-locked memory become ``value``; all that was written before is
        seen by then."""
        self._give(partial(self._words.write, self._kernels.cuda_stream, address, value))

    def wait_word(self, address: int, value: int) -> None:
        """Kernels recorded next begin once 32 bits at ``address`` are ``value``."""
        self._give(partial(self._words.wait, self._kernels.cuda_stream, address, value))

    def launch(self) -> None:
        """Launch it behind what was given to the current stream; what the current stream is given next begins behind :attr:`results`."""
        here = torch.cuda.current_stream(self._card.device)
        self._kernels.wait_stream(here)
        with torch.cuda.stream(self._kernels):
            for act in self._acts:
                act()
        _made_here(self.results).timed.wait(here)

    def hold(self) -> None:
        """The next launch begins behind what the weights' copy stream was given."""
        self._kernels.wait_stream(self._card.copies)

    def yield_copies(self) -> None:
        """What the weights' copy stream is given next begins when the last launch is over."""
        self._card.copies.wait_stream(self._kernels)

    def wait_results(self) -> None:
        """Block until the last launch's kernels are over."""
        _made_here(self.results).timed.synchronize()

    def wait(self) -> None:
        """Block until the last launch is over, and its copies."""
        self._kernels.synchronize()
        self._card.copies.synchronize()

    def close(self) -> None:
        """Give back what it takes; nothing is launched any more."""
        self.wait()
        self._acts.clear()
        self.pieces.close()

    def time_of(self, point: Event) -> float:
        """When the last launch came to ``point``, which it has, in seconds of ``time.perf_counter``."""
        return self._card.time_of_driver(_made_here(point).timed)


def _made_here(event: Event) -> Point:
    assert isinstance(event, Point)
    return event
