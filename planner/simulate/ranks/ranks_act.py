"""A plan of several ranks acted out: each by its own plan, all on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.simulate.acted import Acted, Options, Progress
from penstock.planner.simulate.lanes.lanes import Clock
from penstock.planner.simulate.lanes.wait import Wait
from penstock.planner.simulate.ranks.rank_play import PartedPass, RankPlay
from penstock.planner.simulate.sums import Stand, acted_out


class RanksSimulation:
    """``plan``, from the moment at which all ranks have loaded. A pass is over when the first rank has its logits; all begin the next one
    together. Bus, drive and what links carry at once are shared by those that use them at the moment."""

    def __init__(self, plan: Plan, options: Options, progress: Progress = lambda done, of: None):
        self._plan, self._progress = plan, progress
        self._clock = Clock(plan.hardware.links.share)
        self._here: set[tuple[object, int]] = set()
        self._ranks = [RankPlay(plan, number, self._clock, options, self._here) for number in range(plan.ranks.count)]

    def run(self) -> tuple[Acted, ...]:
        """Act it out; of each rank what came of it. UserError where nothing can go on."""
        work, batch = self._plan.workload, self._plan.decisions.batch
        waves, rest = divmod(max(work.requests, batch), batch)
        self._steps = (waves + bool(rest)) * (work.new_tokens - 1)
        for rank in self._ranks:
            rank.engine.fill()
        while self._clock.step():
            self._settle()
        self._rebase()
        for rank in self._ranks:
            rank.engine.record.begin()
        acted_out(waves, 0, lambda: self._batch(batch), self._stand)
        if rest:
            self._batch(rest)
        return tuple(rank.engine.outcome() for rank in self._ranks)

    def _batch(self, batch: int) -> None:
        passes = [rank.passes(batch) for rank in self._ranks]
        for rank, own in zip(self._ranks, passes, strict=True):
            rank.begin_batch(batch, own)
        first = self._ranks[0].engine.record
        began, prompts = first.offset_ns, True
        for together in zip(*passes, strict=True):
            count, each = together[0][0], [one for _, one in together]
            if prompts and not each[0].parts[0].prefill:
                self._mark_prefill(began)
                prompts = False
            act = partial(self._pass, each) if prompts else partial(self._step, each)
            acted_out(count, 0, act, self._stand)
        if prompts:
            self._mark_prefill(began)

    def _mark_prefill(self, began: int) -> None:
        first = self._ranks[0].engine.record
        first.passed("prefill", began)
        for rank in self._ranks:
            rank.engine.record.prefill_ns.append(first.offset_ns - began)

    def _step(self, each: Sequence[PartedPass]) -> None:
        first = self._ranks[0].engine.record
        began = first.offset_ns
        self._pass(each)
        for rank in self._ranks:
            rank.engine.record.step_ns.append(first.offset_ns - began)
        first.passed(f"decode {len(first.step_ns)}", began)
        self._progress(len(first.step_ns), self._steps)

    def _pass(self, each: Sequence[PartedPass]) -> None:
        self._here.clear()
        going = [rank.passing(one) for rank, one in zip(self._ranks, each, strict=True)]
        waits: dict[int, Wait] = {}
        for number, one in enumerate(going):
            self._go_on(waits, number, one)
        while waits:
            self._settle()
            ready = [number for number, wait in waits.items() if wait.ready()]
            for number in ready:
                self._go_on(waits, number, going[number])
            if not ready and not self._clock.step():
                raise next(iter(waits.values())).stuck()
        least_ns = max(rank.engine.least_ns for rank in self._ranks)
        for rank in self._ranks:
            rank.engine.least_ns = least_ns
        self._rebase()

    @staticmethod
    def _go_on(waits: dict[int, Wait], number: int, one: Iterator[Wait]) -> None:
        """``one`` rank does what it can until it waits again, or is through."""
        waits.pop(number, None)
        for wait in one:
            waits[number] = wait
            return

    def _settle(self) -> None:
        for rank in self._ranks:
            rank.engine.settle()

    def _rebase(self) -> None:
        passed = self._clock.rebase()
        for rank in self._ranks:
            rank.engine.rebased(passed)

    def _stand(self) -> list[Stand] | None:
        stands = [stand for rank in self._ranks if (stand := rank.engine.stand()) is not None]
        return stands if len(stands) == len(self._ranks) else None
