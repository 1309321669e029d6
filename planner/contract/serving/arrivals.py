"""Who asks a server, when, and for how much. Drawn from a seed: the same again each time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.planner.contract.given.workload import Workload


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of replies: lognormal with these means. ``spread``: standard deviation over mean; 0: all alike. The first
    ``shared_tokens`` of each prompt are the same, such as a system prompt; only what comes behind them varies."""

    prompt_tokens: int
    new_tokens: int
    spread: float = 0.0
    shared_tokens: int = 0

    def draw(self, chance: random.Random, most: int) -> tuple[int, int]:
        """Of one request, with room for ``most`` tokens together."""
        shared = min(self.shared_tokens, self.prompt_tokens - 1)
        prompt = min(shared + self._one(self.prompt_tokens - shared, chance), most - 1)
        return prompt, min(self._one(self.new_tokens, chance), most - prompt)

    def _one(self, mean: int, chance: random.Random) -> int:
        if not self.spread:
            return mean
        variance = math.log1p(self.spread**2)
        return max(1, round(chance.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))


@dataclass(frozen=True)
class Arrivals:
    """``requests`` requests. With ``per_s`` they come at random moments, so many a second on average (Poisson). Without, ``clients``
    clients each ask again ``turn_s`` after they were answered."""

    lengths: Lengths
    requests: int
    per_s: float = 0.0
    clients: int = 1
    seed: int = 0
    turn_s: float = 0.005
    """From a client's last token to its next request in the queue: sockets, client, tokenizer. Where other rows decode, the next pass has
    begun by then."""

    @classmethod
    def of(cls, workload: Workload, requests: int, seed: int = 0) -> Arrivals:
        """As ``workload`` has them. One that is no server's: as many clients as its batch."""
        lengths = Lengths(workload.prompt_tokens, workload.new_tokens, workload.length_spread, workload.shared_prefix_tokens)
        return cls(lengths, requests, workload.arrivals_per_s, workload.clients or max(1, workload.batch), seed)

    def at_rate(self, per_s: float) -> Arrivals:
        """The same requests at random moments."""
        return replace(self, per_s=per_s)

    def moments(self) -> Iterator[float]:
        """Seconds at which those requests come that follow no other."""
        chance, at = random.Random(f"moments {self.seed}"), 0.0
        for _ in range(self.requests if self.per_s else min(self.clients, self.requests)):
            at += chance.expovariate(self.per_s) if self.per_s else 0.0
            yield at
