"""Steps that rank 0 leads: it tells each before it computes it, and the others compute it, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.runtime.company.company import Company
from penstock.runtime.model.rows import Row, RowKind, Step


class Leading:
    """Rank 0's word to the first ``count`` ranks of ``company``."""

    def __init__(self, company: Company, count: int):
        self._company, self._count = company, count
        self._inside = False

    @contextmanager
    def passing(self, step: Step) -> Iterator[None]:
        """``step`` is computed inside, by all. A pass that is left in its middle is the others' end: they wait for what does not come."""
        self._inside = True
        self._tell("step", rows=rows_in_words(step), ends=step.ends, schedule=step.schedule)
        with self._company.noticing():
            yield
        self._inside = False

    def forget(self, sequence: int) -> None:
        """``sequence`` has ended."""
        self._tell("forget", sequence=sequence)

    def pretend(self, sequence: int, tokens: int) -> None:
        """A rehearsal takes so many tokens of ``sequence`` for computed."""
        self._tell("pretend", sequence=sequence, tokens=tokens)

    def finish_loading(self, longest: tuple[int, int]) -> None:
        """Rehearsals are over. ``longest``: rows of a recorded step, and tokens that each may come to hold."""
        self._tell("load", longest=longest)
        if self._company.line is not None:
            self._company.line.steady()

    def book(self, phase: str) -> None:
        """What was done since the last call belongs to ``phase``."""
        self._tell("book", phase=phase)

    def links(self, alone: int | None) -> list[dict[str, Any]]:
        """What the others measured of their links; with ``alone`` that rank's only."""
        self._tell("links", alone=alone)
        return [self._company.hear(rank) for rank in range(1, self._count)]

    def round_trips(self, nbytes: int, rounds: int) -> None:
        """Have the others pass on ``nbytes`` so often, while their links are busy; what rank 0 sends meanwhile comes back to it."""
        self._tell("rounds", nbytes=nbytes, rounds=rounds)

    def reports(self) -> list[dict[str, Any]]:
        """Of all that follow."""
        self._tell("report")
        return [self._company.hear(rank) for rank in range(1, self._count)]

    def tell_pages(self, do: str, **words: Any) -> None:
        """Have the others do something with the kept pages of their layers."""
        self._tell("pages", do=do, **words)

    def ask_pages(self, do: str, **words: Any) -> list[dict[str, Any]]:
        """As :meth:`tell_pages` -> what each answers."""
        self.tell_pages(do, **words)
        return [self._company.hear(rank) for rank in range(1, self._count)]

    def close(self) -> None:
        """Have the others give their sessions back; end them where they wait in the middle of a pass."""
        if self._inside:
            self._company.kill_others()
        elif not self._company.is_lost:
            self._tell("close")

    def closed(self) -> None:
        """Return when the others have."""
        if not (self._inside or self._company.is_lost):
            for rank in range(1, self._count):
                self._company.hear(rank)

    @property
    def is_broken(self) -> bool:
        """Whether a pass was left in its middle."""
        return self._inside

    def _tell(self, what: str, **words: Any) -> None:
        self._company.tell({"what": what, **words}, self._count)


class Led(Protocol):
    """A session that follows."""

    def run(self, step: Step) -> object: ...
    def forget(self, sequence: int) -> None: ...
    def pretend(self, sequence: int, tokens: int) -> None: ...
    def finish_loading(self, longest: tuple[int, int]) -> None: ...
    def book(self, phase: str) -> None: ...
    def links(self, alone: int | None) -> dict[str, Any]: ...
    def round_trips(self, nbytes: int, rounds: int) -> object: ...
    def pages(self, words: dict[str, Any]) -> dict[str, Any] | None: ...
    def report(self) -> dict[str, Any]: ...


def follow(company: Company, led: Led) -> None:
    """Do what rank 0 says, until it closes."""
    while True:
        words = company.hear()
        match words["what"]:
            case "step":
                with company.noticing():
                    led.run(step_of_words(words["rows"], words["ends"], words["schedule"]))
            case "forget":
                led.forget(words["sequence"])
            case "pretend":
                led.pretend(words["sequence"], words["tokens"])
            case "load":
                rows, tokens = words["longest"]
                led.finish_loading((rows, tokens))
                company.steady()
            case "book":
                led.book(words["phase"])
            case "links":
                company.answer(led.links(words["alone"]))
            case "rounds":
                led.round_trips(words["nbytes"], words["rounds"])
            case "pages":
                with company.noticing():
                    answer = led.pages(words)
                if answer is not None:
                    company.answer(answer)
            case "report":
                company.answer(led.report())
            case "close":
                company.steady(False)
                return
            case other:
                raise RuntimeError(f"rank 0 says {other!r}, which no session does")


def rows_in_words(step: Step) -> list[list[Any]]:
    """The rows of ``step``, for JSON."""
    return [[row.sequence, row.tokens, row.start, row.pages, str(row.kind), row.wanted] for row in step.rows]


def step_of_words(rows: list[list[Any]], ends: bool, schedule: int | None) -> Step:
    """Of what :func:`rows_in_words` made."""
    each = (Row(number, tuple(tokens), start, tuple(pages), RowKind(kind), wanted) for number, tokens, start, pages, kind, wanted in rows)
    return Step(tuple(each), ends, schedule)
