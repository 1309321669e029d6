"""Replies of one plan in a process of its own: with drafts, without, and which of them repeat themselves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.planner.contract.plan.plan import Plan

if TYPE_CHECKING:
    from penstock.runtime.engine.passes.generate import Generation
    from penstock.runtime.engine.session import Session


@dataclass(frozen=True)
class Replies:
    """What one process measured of a plan: of each reply its seconds, its tokens, and what drafting counted."""

    seconds: list[float]
    tokens: list[list[int]]
    drafts: list[dict[str, Any]]

    def only(self, chosen: Sequence[int]) -> Replies:
        return Replies(*([values[k] for k in chosen] for values in (self.seconds, self.tokens, self.drafts)))

    @property
    def tokens_per_s(self) -> float:
        """Of all replies together, as a prediction has it: long texts count for more than short ones."""
        return sum(map(len, self.tokens)) / sum(self.seconds)

    def counted(self, name: str) -> float:
        return float(sum(counts[name] for counts in self.drafts))


@dataclass(frozen=True)
class Looked:
    """Of a kind's texts: those whose replies do not repeat themselves, of the first ``texts``."""

    fresh: list[int]
    texts: int


def repeats(tokens: Sequence[int]) -> bool:
    """Whether eight tokens in a row occur more than three times."""
    return max(Counter(tuple(tokens[k : k + 8]) for k in range(len(tokens) - 7)).values(), default=0) > 3


Reply = Callable[[Sequence[int]], "Generation"]


@contextmanager
def replying(plan: Plan, checkpoint: Path) -> Iterator[tuple[Session, Reply]]:
    """A loaded session, and what makes a reply to a prompt in it."""
    from penstock.runtime.engine.open_session import open_session
    from penstock.runtime.engine.passes.generate import Batch
    from penstock.runtime.engine.passes.sampling import Sampler, Sampling
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, open_cuda
    from penstock.runtime.memory.ground import OpenCard

    device, chunk = find_device(Budget.of(plan)), plan.decisions.prefill_chunk_tokens
    with open_session(plan, checkpoint, OpenCard(open_cuda(Budget.of(plan), device), device)) as session:  # type: ignore[arg-type]
        session.load(Batch([(0,) * plan.workload.prompt_tokens], 2, chunk))
        yield session, lambda prompt: session.generate(Batch([prompt], plan.workload.new_tokens - 2, chunk), Sampler(Sampling(), device))


def measure_replies(plan: Plan, checkpoint: Path, prompts: Sequence[Sequence[int]], both: bool) -> dict[str, Replies]:
    """In a process of its own: a reply to each of ``prompts`` with the plan's drafts; with ``both`` in turns with plain decoding
    by the same plan. What drafts taught of the first prompt, which warms up, stays learnt."""
    from penstock.runtime.speculate.chains import DraftedSoFar

    names, draw = ["drafted", "plain"] if both else ["drafted"], random.Random(0)
    made = {name: Replies([], [], []) for name in names}
    with replying(plan, checkpoint) as (session, reply):
        chains = session.chains
        for k, prompt in enumerate([prompts[0], *prompts]):
            for name in draw.sample(names, len(names)):
                session.chains = chains if name == "drafted" else None
                counts = DraftedSoFar()
                if chains is not None:
                    chains.counts = counts
                said = reply(prompt)
                if k:
                    made[name].seconds.append(said.decode_s)
                    made[name].tokens.append(said.tokens[0])
                    made[name].drafts.append(asdict(counts))
    return made


def look_at(plan: Plan, checkpoint: Path, prompts: Mapping[str, Sequence[Sequence[int]]], wanted: int) -> dict[str, Looked]:
    """In a process of its own: of each kind's ``prompts`` the first ``wanted`` whose plain replies do not repeat themselves."""
    made: dict[str, Looked] = {}
    with replying(plan, checkpoint) as (_, reply):
        for kind, texts in prompts.items():
            fresh: list[int] = []
            looked = 0
            for looked, text in enumerate(texts, 1):
                if not repeats(reply(text).tokens[0]):
                    fresh.append(looked - 1)
                if len(fresh) == wanted:
                    break
            made[kind] = Looked(fresh, looked)
    return made
