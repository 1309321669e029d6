"""Units that the CPU computes where they lie, beside a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from penstock.planner.contract.decided.decision import Decision


@dataclass(frozen=True)
class HostUnits:
    """FFN units and blocks of the LM head in DRAM with which the CPU computes in a decode step of at most ``rows`` rows. In any other pass
    they stream like the rest. A step that is launched kernel by kernel has FFN units where several ranks share the model, or where it reads
    layers from the SSD, and none else.
    """

    ffn: Annotated[int, Decision(lambda s: s.host_ffn, "force.host_ffn", "CPU", "{} ffn", weighed=True, card=True, placed=True)] = 0
    """FFN units that the CPU computes in decode steps, where they lie in DRAM; 0: the card computes all of them, and the LM head, too,
    unless ``force.host_head`` asks for blocks of it."""
    rows: Annotated[int, Decision(lambda s: s.host_rows, "force.host_rows", "CPU", "up to {} rows", card=True, aside=True)] = 0
    """The most rows of a pass for which the CPU computes its units; a pass with more streams them to the card."""

    head: Annotated[int, Decision(lambda s: s.host_head, "force.host_head", "CPU", "{} head", weighed=True, card=True, placed=True)] = 0
    """Row blocks of the LM head that the CPU computes in decode steps, where they lie in DRAM; 0: the card computes all of them."""
    near: Annotated[int, Decision(lambda s: s.host_near, "force.host_near", "CPU", "", card=True)] = 0
    """By how many FFN units more or fewer than ``ffn`` a run tries to have the CPU compute, one at a time: it goes on with what takes its
    steps less. 0, as it is where nobody forces it: the plan's count stays."""

    @property
    def count(self) -> int:
        """Units of any kind."""
        return self.ffn + self.head

    def compute(self, rows: int) -> bool:
        """Whether the CPU computes any unit of a decode step with ``rows`` rows."""
        return self.count > 0 and rows <= self.rows
