"""How a plan is executed, beside what it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.contract.policy.schedule_choice import Schedule
from penstock.planner.contract.speculation.verify_shapes import VerifyShape
from penstock.runtime.asked.page_room import PageRoom
from penstock.runtime.asked.run_schema import CpuProduct


@dataclass(frozen=True)
class EngineOptions:
    """The keys of ``asked.run_schema.EngineConfig``, and what is recorded."""

    wrap_around: bool = True
    warmup_layers: int | None = None
    balance_units: int | None = 1
    keep_finished_units: int = 0
    cpu_product: CpuProduct | None = None
    graphs: bool | None = None
    launched: bool = False
    """The plan has steps launched kernel by kernel which could be recorded."""
    host_threads: int = 0
    """That compute units of a recorded step on the CPU."""
    host_ahead_bytes: int = 0
    """That each of them reads ahead while it waits."""
    schedules: tuple[Schedule, ...] = ()
    """That a recorded step can follow, with what the plan predicts of them."""
    verify_shapes: tuple[VerifyShape, ...] = ()
    """Of passes that verify, and are recorded."""
    prompt_tokens: int = 0
    """Of a pass with prompts, or a part of one, that is recorded around attention."""
    tell: Callable[[str], None] = lambda line: None
    """Gets a line for the user while the model runs."""
    kv_scratch_dir: Path | None = None
    record: Path | None = None
    """File for what every token is routed to."""
    keep_log: bool = False
    keep_spans: bool = False
    page_room: PageRoom = PageRoom()
    """Memory for the KV pages of prefixes."""
    row_tokens: int = 0
    """Tokens that a sequence may come to hold, where that is more than its share of the pool."""
    keep_pool: bool = False
    """Pages of prefixes stay in the pool of a CPU, too, when no sequence holds them any more."""
    one_card: bool = False
    """Several ranks are on one card, which NCCL refuses: hidden states go by gloo. For tests and benches; no key sets it."""
