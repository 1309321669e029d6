"""Ranks whose cards are played: their VRAM is host memory. ``python -m tests.runtime.ranks.played_cards PLAN CHECKPOINT OUT`` leads them.

PLAN is a plan's file. OUT gets what rank 0 says of :func:`steps`, and what its engine counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.planner.contract.plan.planfile import read_plan
from penstock.runtime.company import starting
from penstock.runtime.company.company import Company
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.led import open_led, rank_process
from penstock.runtime.memory.ground import OpenCard
from penstock.runtime.model.rows import RowKind, Step
from tests.support import HostCopier

CPU = torch.device("cpu")
MOST_TOKENS = 48


class PlayedGround(OpenCard):
    """As ``memory.groundwork.Groundwork``, on a card that is played."""

    def open_card(self, _failed: object) -> torch.device:
        """It is."""
        return self.device


class PlayedGroundwork:
    """In place of ``Groundwork``."""

    @staticmethod
    @contextmanager
    def of(_plan: object, _beside: int, company: Company) -> Iterator[PlayedGround]:
        yield PlayedGround(HostCopier(), CPU, company)


def steps(pool: PagePool) -> Iterator[Step]:
    """Three sequences of fixed tokens: prompts, then tokens of some, a prompt between them, and of more rows than the CPU computes."""
    sequences = [KvSequence.of(number, [7 * number + k + 1 for k in range(5 + 4 * number)]) for number in range(3)]
    for sequence in sequences:
        sequence.hold(pool, MOST_TOKENS)

    def prompt(sequence: KvSequence) -> Step:
        return Step((sequence.row(len(sequence.tokens), RowKind.prompt),))

    def tokens(number: int, *some: KvSequence) -> Step:
        for sequence in some:
            sequence.tokens.append((13 * number + 5 * sequence.number) % 290 + 1)
        return Step(tuple(sequence.row(1, RowKind.decode) for sequence in some))

    def over(step: Step) -> Iterator[Step]:
        yield step
        for row in step.rows:
            sequences[row.sequence].cached = row.end

    one, two, three = sequences
    yield from over(prompt(one))
    yield from over(prompt(two))
    for number in range(4):
        yield from over(tokens(number, one))
        yield from over(tokens(number, two, one))
    yield from over(prompt(three))
    for number in range(4, 8):
        yield from over(tokens(number, one, two, three) if number % 2 else tokens(number, three, one))


def main(own: str = "tests.runtime.ranks.played_cards") -> None:
    """Lead, unless a watchdog started this. ``own``: what it is to start."""
    open_led.Groundwork = PlayedGroundwork  # type: ignore[misc,assignment]
    if len(sys.argv) == 1:
        rank_process.main()
    plan, checkpoint, out = read_plan(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    starting.LED = own
    company = starting.start(plan.ranks.count)
    with open_session(plan, checkpoint, PlayedGround(HostCopier(), CPU, company)) as session:
        session.load(Batch([[1] * 20] * 3, 8, 1 << 20))
        said = [session.step(step).clone() for step in steps(session.engine.kv.pages)]
        session.book("decode")
        told = {"stages": session.engine.stage_totals(), "others": session.rank.reports()}
        facts = session.engine.facts()
        told |= {"handed": facts["handed"], "graphs": facts["graphs"], "prompts": facts["prompts"], "launched": session.launched}
        ring = session.engine.facts()["ring"]
    company.leave()
    torch.save({"said": said, "told": told, "ring": ring}, out)


if __name__ == "__main__":
    main()
