"""A card's points in time: what is asked of the driver, and when one of its events may be used again."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.runtime.memory.card_events import CardEvents, HostPoint


@dataclass(eq=False)
class Driver:
    """An event of a driver that is over when a test says so; every call is kept."""

    calls: list[str]
    at_ms: list[float] = field(default_factory=list)
    over: bool = False

    def record(self, stream: list[float]) -> None:
        self.calls.append("record")
        self.at_ms, self.over = stream, False

    def wait(self, stream: object) -> None:
        self.calls.append("wait")

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.over = True

    def query(self) -> bool:
        self.calls.append("query")
        return self.over

    def elapsed_time(self, end: Driver) -> float:
        self.calls.append("elapsed")
        return end.at_ms[0] - self.at_ms[0]


class Card:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.made: list[Driver] = []
        self.events = CardEvents(self._make)

    def _make(self) -> Driver:
        self.made.append(Driver(self.calls))
        return self.made[-1]

    def asked(self) -> list[str]:
        """What the driver was asked since the last time."""
        calls, self.calls[:] = list(self.calls), []
        return calls


def test_what_is_held_keeps_its_driver_event_and_what_is_dropped_gives_it_back() -> None:
    card = Card()
    first, second = (card.events.record([0.0]) for _ in range(2))
    assert len(card.made) == 2
    waiting = [second]
    del first
    third = card.events.record([0.0])
    assert len(card.made) == 2
    del second
    fourth = card.events.record([0.0])
    assert len(card.made) == 3 and waiting and third is not fourth


def test_of_what_has_happened_the_driver_is_asked_once() -> None:
    card = Card()
    event = card.events.record([0.0])
    assert not event.done() and not event.done()
    event.before("compute")
    assert card.asked() == ["record", "query", "query", "wait"]
    card.made[0].over = True
    assert event.done()
    assert card.asked() == ["query"]
    assert event.done()
    event.before("copies")
    event.wait()
    assert card.asked() == []


def test_whoever_has_waited_or_asked_for_the_time_knows_that_it_happened() -> None:
    card = Card()
    begin, end = card.events.record([250.0]), card.events.record([1750.0])
    begin.wait()
    assert card.asked() == ["record", "record", "synchronize"]
    assert [end.seconds_after(begin) for _ in range(2)] == [1.5, 1.5]
    end.before("compute")
    assert end.done() and begin.done()
    assert card.asked() == ["elapsed"]


def test_what_somebody_knows_to_have_happened_the_driver_is_asked_of_its_time_alone() -> None:
    card = Card()
    begin, end = card.events.record([250.0]), card.events.record([1750.0])
    card.asked()
    end.happened = True
    end.before("compute")
    end.wait()
    assert end.done() and end.seconds_after(begin) == 1.5
    assert card.asked() == ["elapsed"]


def test_an_event_that_is_used_again_knows_nothing_of_its_earlier_point() -> None:
    card = Card()
    event = card.events.record([100.0])
    event.wait()
    begin = card.events.record([50.0])
    assert event.seconds_after(begin) == 0.05
    del event
    later = card.events.record([350.0])
    assert len(card.made) == 2 and not later.done()
    assert later.seconds_after(begin) == 0.3


def test_a_point_of_the_hosts_clock_has_happened_and_asks_the_driver_nothing() -> None:
    card, point = Card(), HostPoint(1.25)
    begin = card.events.record([0.0])
    card.asked()
    point.before("compute")
    point.wait()
    assert point.done() and point.seconds_after(begin) == 1.25 and card.asked() == []
