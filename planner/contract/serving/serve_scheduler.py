"""Which tokens the next pass computes. Requests join and leave between passes.

A pass carries the newest token of every row that decodes, then parts of prompts, the oldest prompt first. What is left of it goes to drafts
behind the rows that decode. A request is admitted in order of arrival, where a row is free and its prompt fits beside what the living rows
need next. Where pages run out all the same, the youngest row gives its pages up, and is computed again later. The oldest row never does, so
that each request becomes the oldest and ends. Drafts take no page that anybody else needs in the pass, and keep none behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice

from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serve_step import ServePages, ServeStep, Share
from penstock.planner.contract.serving.waiting import QueueFull, ServeRequest, ServeRow, Waiting


class Scheduler:
    """One step at a time: :meth:`next_step`, then :meth:`finished`. Requests may be added and aborted at any time."""

    def __init__(self, limits: ServeLimits, pages: ServePages):
        self.limits = limits
        self._pages = pages
        self._waiting = Waiting()
        self._living: dict[int, ServeRow] = {}
        """By age, the oldest first."""
        self._shares: dict[int, Share] | None = None
        """Of the step that was given out."""
        self._arrived = 0

    @property
    def waiting(self) -> int:
        """Requests that hold no pages."""
        return len(self._waiting)

    @property
    def living(self) -> int:
        """Rows."""
        return len(self._living)

    def add(self, request: ServeRequest) -> None:
        """QueueFull where ``limits.queue`` wait already. ValueError where it can never be computed, or its number is taken."""
        if min(request.prompt_tokens, request.new_tokens) < 1 or self.limits.pages_of(request.end_tokens) > self.limits.pages:
            raise ValueError(
                f"request {request.number} of {request.prompt_tokens} + {request.new_tokens} tokens; allowed: 1 or more of each, "
                f"{self.limits.capacity_tokens} together"
            )
        if request.number in self._living or request.number in self._waiting:
            raise ValueError(f"request {request.number} is here already")
        if self._waiting.new >= self.limits.queue:
            raise QueueFull(f"{self.limits.queue} requests wait")
        self._waiting.join(ServeRow(request, self._arrived))
        self._arrived += 1

    def abort(self, number: int) -> None:
        """It is not computed any further. Nothing where it is not here."""
        self._remove(number)

    @property
    def rooms(self) -> dict[int, int]:
        """Rows that decode, the oldest first -> tokens that may be drafted behind the newest one: less than are still to come."""
        return {row.number: row.request.new_tokens - row.given - 1 for row in self._living.values() if row.decodes}

    def next_step(self, drafts: Mapping[int, int] | None = None) -> ServeStep:
        """What the next pass computes. ``drafts``: row -> tokens to verify behind its newest one; it may get fewer. RuntimeError where the
        last step is not over, or where pages that nobody holds are not to be had."""
        if self._shares is not None:
            raise RuntimeError("the last step is not over")
        shares: dict[int, Share] = {}
        given_up: list[int] = []
        prompts: list[ServeRow] = []
        for row in list(self._living.values()):
            if not row.decodes:
                prompts.append(row)
            elif row.number in self._living:
                self._insist(row, 1, shares, given_up)
        left = self.limits.pass_tokens - len(shares)
        short = False
        for row in prompts:
            if not left or short:
                break
            wished = min(left, row.left)
            if row is next(iter(self._living.values())):
                self._insist(row, wished, shares, given_up)
            elif row.number in self._living:
                short = not self._put(row, min(wished, self._room(row)), shares)
            left -= shares[row.number].count if row.number in shares else 0
        if not short and not given_up:
            self._admit(left, shares)
        if drafts:
            self._draft(drafts, shares, spare=not short and not given_up)
        if shares:
            self._shares = shares
        elif self._living or any(self._may_start(row) for row in self._waiting):
            raise RuntimeError(f"{self._pages.free} of {self.limits.pages} pages are free, and no row can be computed")
        return ServeStep(tuple(shares.values()), tuple(given_up))

    def finished(self, over: Collection[int] = (), said: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """The step that was given out has been computed. A row whose last known token was in it has one more token; one that verified has
        those that it ``said``: its kept drafts, and one more.

        Returns the numbers that are over: those that have all their ``new_tokens``, and those in ``over`` that are here."""
        if self._shares is None:
            raise RuntimeError("no step was given out")
        shares, self._shares = self._shares, None
        ended = []
        for number, share in shares.items():
            row = self._living[number]
            if share.kind == "verify":
                self._verified(row, share, (said or {})[number])
            else:
                row.computed += share.count
                row.given += share.wanted
            if row.given >= row.request.new_tokens:
                ended.append(number)
        return tuple(number for number in dict.fromkeys([*ended, *over]) if self._remove(number))

    def recomputed(self, number: int, cached: int) -> None:
        """What a restore promised was no good: only the first ``cached`` tokens are computed. Its part of the step that was given out does
        not count."""
        row = self._living.get(number)
        if row is None:
            return
        row.computed = min(cached, row.computed)
        row.held = self.limits.pages_of(row.computed)
        if self._shares is not None:
            self._shares.pop(number, None)

    def _insist(self, row: ServeRow, count: int, shares: dict[int, Share], given_up: list[int]) -> None:
        """So many tokens of it, whatever that takes of younger rows. It gives itself up where it is the youngest."""
        while not self._put(row, count, shares):
            youngest = next(reversed(self._living.values()))
            if len(self._living) == 1:
                raise RuntimeError(f"{self._pages.free} of {self.limits.pages} pages are free, and the only row cannot be computed")
            del self._living[youngest.number]
            shares.pop(youngest.number, None)
            self._pages.release(youngest.number)
            youngest.restart()
            self._waiting.come_back(youngest)
            given_up.append(youngest.number)
            if youngest is row:
                return

    def _put(self, row: ServeRow, count: int, shares: dict[int, Share]) -> bool:
        """Whether there was room for so many tokens of it, which are then in the step."""
        end = row.computed + count
        if count < 1:
            return False
        if end > row.held * self.limits.page_tokens:
            if not self._pages.hold(row.number, end):
                return False
            row.held = self.limits.pages_of(end)
        shares[row.number] = Share(row.number, row.computed, count, "decode" if row.decodes else "prompt", end == row.tokens)
        return True

    def _draft(self, drafts: Mapping[int, int], shares: dict[int, Share], spare: bool) -> None:
        """Drafts behind rows that decode, from what the pass has left: each as many as any other, but none more than it has. Pages that are
        free are taken for them where they are ``spare``."""
        left = self.limits.pass_tokens - sum(share.count for share in shares.values())
        rooms = {number: min(drafts.get(number, 0), room) for number, room in self.rooms.items() if number in shares}
        for place, (number, room) in enumerate(sorted(rooms.items(), key=lambda each: each[1])):
            row, share = self._living[number], shares[number]
            count = min(room, left // (len(rooms) - place))
            if spare and self._pages.hold(number, share.start + 1 + count):
                row.held = max(row.held, self.limits.pages_of(share.start + 1 + count))
            count = min(count, row.held * self.limits.page_tokens - share.start - 1)
            if count > 0:
                shares[number] = replace(share, count=1 + count, kind="verify")
                left -= count

    def _verified(self, row: ServeRow, share: Share, said: int) -> None:
        """Drafts that were not kept are written over, and need no pages."""
        if not 1 <= said <= share.count:
            raise ValueError(f"row {row.number} said {said} tokens; allowed: 1 to {share.count}")
        row.computed += said
        row.given += said
        if row.held > self.limits.pages_of(row.tokens):
            self._pages.trim(row.number, row.tokens)
            row.held = self.limits.pages_of(row.tokens)

    def _room(self, row: ServeRow) -> int:
        """Tokens of it for which there are pages."""
        return (row.held + self._pages.free) * self.limits.page_tokens - row.computed

    def _admit(self, left: int, shares: dict[int, Share]) -> None:
        """Those that wait, in order, while rows, pages and the ``left`` tokens allow. Who waits for another's prompt is passed over."""
        for row in self._candidates():
            if not left or self._needs(row) > self._pages.free - self._claimed():
                return
            row.computed = self._pages.prefix(row.number)
            row.held = self.limits.pages_of(row.computed)
            count = min(left, row.left)
            if not self._put(row, count, shares):
                self._pages.release(row.number)
                row.restart()
                return
            left -= count
            self._waiting.leave(row.number)
            self._enter(row)

    def _candidates(self) -> list[ServeRow]:
        """The head of the line: as many as rows are free."""
        free = self.limits.rows - len(self._living)
        return list(islice((row for row in self._waiting if self._may_start(row)), free)) if free else []

    def _may_start(self, row: ServeRow) -> bool:
        after = row.request.after
        if after is None:
            return True
        leader = self._living.get(after)
        if leader is not None:
            return leader.computed >= leader.request.prompt_tokens
        return not any(other.number == after and other.order < row.order for other in self._waiting)

    def _needs(self, row: ServeRow) -> int:
        """Pages for its known tokens and one more, beside those that it shares with the one it waited for."""
        request = row.request
        whole = self.limits.pages_of(min(row.tokens + 1, request.end_tokens))
        shared = (request.prompt_tokens - 1) // self.limits.page_tokens if request.after in self._living else 0
        return whole - shared

    def _claimed(self) -> int:
        """Pages that living rows need next: for the rest of a prompt, and one to go on with."""
        pages_of = self.limits.pages_of
        return sum(
            max(0, min(pages_of(row.request.end_tokens), max(pages_of(row.tokens), row.held) + 1) - row.held)
            for row in self._living.values()
        )

    def _enter(self, row: ServeRow) -> None:
        """Among the living, by age."""
        younger = [number for number, other in self._living.items() if other.order > row.order]
        self._living[row.number] = row
        for number in younger:
            self._living[number] = self._living.pop(number)

    def _remove(self, number: int) -> bool:
        """Whether it was here."""
        if self._shares is not None:
            self._shares.pop(number, None)
        if self._living.pop(number, None) is None:
            return self._waiting.leave(number) is not None
        self._pages.release(number)
        return True
