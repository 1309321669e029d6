"""What a run needs before its model is known: DRAM, faulted in beside the imports, the card, opened beside them, and the other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import import_torch, uninterrupted
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import arena_bytes
from penstock.runtime.company.cards_here import check_cards
from penstock.runtime.company.company import Company
from penstock.runtime.company.starting import start
from penstock.runtime.memory.arena import Arena, PageLock
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.free_memory import Free, free_dram, refuse_full_cards, refuse_if_short

if TYPE_CHECKING:
    import torch

    from penstock.runtime.memory.device import CopyDevice


class Groundwork:
    """``with`` it the plan's DRAM is taken, in threads of its own and without torch; its end gives everything back.

    ``budget`` is of the work as far as it is known: what it takes is refused in one line (UserError) where it is not free. Of its DRAM
    ``arena_bytes`` are taken here. A plan of several ranks has this one's share taken; its other processes are
    started here, by rank 0, and left when this ends.
    """

    def __init__(self, budget: Budget, arena_bytes: int, ranks: int = 1, company: Company | None = None, cards: Sequence[int] = ()):
        self._budget, self._ranks, self._cards = budget, ranks, cards
        self.company = company
        self._arena_bytes = arena_bytes
        self._arena: Arena | None = None
        self._free: Free | None = None
        self._copier: CopyDevice | None = None
        self._device: torch.device | None = None
        self._card: threading.Thread | None = None
        self._error: BaseException | None = None
        self._seen = threading.Event()
        self._closed = False
        self._open_s = 0.0

    @classmethod
    def of(cls, plan: Plan, beside_bytes: int = 0, company: Company | None = None) -> Groundwork:
        """For ``plan``, with ``beside_bytes`` of DRAM on top of what it has: the part of rank 0, or of the rank that has joined
        ``company``. UserError for a plan of several hosts that no launcher started, or of cards that are not here, or that another process
        has filled."""
        hosts, count = plan.hardware.hosts, plan.ranks.count
        if hosts > 1 and company is None:
            raise UserError(
                f"the plan is for {hosts} hosts of {count // hosts} ranks each: start `torchrun --nnodes={hosts} --nproc-per-node="
                f"{count // hosts} ... -m penstock.runtime run plan=` on each, or chat, or serve (docs/ranks.md); or solve again with"
                " hardware.hosts=1"
            )
        if company is None:  # a rank that was started sees its own card alone
            check_cards(plan)
            refuse_full_cards(plan, dict(enumerate((plan.hardware.devices or range(count))[:count])))
        own = plan.of_rank(0 if company is None else company.rank)
        nbytes = arena_bytes(own.hardware, own.model, own.decisions) + beside_bytes
        return cls(Budget.of(own), nbytes, plan.ranks.count, company, plan.hardware.devices)

    def __enter__(self) -> Groundwork:
        self._free = free_dram()
        refuse_if_short(self._budget, self._free)
        try:
            if self._ranks > 1 and self.company is None:
                self.company = start(self._ranks, self._cards)
            with uninterrupted():
                self._arena = Arena(self._arena_bytes)
                self._arena.begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def open_card(self, failed: Callable[[BaseException], None] = lambda error: None) -> torch.device:
        """The plan's device. A GPU is opened, and the arena page-locked, on another thread. Imports torch and nothing else that takes
        long. UserError where there is no GPU. What goes wrong on the other thread is raised where its work is waited for, and ``failed`` is
        told at once, there."""
        import_torch()
        from penstock.runtime.memory.cuda import find_device

        self._device = device = find_device(self._budget, self._number)
        if self._budget.gpu is not None:
            with uninterrupted():
                self._card = threading.Thread(target=self._open, args=(device, failed), name="penstock-card", daemon=True)
                self._card.start()
        return device

    @property
    def _number(self) -> int:
        """Of the card that this process computes on, among those that it sees: a launcher's sees its own alone."""
        return self._cards[0] if self._cards and (self.company is None or not self.company.is_launched) else 0

    def _open(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        from penstock.runtime.memory import cuda

        begun = time.perf_counter()
        try:
            with cuda.told_in_one_line(self._budget, device, "" if self.company is None else self.company.who):
                vram_bytes, card_bytes = cuda.free_vram(device)
                self._free = replace(self._free or free_dram(), vram_bytes=vram_bytes, card_bytes=card_bytes)
                refuse_if_short(self._budget, self._free)
                self._seen.set()
                self._copier = cuda.open_cuda(self._budget, device)  # type: ignore[assignment]  # it takes its own events only
            self._open_s = time.perf_counter() - begun
            self._taken.wait()
            if isinstance(self._copier, PageLock) and not self._closed:
                self._taken.lock_pages(self._copier)
        except BaseException as error:  # raised where it is waited for
            self._error = error
            failed(error)
        finally:
            self._seen.set()

    def free(self) -> Free:
        """What was free before anything was taken. Waits for the card to say so, not to be opened."""
        if self._card is not None:
            self._seen.wait()
            self._raise()
        if self._free is None:
            raise RuntimeError("`with` comes first")
        return self._free

    @property
    def device(self) -> torch.device:
        """What :meth:`open_card` found."""
        if self._device is None:
            raise RuntimeError("open_card() comes first")
        return self._device

    def settle(self) -> None:
        """Wait until the plan's DRAM is resident."""
        self._taken.wait()

    @property
    def _taken(self) -> Arena:
        if self._arena is None:
            raise RuntimeError("`with` comes first")
        return self._arena

    def arena(self, nbytes: int) -> Arena:
        """The arena, resident; another thread may still be page-locking it.

        ``nbytes`` is what the checkpoint really needs. If that exceeds the plan's figure, because units lie in many pieces, the arena is
        allocated again, and the start takes that much longer.
        """
        if nbytes > self._taken.nbytes:
            copier = self.copier()
            self._taken.close()
            with uninterrupted():
                self._arena = Arena(nbytes)
                self._arena.begin()
            self._arena.wait()
            if isinstance(copier, PageLock):
                self._arena.lock_pages(copier)
        self._taken.wait()
        return self._taken

    def copier(self) -> CopyDevice | None:
        """The card with the arena page-locked; None without one. Raises what opening it raised."""
        if self._card is not None:
            self._card.join()
            self._raise()
        return self._copier

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def beside(self) -> dict[str, tuple[float, int]]:
        """What was done on other threads: seconds and bytes. To be asked once it is over."""
        done = {"fault_in": (self._taken.fault_s, self._taken.nbytes)}
        if self._card is not None:
            done |= {"page_lock": (self._taken.lock_s, self._taken.locked_bytes), "cuda": (self._open_s, 0)}
        return done

    def close(self) -> None:
        """End its threads, undo the page-locking, give the DRAM back. Safe to call twice. Whatever uses the arena must have ended."""
        self._closed = True
        if self._arena is not None:
            self._arena.stop()
            if self._card is not None:
                self._card.join()
            self._arena.close()
        if self.company is not None and self.company.rank == 0:
            self.company.leave()
