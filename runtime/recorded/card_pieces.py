"""Kernels of one pass recorded in pieces: between two of them comes what no graph can hold, or had better not."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from penstock.runtime.recorded.capture_room import ask_for_room
from penstock.runtime.recorded.stream_words import StreamWords, has_recorded


class CardPieces:
    """CUDA graphs over one stream, recorded one behind the other and launched in the same order, on whatever stream is current.

    They share one memory: what a piece leaves lies there until a later one is launched that was given its place. Pieces ``like`` others,
    with which they are launched in turn, share theirs. Costs what is allocated while they are recorded.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None, like: CardPieces | None = None):
        self._device, self._stream, self._like = device, stream or torch.cuda.Stream(device), like
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._words = StreamWords()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Inside, what the current thread launches goes to the stream of the pieces, unrecorded."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, what the current thread launches is recorded. RuntimeError, and nothing is recorded, where it asks the host for what a
        graph cannot give."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            ask_for_room(self._device)
            self._begin()
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):
                    self._end()
                self.close()
                raise
            self._end()

    def record(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``compute`` gives, whose launches are recorded; raises as :meth:`recording`."""
        with self.recording():
            return compute()

    @property
    def begun(self) -> bool:
        """Whether anything was recorded since the last cut."""
        return has_recorded(self._stream.cuda_stream)

    def cut(self) -> int:
        """End a piece: what is launched next belongs to another one -> the number of the one that ended."""
        self._end()
        self._begin()
        return len(self._graphs) - 2

    def write_word(self, address: int, value: int) -> None:
        """See :class:`penstock.runtime.recorded.host_steps.Flags`."""
        self._words.write(self._stream.cuda_stream, address, value)

    def wait_word(self, address: int, value: int) -> None:
        """See :class:`penstock.runtime.recorded.host_steps.Flags`."""
        self._words.wait(self._stream.cuda_stream, address, value)

    def launch(self, number: int) -> None:
        """Launch the piece ``number`` behind what was given to the current stream."""
        self._graphs[number].replay()

    def close(self) -> None:
        """Give back what it takes; nothing is launched any more."""
        torch.cuda.synchronize(self._device)
        self._graphs = []
        torch.cuda.empty_cache()

    def _begin(self) -> None:
        first = [graphs[0] for graphs in (self._graphs, [] if self._like is None else self._like._graphs) if graphs]
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        graph.capture_begin(pool=first[0].pool() if first else None, capture_error_mode="thread_local")

    def _end(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # the last one, where nothing comes behind the last cut
            self._graphs[-1].capture_end()
