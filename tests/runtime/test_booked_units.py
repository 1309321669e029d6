"""When the kernels of units that lie on the card are booked: many at once, in their order, and never before they are over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.stream import MOST_UNBOOKED, RingStream
from tests.runtime.fakes import FakeDevice


class Still:
    """Streams nothing."""

    def begin_pass(self) -> None: ...


class Asked(FakeDevice):
    """Counts how often it was asked whether something is over."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def done(self, event: Any) -> bool:
        self.asked += 1
        return super().done(event)


@pytest.fixture
def made() -> tuple[RingStream, Asked, Ledger]:
    device, ledger, nothing = Asked(), Ledger(keep_spans=True), Still()
    return RingStream(nothing, nothing, {}, device, ledger), device, ledger  # type: ignore[arg-type]


class Passing:
    """A ring through which all that is asked for comes at once."""

    entered_after = None

    def begin_pass(self) -> None: ...

    def enter(self, unit: Unit) -> tuple[int, torch.Tensor]:
        return 0, torch.zeros(1, dtype=torch.uint8)

    def leave(self, unit: Unit, event: Any) -> None: ...


STREAMED: dict[str, tuple[tuple[Unit, ...], int]] = {
    "none": ((), 1),
    "the last": ((Unit("ffn", 1),), 3),
    "the first two": ((Unit("attn", 0), Unit("ffn", 0)), 3),
}


@pytest.mark.parametrize(("streamed", "events"), STREAMED.values(), ids=STREAMED)
def test_resident_units_beside_each_other_have_one_event_but_in_a_timeline(streamed: tuple[Unit, ...], events: int) -> None:
    """None is behind a streamed unit, of which nobody could say how long it was waited for."""
    device, ledger = Asked(), Ledger()
    stream = RingStream(Passing(), Still(), dict.fromkeys(streamed, ()), device, ledger)  # type: ignore[arg-type]
    stream.begin_pass()
    compute(stream, range(2))
    stream.end_pass()
    device.finish("compute")
    assert device.done_on["compute"] == events
    stream.settle()
    assert ledger.totals()["compute"].count == events


def names(ledger: Ledger) -> list[str]:
    return [span.name for span in ledger.spans]


def compute(stream: RingStream, layers: range) -> None:
    for layer in layers:
        for kind in ("attn", "ffn"):
            stream.enter(Unit(kind, layer))
            stream.leave(Unit(kind, layer))


def test_units_of_a_pass_are_booked_at_its_end_as_far_as_they_are_over(made: tuple[RingStream, Asked, Ledger]) -> None:
    stream, device, ledger = made
    stream.begin_pass()
    compute(stream, range(3))
    assert device.asked == 0 and not ledger.spans
    for _ in range(4):
        device.advance("compute")
    stream.end_pass()
    assert names(ledger) == ["attn.0", "ffn.0", "attn.1", "ffn.1"]
    device.finish("compute")
    stream.settle()
    assert names(ledger)[4:] == ["attn.2", "ffn.2", "head.0"]
    ends = [span.end for span in ledger.spans]
    assert ends == sorted(ends)


def test_a_long_pass_books_before_its_end(made: tuple[RingStream, Asked, Ledger]) -> None:
    stream, device, ledger = made
    stream.begin_pass()
    compute(stream, range(MOST_UNBOOKED // 2 - 1))
    device.finish("compute")
    assert device.asked == 0
    compute(stream, range(MOST_UNBOOKED // 2 - 1, MOST_UNBOOKED // 2))
    assert len(ledger.spans) == MOST_UNBOOKED - 2
    assert device.asked == 3, "of what came before what is over nobody asks"


def test_computing_that_stands_still_with_nothing_under_way_ends_now(made: tuple[RingStream, Asked, Ledger]) -> None:
    stream, device, ledger = made
    stream.begin_pass()
    stream.enter(Unit("ffn", 0))
    stream.idle()
    assert not device._queues["compute"], "no event was recorded"
    stream.idle()
    stream.resume()
    stream.leave(Unit("ffn", 0))
    device.finish("compute")
    stream.settle()
    assert names(ledger) == ["ffn.0", "ffn.0"], "before it stood still, and behind"


def test_what_is_waited_for_between_two_units_is_booked_with_the_next_one(
    made: tuple[RingStream, Asked, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of an expert for another rank's layer: compute pauses and goes on where no unit is entered, also before the first."""
    stream, device, ledger = made
    monkeypatch.setattr(ledger, "now", lambda: 0.0)  # the clock of the device
    stream.begin_pass()
    for layer, pause in enumerate((stream.pause, stream.idle)):
        pause()
        device.finish("compute")
        device.copy(torch.zeros(1), torch.ones(1))
        arrival = device.copy_event()
        device.compute_waits(arrival)
        stream.resume(arrival)
        compute(stream, range(layer, layer + 1))
        for _ in range(3):  # kernels take their time behind what is waited for
            device.launch(lambda: None)
        device.finish("copies")
        device.finish("compute")
    stream.end_pass()
    device.finish("compute")
    stream.settle()
    assert [span.name for span in ledger.spans if span.waits_for == "h2d"] == ["attn.0", "attn.1"]
    assert [span.name for span in ledger.spans if not span.waits_for][-4:] == ["ffn.0", "attn.1", "ffn.1", "head.0"]
