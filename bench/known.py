"""Prompts whose greedy replies are known, so that every later reply of a server can be judged."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.clients import COMPLETIONS
from bench.sse import Address, Reply, ask

LEAST_GAP = 0.1
"""Between the best token's logprob and the next one's. Passes of other rows round otherwise; no token of a known reply hangs on that."""
WORDS = (
    "def",
    "class",
    "return",
    "import",
    "self",
    "value",
    "for",
    "in",
    "range",
    "print",
    "if",
    "else",
    "name",
    "data",
    "(",
    ")",
    ":",
    "=",
    "x",
)
TRIES = 40
"""Prompts that are looked at for each one wanted."""


@dataclass(frozen=True)
class Known:
    """A prompt, and what the server said to it alone."""

    prompt: str
    reply: str
    tokens: int

    def body(self, model: str, **more: object) -> dict[str, Any]:
        return {"model": model, "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True} | more

    def wrong(self, reply: Reply) -> str | None:
        """What is wrong with ``reply``; None where it is right, or ended in words of its own."""
        if reply.answered:
            return None if reply.text == self.reply else f"{self.prompt[-40:]!r}: {reply.text!r} for {self.reply!r}"
        return None if reply.error is not None and reply.whole else f"neither answered nor an error: {reply.status} {reply.error}"


def words(seed: str, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


async def known_replies(
    address: Address, model: str, count: int, tokens: int = 12, head: str = "", length: int = 24, least_gap: float = LEAST_GAP
) -> list[Known]:
    """``count`` prompts that begin with ``head``, of ``length`` words, each asked alone and long decided at every token. SystemExit where
    they are not found."""
    found: list[Known] = []
    for prompt in _prompts(head, length, TRIES * count):
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        reply = await ask(address, COMPLETIONS, body)
        if not reply.answered or reply.document is None:
            raise SystemExit(f"{prompt[:60]!r}: {reply.status} {reply.error}")
        if _least_gap(reply.document["choices"][0]["logprobs"]["top_logprobs"]) >= least_gap:
            found.append(Known(prompt, reply.text, tokens))
        if len(found) == count:
            return found
    raise SystemExit(
        f"{len(found)} of {TRIES * count} prompts have replies without ties; {count} are wanted: a trained checkpoint has them"
    )


def _prompts(head: str, length: int, count: int) -> Iterator[str]:
    yield from (head + words(f"known {k}", length) for k in range(count))


def _least_gap(tops: Sequence[Mapping[str, float]]) -> float:
    best = (sorted(top.values(), reverse=True) for top in tops)
    return min((pair[0] - pair[1] for pair in best if len(pair) > 1), default=0.0)
