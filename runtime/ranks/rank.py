"""Which part of a dealt model this process has, and how it reaches the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from penstock.planner.contract.decided.recording import can_record
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.runtime.company.company import Company
from penstock.runtime.hops.hops import Hops
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.kv.attention.paged_attention import PagedAttention
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.model.skeleton import Skeleton
from penstock.runtime.ranks.dealt_model import DealtModel
from penstock.runtime.ranks.followers import Leading
from penstock.runtime.ranks.pass_parts import Holds, PassParts
from penstock.runtime.ranks.rank_store import ExpertPart, part_of_skeleton
from penstock.runtime.ranks.shared_steps import SharedSteps


@dataclass
class Rank:
    """``number`` of ``count``: its hops, its layers, and on rank 0 its word to the others."""

    number: int
    dealing: Dealing
    vocab: int
    model: DealtModel
    company: Company
    leading: Leading | None
    part_tokens: int = 0
    """Tokens of a prompt's pass that go through a layer together; 0: all of them."""
    one_card: bool = False
    """Whether other ranks may be on the same card."""
    shared: SharedSteps | None = None
    """What steps are recorded with, where hops are, once :meth:`meet` is over."""
    recorded: torch.dtype | None = None
    """Of hops that the plan records with this rank's steps; None where it records none."""
    _hops: Hops | None = None

    @classmethod
    def of(cls, plan: Plan, company: Company, one_card: bool = False) -> Rank:
        """Of the whole ``plan``; :meth:`meet` comes before the first pass."""
        count, number = plan.ranks.count, company.rank
        dealing = plan.dealing
        dealt = DealtModel(dealing, number, plan.model.vocab, plan.model.routers.top_k if plan.model.routers else 0)
        leading = Leading(company, count) if number == 0 else None
        recorded = getattr(torch, plan.model.compute_dtype) if can_record(plan.hardware, plan.of_rank(number).model) else None
        parts = plan.decisions.prefill_part_tokens
        return cls(number, dealing, plan.model.vocab, dealt, company, leading, parts, one_card, recorded=recorded)

    def take_parts(self, attention: PagedAttention | None, pool: KvPool, holds: Sequence[Holds], put: Put) -> None:
        """Have passes of prompts go through the layers in parts, where the plan says so. Where rows are computed each for itself they stay
        whole."""
        if self.part_tokens and attention is not None:
            self.model.parts = PassParts(self.part_tokens, attention, pool, holds, put)

    def meet(self, device: torch.device) -> None:
        """Make and warm up the ways to the other ranks, all at the same time, once the card is open."""
        with self.company.noticing():
            self.model.ways = self._hops = Hops(
                self.number, self.dealing.ways, device, self.company.ways, self.one_card, self.company.seat.hosts == 1
            )
        self.shared = SharedSteps(self.company, self.count, self.model, self.hops.meter, self.recorded) if self.recorded else None

    def hop_bytes(self, tokens: int, hidden: int) -> int:
        """At most, of a hop of ``tokens`` hidden states or of a rank's logits behind them, each number of four bytes."""
        rows = max(len(self.dealing.vocab_rows(rank, self.vocab)) for rank in range(self.count))
        return 4 * tokens * max(hidden, rows)

    @property
    def hops(self) -> Hops:
        """The ways to the others."""
        if self._hops is None:
            raise RuntimeError("meet() comes first")
        return self._hops

    @property
    def count(self) -> int:
        return self.dealing.count

    def part(self, skeleton: Skeleton) -> Skeleton:
        """``skeleton``, whose layers were dealt, with this rank's part of what lies around them."""
        rows = self.dealing.vocab_rows(self.number, self.vocab)
        return part_of_skeleton(skeleton, rows, self.vocab, self.number == 0, ExpertPart(self.number, self.dealing.slices))

    def reports(self) -> list[dict[str, Any]]:
        """Of the ranks that this one leads."""
        return [] if self.leading is None else self.leading.reports()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """:meth:`close`. A rank that follows and ends by an error is in the middle of what all do: none of the others ends with it."""
        self.close(broken=kind is not None and self.leading is None)

    def close(self, broken: bool = False) -> None:
        """On rank 0 have the others give their sessions back. Then the hops, of which nothing may be waiting, unless a pass was left, or
        they are ``broken``."""
        broken = broken or self.company.is_lost or (self.leading is not None and self.leading.is_broken)
        if self.leading is not None:
            self.leading.close()
        if broken and self._hops is not None:
            self._hops.let_go()
        if broken and self.shared is not None:
            self.shared.let_go()
        if self._hops is not None:
            self._hops.close(broken)
        if self.leading is not None:
            self.leading.closed()
