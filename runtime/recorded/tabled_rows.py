"""The numbers that recorded steps read: they lie on the device, and change from launch to launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.runtime.kv.attention.page_tables import PageTables, Put
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.model.rows import RowKind, Step

WARMED = 2
"""Passes before a capture: the first loads kernels and takes memory."""


def refusal(error: RuntimeError) -> str:
    """Why a step is not recorded, in a line."""
    return str(error).strip().partition("\n")[0][:200]


class TabledStepper(Protocol):
    """Computes steps by numbers that lie on the device."""

    device: torch.device
    pool: KvPool

    @property
    def put(self) -> Put: ...
    def compute_tabled(self, step: Step, tables: PageTables, numbers: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor: ...


@dataclass
class TabledRows:
    """Of steps whose rows are as many, of as many tokens. All int64 on the device; 8 bytes for each page of a row.

    A row that is not there repeats the last one, a token that is not there the last of its row: both write what that one writes.
    """

    flat: torch.Tensor
    """Ids, positions and slots of the pool of all tokens, the rows' firsts of these positions, and the rows' ends."""
    numbers: Sequence[torch.Tensor]
    """Ids, positions and slots, over the same memory."""
    tokens: int
    """Of each row."""
    every: torch.Tensor
    """[tokens]: 0, 1, and so on; nobody changes it."""
    tables: PageTables
    """Over the same memory."""
    _held: list[tuple[int, ...]] = field(default_factory=list)
    """The pages of each row, as the tables have them."""

    @classmethod
    def of(cls, step: Step, stepper: TabledStepper) -> TabledRows:
        """For steps whose rows have as many tokens and pages as those of ``step`` at most; filled with it."""
        rows, width, each = len(step.rows), max(len(row.pages) for row in step.rows), len(step.rows[0].tokens)
        device, page_tokens = stepper.device, stepper.pool.page_tokens
        flat = torch.zeros(3 * rows * each + 2 * rows, dtype=torch.long, device=device)
        *numbers, starts, ends = flat.split([*[rows * each] * 3, rows, rows])
        pages = torch.zeros(rows, width, dtype=torch.long, device=device)
        every, counts = torch.arange(rows * each, device=device), torch.full((rows,), each, dtype=torch.long, device=device)
        tables = PageTables(every[::each].contiguous(), starts, counts, ends, pages, page_tokens, each, width * page_tokens)
        made = cls(flat, numbers, each, every, tables)
        made.fill(step, stepper.put)
        return made

    @property
    def rows(self) -> int:
        return self.tables.pages.shape[0]

    def serves(self, step: Step) -> bool:
        """Whether :meth:`fill` has a place for all of ``step``."""
        width = self.tables.pages.shape[1]
        return len(step.rows) <= self.rows and all(
            row.kind is not RowKind.prompt and len(row.tokens) <= self.tokens and len(row.pages) <= width for row in step.rows
        )

    def fill(self, step: Step, put: Put) -> None:
        """The numbers of ``step``."""
        rows = [*step.rows, *[step.rows[-1]] * (self.rows - len(step.rows))]
        page, pages = self.tables.page_tokens, self.tables.pages
        at = [(row, min(k, len(row.tokens) - 1)) for row in rows for k in range(self.tokens)]
        ids, positions = [row.tokens[k] for row, k in at], [row.start + k for row, k in at]
        slots = [row.pages[t // page] * page + t % page for (row, _), t in zip(at, positions, strict=True)]
        self.flat.copy_(put([*ids, *positions, *slots, *(row.start for row in rows), *(row.end for row in rows)]))
        held = [row.pages for row in rows]
        if held != self._held:
            width = pages.shape[1]
            pages.copy_(put([number for one in held for number in (*one, *[0] * (width - len(one)))]).view(-1, width))
            self._held = held
