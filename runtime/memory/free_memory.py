"""How much memory is free before a run, and how much it took at its peak."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.host_memory import memory_facts
from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.company.cards_here import shown_as
from penstock.runtime.company.nvml import free_vram_of
from penstock.runtime.memory.budget import Budget

COMES_BACK_S = 5.0
"""Within which VRAM is free again whose process has ended."""
_AGAIN_S = 0.25


class PeakDram:
    """Peak bytes that this process holds beyond what it held at the start. ``held_bytes`` were allocated for the run before that.

    It is the kernel's high-water mark of resident bytes, reset at the start where that is allowed, less the file-backed pages that came
    since. Those are libraries loaded on demand: they belong to the interpreter, and the kernel drops them when memory is short.
    """

    def __init__(self, held_bytes: int = 0) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._base = _status()
        for key in ("VmRSS", "RssAnon"):
            self._base[key] -= held_bytes

    def leave_out_cuda(self, arena_bytes: int) -> None:
        """What came since the start beside the arena is CUDA's own: kernels and libraries that the rehearsal loaded."""
        grown = _status()["RssAnon"] - self._base["RssAnon"] - arena_bytes
        self._base["VmRSS"] += max(0, grown)

    def peak_bytes(self) -> int:
        now = _status()
        return max(0, now["VmHWM"] - self._base["VmRSS"] - max(0, now["RssFile"] - self._base["RssFile"]))


def _status() -> dict[str, int]:
    """Sizes of /proc/self/status in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


@dataclass(frozen=True)
class Free:
    """What a run may take, before it takes anything."""

    dram_bytes: int
    vram_bytes: int = 0
    """Beside the run's own context; 0 with ``card_bytes`` 0 when no card takes part."""
    card_bytes: int = 0
    """All of the card."""


def free_dram() -> Free:
    return Free(memory_facts().plan_bytes)


def refuse_to_compare(model: ModelSpec, free: Free) -> None:
    """UserError when the unstreamed model, loaded after the run where the run computed, would not fit."""
    where, room = ("VRAM", free.vram_bytes) if free.card_bytes else ("DRAM", free.dram_bytes)
    if model.weight_bytes > room:
        raise UserError(
            f"validate=full: the whole model takes {show_bytes(model.weight_bytes)} of {where} and {show_bytes(room)} is free;"
            " set validate=none, or compare a checkpoint with fewer layers"
        )


def refuse_if_short(budget: Budget, free: Free) -> None:
    """UserError when the plan needs more memory than was free."""
    need = budget.dram_bytes
    if need > free.dram_bytes:
        raise UserError(
            f"the plan takes {show_bytes(need)} of DRAM and {show_bytes(free.dram_bytes)} is free; free some, or solve again with"
            f" hardware.dram_bytes={free.dram_bytes}"
        )
    if not free.card_bytes:
        return
    if budget.vram_limit_bytes > free.card_bytes:
        raise UserError(
            f"hardware.vram_bytes={budget.vram_limit_bytes} is more than the card's {show_bytes(free.card_bytes)}; solve with"
            f" hardware.vram_bytes={free.card_bytes}"
        )
    if budget.vram_beside_context_bytes > free.vram_bytes:
        raise UserError(
            f"the plan takes {show_bytes(budget.vram_beside_context_bytes)} of VRAM beside its context and"
            f" {show_bytes(free.vram_bytes)} is free; {short_remedy(budget, free.vram_bytes)}"
        )


def short_remedy(budget: Budget, room_bytes: int) -> str:
    """What to do where another process left ``room_bytes`` of a card: a smaller plan, unless that is hardly more than a context."""
    if room_bytes > 2 * budget.context_bytes:
        return f"end the other process or solve again with hardware.vram_bytes={room_bytes}"
    return "end the other process or solve again with hardware.devices= of other cards"


def refuse_full_cards(
    plan: Plan,
    cards: Mapping[int, int],
    free_bytes: Callable[[int], int | None] = free_vram_of,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """UserError where a card has less VRAM free than its rank of ``plan`` takes with a context. ``cards``: rank -> the card's number among
    those that CUDA shows this process. Neither torch nor a context is needed, so this comes before all else. Nothing where NVML is silent.
    A card that is short is asked again for ``COMES_BACK_S``.
    """
    if plan.hardware.gpu is None:
        return
    torch = sys.modules.get("torch")
    for rank, card in cards.items():
        if rank == 0 and torch is not None and torch.cuda.is_initialized():
            continue  # it has a context already: CUDA says what is free beside that
        budget, waited_s = Budget.of(plan.of_rank(rank)), 0.0
        need = budget.vram_bytes - budget.guard_bytes  # which is to stay free
        while (free := free_bytes(card)) is not None and free < need and waited_s < COMES_BACK_S:
            wait(_AGAIN_S)
            waited_s += _AGAIN_S
        if free is not None and free < need:
            who = f"rank {rank}: " if plan.ranks.count > 1 else ""
            raise UserError(
                f"{who}the plan takes {show_bytes(need)} of VRAM and {show_bytes(free)} is free on GPU {shown_as(card)};"
                f" {short_remedy(budget, free)}"
            )
