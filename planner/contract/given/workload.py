"""What is asked of a model on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


class Objective(StrEnum):
    """What a plan minimises: seconds of the workload, seconds per token of all, or time to first token."""

    latency = "latency"
    throughput = "throughput"
    ttft = "ttft"


@dataclass(frozen=True)
class Turn:
    """The passes in which a server answers one request for each of its ``rows``."""

    rows: int
    parts: int
    """Passes that one prompt takes."""
    plain: float
    """Passes in which rows decode and nothing else."""
    carrying: float
    """Passes that carry prompts, too."""
    tokens: float
    """Of prompts in each of these, on average."""


@dataclass(frozen=True)
class Workload:
    """``requests`` requests in batches of ``batch``, each ``prompt_tokens`` in and ``new_tokens`` out."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    requests: int
    shared_prefix_tokens: int
    objective: Objective
    vram_guard_bytes: int
    """VRAM to leave alone."""
    dram_reserve_bytes: int
    """DRAM to leave alone, on top of what the hardware's budget already leaves."""
    kv_spill: bool
    """Whether KV pages may live outside the compute device's tier."""
    kept_tokens: int = 0
    """Tokens of earlier prompts whose KV is worth keeping, for prompts that begin alike: the working set of all shared prefixes."""

    context_tokens: int = 0
    """Tokens that each sequence has room for, at least. Seconds are predicted for ``prompt_tokens`` and ``new_tokens`` all the same."""

    clients: int = 0
    """Of a server: those who ask at the same time, each again once it was answered. 0: the workload is no server's."""
    arrivals_per_s: float = 0.0
    """Of a server: requests that come in a second, at random. 0: clients ask as often as they are answered."""
    length_spread: float = 0.0
    """Standard deviation of the lengths of prompts and of replies, over their means, which are ``prompt_tokens`` and ``new_tokens``."""
    queue: int = 128
    """Requests that wait at most; a server refuses more."""

    @property
    def is_served(self) -> bool:
        """Whether requests join and leave between passes."""
        return self.clients > 0

    def in_batches(self, batch: int, requests: int) -> Workload:
        """The same for ``requests`` that come at once, to no server."""
        return replace(self, batch=batch, requests=requests, clients=0, arrivals_per_s=0.0, length_spread=0.0)

    def together(self, batch: int) -> int:
        """Prompts that are computed at once, of ``batch`` sequences that live: a server's come one after the other."""
        return 1 if self.is_served else batch

    def turn(self, rows: int, chunk_tokens: int) -> Turn:
        """Of a server whose ``rows`` are all in use, with ``chunk_tokens`` of prompts a pass.

        So many requests come in a turn of all rows. Each takes ``parts`` passes for its prompt; parts of several may share a pass. Passes
        that decode follow each other at random, so of n passes n * (1 - exp(-rows * parts / n)) carry a part, and

            carrying = max(n * (1 - exp(-rows * parts / n)), rows * prompt_tokens / chunk_tokens)
        """
        parts = -(-self.prompt_tokens // chunk_tokens)
        most = -self.new_tokens * math.expm1(-rows * parts / self.new_tokens)
        carrying = max(most, rows * self.prompt_tokens / chunk_tokens)
        return Turn(rows, parts, max(0.0, self.new_tokens - carrying), carrying, rows * self.prompt_tokens / carrying)

    @property
    def end_tokens(self) -> int:
        """Tokens of one sequence at its end, as far as seconds are predicted for."""
        return self.prompt_tokens + self.new_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence has room for."""
        return max(self.end_tokens, self.context_tokens)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that leaves room for ``new_tokens``."""
        return self.max_tokens - self.new_tokens
