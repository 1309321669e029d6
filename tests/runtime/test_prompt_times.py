"""The probe's program that times recorded prompts, on a card that is played."""

from __future__ import annotations

import time

import pytest
import torch

from penstock.runtime.timed import prompt_times
from tests.runtime.ranks.played_graphs import Pieces

CPU = torch.device("cpu")


def test_a_layer_takes_its_pieces_and_what_lies_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Pieces):
        """Each launch takes 2 ms."""

        def launch(self, number: int) -> None:
            super().launch(number)
            time.sleep(2e-3)

    monkeypatch.setattr(prompt_times, "WARM_UP", 1)
    monkeypatch.setattr(prompt_times, "LEAST", 2)
    found = prompt_times.timed(CPU, Slow(CPU), lambda: None, 0.0)
    assert isinstance(found["piece_s"], float) and found["piece_s"] > 4e-3


def test_why_nothing_is_recorded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "0.0")
    found = prompt_times.timed(CPU, Pieces(CPU), lambda: None, 0.0)
    assert str(found["refused"]).startswith("CUDA error: operation not permitted")
