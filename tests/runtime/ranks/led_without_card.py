"""A rank behind the first one whose card, where its plan has one, is host memory: ``python -m tests.runtime.ranks.led_without_card``"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.company.company import Company
from penstock.runtime.led import open_led, rank_process
from penstock.runtime.memory.ground import OpenCard
from penstock.runtime.memory.groundwork import Groundwork
from tests.support import HostCopier


class NoCard(OpenCard):
    """In place of ``memory.groundwork.Groundwork`` for plans with cards."""

    @classmethod
    def of(cls, plan: Plan, beside_bytes: int, company: Company) -> NoCard | Groundwork:
        with_card = plan.hardware.gpu is not None
        return cls(HostCopier(), torch.device("cpu"), company) if with_card else Groundwork.of(plan, beside_bytes, company)

    def __enter__(self) -> NoCard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def open_card(self, failed: Callable[[BaseException], None]) -> torch.device:
        return self.device


if __name__ == "__main__":
    open_led.Groundwork = NoCard  # type: ignore[misc, assignment]
    rank_process.main()
