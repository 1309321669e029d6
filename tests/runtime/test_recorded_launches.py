"""Launch after launch of recorded streams on a card that is played: whatever the order in which its streams go on, and whichever recording
goes on from which, each unit is computed with from its own bytes, and nothing waits for ever."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.recorded_stream import RecordedStream, Streamed
from tests.runtime.played_recorder import PlayedCard

NBYTES = 8


@pytest.mark.parametrize("seed", range(60))
def test_every_unit_is_computed_with_from_its_own_bytes(seed: int) -> None:
    choose = random.Random(seed)
    kinds = [choose.choice(["attn", "ffn"]) for _ in range(choose.randint(1, 9))]
    units = [Unit(kind, i) for i, kind in enumerate(kinds)]
    slots = {name: [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(choose.randint(1, 3))] for name in dict.fromkeys(kinds)}
    card = PlayedCard(choose, tuple(slots))
    streamed = [Streamed(u, torch.full((NBYTES,), i + 1, dtype=torch.uint8), (Segment(0, 0, NBYTES),), ()) for i, u in enumerate(units)]
    found: list[int] = []
    streams: list[RecordedStream] = []
    for _ in range(choose.randint(1, 3)):
        card.record()
        stream = RecordedStream(streamed, slots, card, Ledger(), like=streams[0] if streams else None)
        streams.append(stream)
        stream.begin_pass()
        for i, unit in enumerate(units):
            stream.enter(unit)
            buffer = stream.buffer(i)
            card.compute(lambda buffer=buffer: found.append(int(buffer[0])))
            stream.leave(unit)
        stream.end_pass()
    for i in stream.rounds.first:
        stream.buffer(i).copy_(streamed[i].source)
    stream.all_there()
    passes = choose.randint(2, 5)
    for _ in range(passes):
        number = choose.randrange(len(streams))
        card.launch(number)
        streams[number].launched()
        for _ in range(choose.randint(0, 40)):
            card.go_on()
    card.finish()
    assert found == passes * [i + 1 for i in range(len(units))]
