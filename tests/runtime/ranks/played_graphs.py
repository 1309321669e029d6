"""Ranks whose cards are played, and record: a graph is the operators that torch was given meanwhile, and a launch does them again.

``python -m tests.runtime.ranks.played_graphs PLAN CHECKPOINT OUT`` leads them as ``played_cards`` does. In the environment ``FAILS=1.0``
has rank 1 fail to record its graph number 0. ``DIES=1.8`` has it end with its launch number 8; ``STOPS=0.8`` is Ctrl-C then, which rank 0
hears. ``DISAGREES=1`` has rank 1 find that the CPU's units are not the card's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from penstock.runtime.engine import open_session
from penstock.runtime.engine.passes import prompt_recording, recorded_side, step_recording
from penstock.runtime.kv.attention.page_tables import PageTables, Traits
from penstock.runtime.kv.batch.token_shape import Pair
from tests.cli import HANGS_S
from tests.runtime.ranks import played_cards
from tests.runtime.test_recorded_shapes import ByDefinition
from tests.support import HostCopier

Act = Callable[[], object]


class Card(HostCopier):
    """Locks every page, and records."""

    borders: Sequence[int] = ()
    device = torch.device("cpu")

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def lock(self, address: int, nbytes: int) -> str | None:
        return None

    def unlock(self, address: int) -> None:
        """It was not."""


class Operators(TorchDispatchMode):
    """What torch is given, as acts: views of what lies there already need none."""

    going: list[Operators] = []
    """The one that is being recorded, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[Act] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, made = kwargs or {}, func(*args, **(kwargs or {}))
        out = _tensors(made)
        if func._schema.is_mutable:
            self.acts.append(lambda: func(*args, **given))
        elif not {one.untyped_storage().data_ptr() for one in out} & {one.untyped_storage().data_ptr() for one in _tensors((args, given))}:
            self.acts.append(lambda: [one.copy_(new) for one, new in zip(out, _tensors(func(*args, **given)), strict=True)])
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, torch.Tensor)]


class Kernel(ByDefinition):
    """Reads its tables at each launch."""

    def attend(self, query: torch.Tensor, held: Pair, tables: PageTables, traits: Traits, out: torch.Tensor) -> None:
        if not Operators.going:
            super().attend(query, held, tables, traits, out)
            return
        Operators.going[0].acts.append(lambda: ByDefinition.attend(self, query, held, tables, traits, out))


class Point:
    """Where a launch has come to, and when."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.come()

    def come(self) -> None:
        self.at_s = time.perf_counter()


def written(address: int, value: int) -> Act:
    """Writes a word."""
    word = ctypes.c_int32.from_address(address)
    return lambda: setattr(word, "value", value)


def waited(address: int, value: int) -> Act:
    """Returns when a word has ``value``."""
    word = ctypes.c_int32.from_address(address)

    def wait() -> None:
        until = time.monotonic() + HANGS_S
        while word.value != value:
            assert time.monotonic() < until, "nobody wrote it"
            time.sleep(0)

    return wait


class Pieces:
    """``recorded.card_pieces.CardPieces``."""

    def __init__(self, device: torch.device):
        self._pieces: list[Operators] = []

    @contextmanager
    def warming(self) -> Iterator[None]:
        yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._begin()
        try:
            yield
            if _is_asked("FAILS", 0):
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        finally:
            self._end()

    def record(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self.recording():
            return compute()

    def cut(self) -> int:
        self._end()
        self._begin()
        return len(self._pieces) - 2

    def _begin(self) -> None:
        self._pieces.append(Operators())
        self._pieces[-1].__enter__()
        Operators.going.append(self._pieces[-1])

    def _end(self) -> None:
        Operators.going.clear()
        self._pieces[-1].__exit__(None, None, None)

    def write_word(self, address: int, value: int) -> None:
        self._pieces[-1].acts.append(written(address, value))

    def wait_word(self, address: int, value: int) -> None:
        self._pieces[-1].acts.append(waited(address, value))

    def launch(self, number: int) -> None:
        assert not Operators.going
        for act in self._pieces[number].acts:
            act()

    def close(self) -> None:
        self._pieces = []


class Graph:
    """``recorded.card_pass.CardPass``, whose kernels and copies come in the order in which they were recorded."""

    begin: Point
    results: Point
    made = launched = 0
    """By this process."""

    def __init__(self, card: Card, like: Graph | None = None):
        self._recorded: Operators | None = None
        self._number, Graph.made = Graph.made, Graph.made + 1

    @contextmanager
    def warming(self) -> Iterator[None]:
        yield

    @property
    def pieces(self) -> Graph:
        return self

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recorded = Operators()
        with self._recorded:
            Operators.going.append(self._recorded)
            self.begin = self.compute_event()
            try:
                yield
                if _is_asked("FAILS", self._number):
                    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            finally:
                Operators.going.clear()
            self._act(self._end)
            self.results = Point()

    def _end(self) -> None:
        self.results.come()

    def _act(self, act: Act) -> None:
        assert Operators.going == [self._recorded] or act == self._end, "it is recorded"
        assert self._recorded is not None
        self._recorded.acts.append(act)

    def launch(self) -> None:
        assert self._recorded is not None and not Operators.going
        Graph.launched += 1
        for what, number in (("DIES", signal.SIGKILL), ("STOPS", signal.SIGINT)):
            if _is_asked(what, Graph.launched):
                os.kill(os.getpid(), number)
        for act in self._recorded.acts:
            act()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if Operators.going:
            self._act(lambda: dst.copy_(src))
        else:
            dst.copy_(src)

    def compute_event(self) -> Point:
        point = Point()
        if Operators.going:
            self._act(point.come)
        return point

    def copy_event(self) -> Point:
        return self.compute_event()

    def copy_waits(self, event: Point) -> None:
        """It comes behind it."""

    def compute_waits(self, event: Point) -> None:
        """It comes behind it."""

    def at_launch(self, act: Callable[[], None]) -> None:
        self._act(act)

    def write_word(self, address: int, value: int) -> None:
        self._act(written(address, value))

    def wait_word(self, address: int, value: int) -> None:
        self._act(waited(address, value))

    def time_of(self, point: Point) -> float:
        return point.at_s

    def hold(self) -> None:
        """What was copied was copied."""

    yield_copies = wait = wait_results = close = hold


def _is_asked(what: str, number: int) -> bool:
    return os.environ.get(what) == f"{os.environ.get('RANK', '0')}.{number}"


def _disagrees(*_: object) -> str | None:
    return "what the CPU computes is wrong" if os.environ.get("DISAGREES") == os.environ.get("RANK", "0") else None


def main() -> None:
    """Lead, unless a watchdog started this."""
    zeros = torch.zeros
    torch.zeros = lambda *a, pin_memory=False, **more: zeros(*a, **more)  # type: ignore[assignment]
    played_cards.HostCopier = Card  # type: ignore[misc,attr-defined]
    for module in (recorded_side, step_recording, prompt_recording):
        module.CudaDevice = Card  # type: ignore[misc,assignment,attr-defined]
    if "DISAGREES" in os.environ:
        recorded_side.disagreement = _disagrees  # type: ignore[assignment]
    recorded_side.CardPass = Graph  # type: ignore[misc,assignment]
    step_recording.CardPieces = prompt_recording.CardPieces = Pieces  # type: ignore[misc,assignment,attr-defined]
    open_session.open_kernel = lambda *_: Kernel()  # type: ignore[assignment]
    played_cards.main("tests.runtime.ranks.played_graphs")


if __name__ == "__main__":
    main()
