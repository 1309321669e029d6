"""What every system is asked, what it answers, and which systems there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """The same work for every system: these prompts, so many new tokens each, greedy, under these budgets."""

    system: str
    checkpoint: str
    prompts: Sequence[Sequence[int]]
    """Token ids, all of one length, decoded together."""
    new_tokens: int
    vram_bytes: int
    """The budget on the card, CUDA's context included; 0 computes on the CPU."""
    context_bytes: int
    """What CUDA's context takes of it, by the machine's profile."""
    dram_bytes: int | None
    """What systems that can be told may take of DRAM; None is all that is free."""
    folder: str
    """A directory of this system alone, for what it writes to disk; removed after it."""
    config_dir: str
    """Where the machine's profile lies, for Penstock."""

    @property
    def allocator_bytes(self) -> int:
        """What the budget leaves to tensors on the card."""
        return self.vram_bytes - self.context_bytes

    @property
    def scratch(self) -> Path:
        return Path(self.folder)


@dataclass(frozen=True)
class Measured:
    """What a system did with a job. ``step_s`` are the passes after the prefill, each until its tokens were on the host."""

    prefill_s: float
    step_s: Sequence[float]
    tokens: Sequence[Sequence[int]]
    load_s: float
    vram_bytes: int
    """Peak bytes that the allocator handed out, plus the context."""
    dram_bytes: int
    """Peak bytes beyond what the interpreter, the libraries and the context take: anonymous, page-locked, and weights that stay mapped;
    other page cache is not counted."""
    limit: dict[str, float] | None = None
    """Penstock only: seconds a token that its bytes take at each link's limit, the limits measured in its own process."""


@dataclass(frozen=True)
class System:
    """A system of the table: its ``title``, the module here whose ``measure`` runs it, and the packages whose versions count."""

    title: str
    module: str
    packages: tuple[str, ...]


SYSTEMS: dict[str, System] = {
    "penstock": System("Penstock", "penstock_run", ()),
    "accelerate_dram": System("accelerate, rest in DRAM", "accelerate_map", ("accelerate",)),
    "accelerate_disk": System("accelerate, rest on disk", "accelerate_map", ("accelerate",)),
    "diffusers_leaf": System("diffusers groups, leaf level", "diffusers_groups", ("diffusers", "accelerate")),
    "diffusers_filled": System("diffusers groups, leaf level, budget filled", "diffusers_groups", ("diffusers", "accelerate")),
    "diffusers_block": System("diffusers groups, block level", "diffusers_groups", ("diffusers", "accelerate")),
    "airllm": System("AirLLM, from disk", "airllm_disk", ("airllm", "accelerate")),
}
