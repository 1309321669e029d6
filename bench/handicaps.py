"""Penstock with mechanisms left out, from outside: devices that copy worse, plans that decide less. One row of the table each."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB, align_down
from penstock.planner.contract.decided.decisions import CachePolicy, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import Placement
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import check_plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.contract.rules.limits import LIMITS
from penstock.runtime.engine.engine import Engine, EngineOptions
from penstock.runtime.engine.generate import Batch, Generation, Sampler, Sampling, generate
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.model.skeleton import open_skeleton
from penstock.runtime.told.stage_clock import StageClock

WARM_UP_TOKENS = 2
LINK_COPIES, LINK_WINDOWS = 8, 15
"""Copies of one window, and windows, of which the link's limit is the median."""
_PR_SET_THP_DISABLE = 41


class Watched:
    """A device, and what of it was used."""

    def __init__(self, device: Any):
        self._device = device
        self._locked: dict[int, int] = {}
        self.copied_bytes = 0
        self.locked_bytes = 0
        """Of those, copied from page-locked memory."""
        self.waits = 0
        """Times that the host stood still for a copy before it did anything else."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def lock(self, address: int, nbytes: int) -> str | None:
        why = self._device.lock(address, nbytes)
        if why is None:
            self._locked[address] = nbytes
        return why

    def unlock(self, address: int) -> None:
        del self._locked[address]
        self._device.unlock(address)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        start = src.data_ptr()
        self.copied_bytes += src.numel()
        self.locked_bytes += src.numel() * any(at <= start < at + nbytes for at, nbytes in self._locked.items())
        self._device.copy(dst, src)


class Pageable(Watched):
    """Locks nothing, so copies go through the driver's own buffers."""

    def lock(self, address: int, nbytes: int) -> str | None:
        return "left out for the comparison"


class Synchronous(Pageable):
    """A copy begins when all kernels are over, and the host stands still until it is over itself."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._device.host_waits(self._device.compute_event())
        super().copy(dst, src)
        self._device.host_waits(self._device.copy_event())
        self.waits += 1


@dataclass(frozen=True)
class PlacedPlan(Plan):
    """A plan whose units lie where ``placed`` says."""

    placed: Placement = field(kw_only=True)

    @property
    def placement(self) -> Placement:
        return self.placed


def nothing_ahead(plan: Plan) -> Plan:
    """No residents, and each unit copied when compute asks for it."""
    return _without_residents(plan, Force(vram_prefetch_distance=0))


def no_residents(plan: Plan) -> Plan:
    """All units stream, as far ahead as the plan has it."""
    return _without_residents(plan, Force(vram_prefetch_distance=plan.decisions.weights.vram.prefetch_distance))


def _without_residents(plan: Plan, force: Force) -> Plan:
    layers = plan.model.layers
    everything = {"cap_layers": layers, "hwm_layers": layers + LIMITS.headroom_min, "prefetch_distance": layers}
    none = {"policy": CachePolicy.pinned, "resident_attn": 0, "resident_ffn": 0, "resident_head": 0}
    decisions = replace(force, **everything, **none).apply(plan.decisions, layers)
    made = replace(plan, decisions=decisions, predicted=predict(plan.hardware, plan.model, plan.workload, decisions))
    check_plan(made)
    return made


def residents_first(plan: Plan) -> Plan:
    """As many residents as in the plan, but those of the first layers."""
    placement = plan.placement

    def first(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
        return tuple(sorted(tiers, key=lambda tier: tier is not Tier.vram))

    placed = replace(placement, attn=first(placement.attn), ffn=first(placement.ffn))
    return PlacedPlan(plan.hardware, plan.model, plan.workload, plan.decisions, plan.predicted, plan.notes, placed=placed)


def as_solved(plan: Plan) -> Plan:
    return plan


@contextmanager
def small_pages() -> Iterator[None]:
    """No memory mapped inside gets huge pages, whatever it asks for. OSError where the kernel does not know how."""
    libc = ctypes.CDLL(None, use_errno=True)

    def disable(value: int) -> None:
        if libc.prctl(_PR_SET_THP_DISABLE, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "PR_SET_THP_DISABLE")

    disable(1)
    try:
        yield
    finally:
        disable(0)


@dataclass(frozen=True)
class Case:
    """One row: what it adds to, or takes from, the row ``beside``, and how."""

    title: str
    beside: str | None
    device: Callable[[CopyDevice], Watched]
    arrange: Callable[[Plan], Plan]
    options: EngineOptions = EngineOptions()
    pages: Callable[[], Any] = nullcontext


CASES: Mapping[str, Case] = {
    "synchronous": Case("synchronous copies, pageable, nothing ahead", None, Synchronous, nothing_ahead),
    "asynchronous": Case("+ a stream and events of their own", "synchronous", Pageable, nothing_ahead),
    "prefetch": Case("+ prefetch", "asynchronous", Pageable, no_residents),
    "locked": Case("+ page-locked arena", "prefetch", Watched, no_residents),
    "residents": Case("+ residents, in the first layers", "locked", Watched, residents_first),
    "spread": Case("+ residents spread over the layers", "residents", Watched, as_solved),
    "no_wrap": Case("- wrap-around to the next pass", "spread", Watched, as_solved, EngineOptions(wrap_around=False)),
    "small_pages": Case("- huge pages", "spread", Watched, as_solved, pages=small_pages),
}
"""In the order of the table: each of the first six adds one mechanism to the row before; the others take one from the whole."""


@dataclass(frozen=True)
class Measured:
    """What a row did. Counts are over the timed round."""

    prefill_s: float
    step_s: Sequence[float]
    """Passes after the prefill."""
    tokens: Sequence[Sequence[int]]
    h2d_bytes_per_token: float
    limit_gbps: float
    """The link's own rate from page-locked memory, in this process, the mean of before and after."""
    waits_per_pass: float
    """Times that the host stood still: compute's thread for a unit, the copier's for a copy."""
    locked_share: float
    """Of the bytes that were copied: from page-locked memory."""
    resident_bytes: int
    huge_page_bytes: int
    """Of this process's memory when all was loaded."""

    @property
    def decode_s(self) -> float:
        return median(self.step_s)

    @property
    def gbps(self) -> float:
        return self.h2d_bytes_per_token / self.decode_s / GB


def measure(case: Case, plan: Plan, checkpoint: Path, opened: CopyDevice, device: torch.device, batch: Batch) -> Measured:
    """Run ``batch`` once to warm up and once timed. ``plan`` is the solved one, which reads no SSD: UserError otherwise."""
    if plan.placement.ssd_layers:
        raise UserError(f"the plan reads {len(plan.placement.ssd_layers)} layers from SSD in every pass; choose a model that fits in DRAM")
    watched = case.device(opened)
    arranged = case.arrange(plan)
    with case.pages(), closing(Engine(arranged, open_skeleton(checkpoint), watched, device, case.options)) as engine:
        limits = [link_gbps(opened, engine)]
        engine.load(batch, lambda *_: None)
        huge_bytes = huge_page_bytes()
        _run(engine, replace(batch, max_new_tokens=min(WARM_UP_TOKENS, batch.max_new_tokens)))
        before, clock = _counts(engine, watched), StageClock(engine)
        clock.book("warm-up")
        done = _run(engine, batch, clock)
        clock.book("decode")
        waits, copied, locked = (now - then for now, then in zip(_counts(engine, watched), before, strict=True))
        engine.stop()
        limits.append(link_gbps(opened, engine))
        passes = len(done.step_s) + -(-max(map(len, batch.prompts)) // batch.chunk_tokens)
        return Measured(
            prefill_s=done.prefill_s,
            step_s=done.step_s,
            tokens=done.tokens,
            h2d_bytes_per_token=clock.phases["decode"]["h2d"].bytes / len(done.step_s),
            limit_gbps=mean(limits),
            waits_per_pass=waits / passes,
            locked_share=locked / copied,
            resident_bytes=arranged.placement.vram_resident_bytes,
            huge_page_bytes=huge_bytes,
        )


def _counts(engine: Engine, watched: Watched) -> tuple[int, int, int]:
    """(waits, bytes copied, of those from page-locked memory) so far."""
    return engine.card.ring.stats.waits + watched.waits, watched.copied_bytes, watched.locked_bytes


def link_gbps(device: CopyDevice, engine: Engine) -> float:
    """The median over windows of copies of the plan's size from page-locked memory of its own into a ring slot of ``engine``, whose stream
    stands still. Costs ``LINK_COPIES`` such copies of DRAM."""
    slot = engine.link_target
    size = align_down(min(engine.chunking[0], slot.numel()))
    with closing(Arena(LINK_COPIES * size)) as source:
        source.occupy(device)
        rates = []
        for _ in range(LINK_WINDOWS):
            begun = device.copy_event()
            with device.copying():
                for k in range(LINK_COPIES):
                    device.copy(slot[:size], source.slice(k * size, size))
            over = device.copy_event()
            device.host_waits(over)
            rates.append(LINK_COPIES * size / GB / (device.time_of(over) - device.time_of(begun)))
    return median(rates)


def huge_page_bytes() -> int:
    """Of this process's memory, in transparent huge pages."""
    return 1024 * int(re.search(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text()).group(1))


def _run(engine: Engine, batch: Batch, clock: StageClock | None = None) -> Generation:
    def progress(phase: str, done: int, total: int) -> None:
        if clock is not None and (phase, done) == ("decode", 1):
            clock.book("prefill")

    return generate(engine.sequences(batch), batch, Sampler(Sampling(), engine.device), progress=progress)
