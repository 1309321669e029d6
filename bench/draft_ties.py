"""Where texts with drafts part from plain ones: whether plain decoding's two best logits were closer there than rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.planner.contract.plan.plan import Plan


class Parting(NamedTuple):
    """The first token that differs of one text."""

    text: int
    token: int
    apart: float
    """Between the two best logits of one row."""
    rounding: float
    """The most that a logit of one row differs from that of many."""
    repeats: bool
    """Whether plain decoding says the token before it once more, behind a prompt of all before that."""

    @property
    def is_tie(self) -> bool:
        return self.repeats and self.apart <= self.rounding

    def __str__(self) -> str:
        if not self.repeats:
            return f"text {self.text} parts at token {self.token}, and plain decoding parts from itself just before"
        what = "a tie" if self.is_tie else "no tie"
        apart = f"its two best logits are {self.apart:.3g} apart, rounding {self.rounding:.3g}"
        return f"text {self.text} parts at token {self.token}: {apart}: {what}"


def first_differences(mine: Sequence[Sequence[int]], its: Sequence[Sequence[int]]) -> dict[int, int]:
    """Text -> its first token that differs, of those that do."""
    found = {}
    for k, (one, other) in enumerate(zip(mine, its, strict=True)):
        if list(one) != list(other):
            found[k] = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return found


def partings(
    plan: Plan, checkpoint: Path, prompts: Sequence[Sequence[int]], its: Sequence[Sequence[int]], at: dict[int, int]
) -> list[Parting]:
    """In a process of its own, by a plan without drafts: of each text that parts from plain decoding's ``its`` at a token ``at``. One row's
    logits are those of a step, many rows' those of the same text as a prompt."""
    from penstock.runtime.engine.generate import Batch
    from penstock.runtime.engine.open_session import open_session
    from penstock.runtime.engine.sampling import Sampler, Sampling
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, open_cuda
    from penstock.runtime.memory.ground import OpenCard

    device, chunk = find_device(Budget.of(plan)), plan.decisions.prefill_chunk_tokens
    found = []
    with open_session(plan, checkpoint, OpenCard(open_cuda(Budget.of(plan), device), device)) as session:  # type: ignore[arg-type]
        session.load(Batch([(0,) * plan.workload.prompt_tokens], 2, chunk))
        for text, token in at.items():
            known = [*prompts[text], *its[text][:token]]
            made = [
                session.generate(Batch([known[: len(known) - back]], 1 + back, chunk), Sampler(Sampling(), device), keep_logits=True)
                for back in (1, 0)
            ]
            one, many = (each.passes[-1].logits[-1].float() for each in made)
            best = one.topk(2).values
            repeats = made[0].tokens[0][:1] == known[-1:]
            found.append(Parting(text, token, float(best[0] - best[1]), float((one - many).abs().max()), repeats))
    return found
