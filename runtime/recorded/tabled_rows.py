"""The numbers that recorded decode steps read: they lie on the device, and change from launch to launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.runtime.kv.attention.page_tables import PageTables, Put
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.model.rows import RowKind, Step


class TabledStepper(Protocol):
    """Computes steps by numbers that lie on the device."""

    device: torch.device
    pool: KvPool

    @property
    def put(self) -> Put: ...
    def compute_tabled(self, step: Step, tables: PageTables, numbers: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor: ...


@dataclass
class Tabled:
    """Of rows that decode one token each. All int64 on the device; 8 bytes for each page of a row."""

    numbers: torch.Tensor
    """[3, rows]: ids, positions, slots of the pool."""
    pages: torch.Tensor
    """[rows, most pages]"""
    every: torch.Tensor
    """[rows]: 0, 1, and so on; nobody changes it."""
    tables: PageTables
    """Over the same memory."""
    _held: list[tuple[int, ...]] = field(default_factory=list)
    """The pages of each row, as ``pages`` has them."""

    @classmethod
    def of(cls, step: Step, page_tokens: int, device: torch.device) -> Tabled:
        """For steps whose rows are as many as those of ``step`` and have as many pages at most; filled by nobody yet."""
        rows, width = len(step.rows), max(len(row.pages) for row in step.rows)
        numbers = torch.zeros(3, rows, dtype=torch.long, device=device)
        pages = torch.zeros(rows, width, dtype=torch.long, device=device)
        every, one = torch.arange(rows, device=device), torch.ones(rows, dtype=torch.long, device=device)
        return cls(numbers, pages, every, PageTables(every, numbers[1], one, pages, page_tokens, 1, width * page_tokens))

    @property
    def rows(self) -> int:
        return self.pages.shape[0]

    def serves(self, step: Step) -> bool:
        """Whether :meth:`fill` has a place for all of ``step``."""
        return len(step.rows) <= self.rows and all(
            row.kind is RowKind.decode and len(row.tokens) == row.wanted == 1 and len(row.pages) <= self.pages.shape[1] for row in step.rows
        )

    def fill(self, step: Step, put: Put) -> None:
        """The numbers of ``step``. Rows that are recorded and not there repeat the last one, and write what it writes."""
        rows = [*step.rows, *[step.rows[-1]] * (self.rows - len(step.rows))]
        page = self.tables.page_tokens
        ids, positions = [row.tokens[0] for row in rows], [row.start for row in rows]
        slots = [row.pages[row.start // page] * page + row.start % page for row in rows]
        self.numbers.copy_(put([*ids, *positions, *slots]).view(3, -1))
        held = [row.pages for row in rows]
        if held != self._held:
            width = self.pages.shape[1]
            self.pages.copy_(put([number for one in held for number in (*one, *[0] * (width - len(one)))]).view(-1, width))
            self._held = held
