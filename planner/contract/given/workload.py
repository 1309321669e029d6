"""What is asked of a model on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Objective(StrEnum):
    """What a plan minimises: seconds of the workload, seconds per token of all, or time to first token."""

    latency = "latency"
    throughput = "throughput"
    ttft = "ttft"


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
