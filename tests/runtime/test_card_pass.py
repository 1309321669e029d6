"""What a recorded pass gives the card at a launch, and in which order: kernels in pieces, and between them what copies and waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.recorded import card_pass
from penstock.runtime.recorded.card_pass import CardPass


class Stream:
    def __init__(self, name: str, log: list[str]):
        self.name, self._log = name, log
        self.cuda_stream = self

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} behind {other.name}")


class Event:
    log: list[str] = []
    made = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing
        self.number, Event.made = Event.made, Event.made + 1

    def record(self, stream: Stream) -> None:
        self.log.append(f"{stream.name}: {self.number}")

    def wait(self, stream: Stream) -> None:
        self.log.append(f"{stream.name} waits for {self.number}")


class Pieces:
    """Kernels are what :meth:`compute` is told."""

    def __init__(self, device: torch.device, stream: Stream, like: Pieces | None = None):
        self.stream, self._log, self._pieces = stream, stream._log, [list[str]()]

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def compute(self, what: str) -> None:
        self._pieces[-1].append(what)

    @property
    def begun(self) -> bool:
        return bool(self._pieces[-1])

    def cut(self) -> int:
        self._pieces.append([])
        return len(self._pieces) - 2

    def launch(self, number: int) -> None:
        self._log.append("kernels: " + " ".join(self._pieces[number]))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(Event, "log", said)
    monkeypatch.setattr(Event, "made", 0)
    here = Stream("here", said)

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        yield

    played = {"Stream": lambda _: Stream("kernels", said), "Event": Event, "current_stream": lambda _: here, "stream": current}
    for name, one in played.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(card_pass, "CardPieces", Pieces)
    monkeypatch.setattr(card_pass, "BareCopies", lambda stream: lambda to, at, n: said.append(f"{stream.name}: {n} bytes"))
    monkeypatch.setattr(
        card_pass,
        "StreamWords",
        lambda: SimpleNamespace(
            write=lambda stream, address, value: said.append(f"{stream.name}: word {address} becomes {value}"),
            wait=lambda stream, address, value: said.append(f"{stream.name} waits for word {address} at {value}"),
        ),
    )
    return said


def opened(log: list[str], borders: list[int]) -> Any:
    card = SimpleNamespace(device=torch.device("cpu"), copies=Stream("copies", log), borders=borders)
    return CardPass(cast(CudaDevice, card))


def test_copies_lie_between_pieces_of_kernels_and_come_at_each_launch(log: list[str]) -> None:
    unit = torch.zeros(24, dtype=torch.uint8)
    made = opened(log, [unit.data_ptr() + 8])
    rounds = iter(["first", "second"])
    with made.recording():
        made.pieces.compute("a")
        made.pieces.compute("b")
        left = made.compute_event()
        made.copy_waits(left)
        made.copy(torch.empty(24, dtype=torch.uint8), unit)
        made.compute_waits(made.copy_event())
        made.pieces.compute("c")
        made.at_launch(lambda: log.append(next(rounds)))
        made.write_word(64, 1)
        made.pieces.compute("d")
    assert log == [], "nothing is given to the card meanwhile"
    for which in ("first", "second"):
        made.launch()
        assert log == [
            "kernels behind here",
            "kernels: 0",
            "kernels: a b",
            "kernels: 1",
            "copies waits for 1",
            "copies: 8 bytes",  # up to where memory was page-locked in another piece
            "copies: 16 bytes",
            "copies: 2",
            "kernels waits for 2",
            "kernels: c",
            which,
            "kernels: word 64 becomes 1",
            "kernels: d",
            "kernels: 3",
            "here waits for 3",
        ]
        log.clear()


def test_behind_a_recording_all_is_given_at_once(log: list[str]) -> None:
    made = opened(log, [])
    with made.recording():
        left = made.compute_event()
    made.copy_waits(left)
    made.copy(torch.empty(5, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8))
    made.copy_event()
    assert log == ["copies waits for 1", "copies: 5 bytes", "copies: 3"]
