"""Where texts with drafts part from plain ones: whether plain decoding's two best logits were closer there than rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.planner.contract.plan.plan import Plan

if TYPE_CHECKING:
    from penstock.runtime.engine.passes.generate import Generation

SEEN = 8
"""Tokens of a text at which rounding is measured: logits in BF16 are often the same to the last bit at a single one."""


class Look(NamedTuple):
    """At one token of a plain reply."""

    apart: float
    """Between the two best logits of one row."""
    rounding: float
    """The most that two logits move against each other from one row to many, at any of :func:`places`: one may go up, the other down."""
    repeats: bool
    """Whether plain decoding, asked again, says all tokens before it once more."""


Make = Callable[[Sequence[int], int, int], "Generation"]
"""A prompt, new tokens, tokens of the prompt in one pass -> the reply, with its logits."""


class Parting(NamedTuple):
    """The first token that differs of one text."""

    text: int
    token: int
    seen: Look

    @property
    def is_tie(self) -> bool:
        return self.seen.repeats and self.seen.apart <= self.seen.rounding

    def __str__(self) -> str:
        if not self.seen.repeats:
            return f"text {self.text} parts at token {self.token}, and plain decoding parts from itself before"
        what = "a tie" if self.is_tie else "no tie"
        apart = f"its two best logits are {self.seen.apart:.3g} apart, rounding {self.seen.rounding:.3g}"
        return f"text {self.text} parts at token {self.token}: {apart}: {what}"


def first_differences(mine: Sequence[Sequence[int]], its: Sequence[Sequence[int]]) -> dict[int, int]:
    """Text -> its first token that differs, of those that do."""
    found = {}
    for k, (one, other) in enumerate(zip(mine, its, strict=True)):
        if list(one) != list(other):
            found[k] = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return found


def places(prompt: int, reply: int, token: int, rows: int) -> list[int]:
    """Tokens of a reply, those nearest to ``token`` first: so many are before each that prompt and reply are read in whole passes of
    ``rows``."""
    whole = [place for place in range(1, reply) if (prompt + place) % rows == 0]
    return sorted(whole, key=lambda place: abs(place - token))[:SEEN]


def look(made: Make, prompt: Sequence[int], its: Sequence[int], token: int, chunk: int, rows: int) -> Look:
    """At ``token`` of plain decoding's ``its``. One row's logits are those of the reply's steps, said once more; many rows' those of a
    prompt of the same tokens, ``rows`` a pass, so that a fault in verifying is not taken for rounding."""
    again = made(prompt, len(its), chunk)
    said, one = again.tokens[0], [each.logits[-1].float() for each in again.passes if each.step.wanted]
    rounding = 0.0
    for place in places(len(prompt), len(said), token, rows):
        many = made([*prompt, *said[:place]], 1, rows).passes[-1].logits[-1].float()
        moved = one[place] - many
        rounding = max(rounding, float(moved.max() - moved.min()))
    best = one[token].topk(2).values
    return Look(float(best[0] - best[1]), rounding, said[:token] == list(its[:token]))


def partings(
    plan: Plan, checkpoint: Path, prompts: Sequence[Sequence[int]], its: Sequence[Sequence[int]], at: dict[int, int], rows: int
) -> list[Parting]:
    """In a process of its own, by a plan without drafts: of each text that parts from plain decoding's ``its`` at a token ``at``, where
    passes with drafts have up to ``rows``."""
    from penstock.runtime.engine.open_session import open_session
    from penstock.runtime.engine.passes.generate import Batch
    from penstock.runtime.engine.passes.sampling import Sampler, Sampling
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, open_cuda
    from penstock.runtime.memory.ground import OpenCard

    device, chunk = find_device(Budget.of(plan)), plan.decisions.prefill_chunk_tokens
    with open_session(plan, checkpoint, OpenCard(open_cuda(Budget.of(plan), device), device)) as session:  # type: ignore[arg-type]
        session.load(Batch([(0,) * plan.workload.prompt_tokens], 2, chunk))

        def made(tokens: Sequence[int], new: int, together: int) -> Generation:
            return session.generate(Batch([tokens], new, together), Sampler(Sampling(), device), keep_logits=True, reuse=False)

        return [Parting(text, token, look(made, prompts[text], its[text], token, chunk, rows)) for text, token in at.items()]
