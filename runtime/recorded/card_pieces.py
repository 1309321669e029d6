"""Kernels of one pass recorded in pieces: between two of them the host does what no graph can."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from penstock.runtime.recorded.capture_room import ask_for_room
from penstock.runtime.recorded.stream_words import StreamWords


class CardPieces:
    """CUDA graphs over one stream, recorded one behind the other and launched in the same order, on whatever stream is current.

    They share one memory: what a piece leaves lies there until a later one is launched that was given its place. Costs what is allocated
    while they are recorded.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
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

    def record(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record what ``compute`` launches. RuntimeError, and nothing is recorded, where it asks the host for what a graph cannot give."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            ask_for_room(self._device)
            self._begin()
            try:
                made = compute()
            except BaseException:
                with suppress(RuntimeError):
                    self._graphs[-1].capture_end()
                self.close()
                raise
            self._graphs[-1].capture_end()
        return made

    def cut(self) -> None:
        """End a piece: what is launched next belongs to another one."""
        self._graphs[-1].capture_end()
        self._begin()

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
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        self._graphs.append(graph)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
