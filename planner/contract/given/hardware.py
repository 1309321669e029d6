"""What is known of a machine: capacities, and rates as curves over transfer size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.given.network import Network


@dataclass(frozen=True)
class SsdPoint:
    """One measured read rate: ``queue_depth`` reads of ``block_bytes`` in flight give ``gbps``."""

    block_bytes: int
    queue_depth: int
    gbps: float


@dataclass(frozen=True)
class Gpu:
    """The compute device of a three-tier machine."""

    name: str
    context_bytes: int
    """VRAM that the CUDA context and its libraries take before the first tensor."""
    dense_tflops: float
    """BF16 matrix products at prefill shapes."""
    attention_tflops: float
    """Causal attention of a long prompt, FLOPs of the lower triangle alone."""
    memory_gbps: float
    """Bytes of weights read per second at decode shapes (batch 1)."""
    h2d: Curve
    """Page-locked host to device over chunk size."""
    d2h: Curve
    h2d_pageable_gbps: float
    h2d_with_d2h_gbps: float
    """H2D share when both directions are busy."""
    burst_tflops: float = 0.0
    """BF16 matrix products of a card that has rested, for ``burst_s``. 0: not known, or no faster than ``dense_tflops``."""
    burst_s: float = 0.0
    copy_s: float = 0.0
    """Host seconds of one copy to the card, beside a thread that launches kernels: the least time from one copy to the next. 0: not known,
    so nothing waits for it."""
    layer_kernels_s: float = 0.0
    """One layer's kernels beside its products, one after the other in a CUDA graph. 0: steps cannot be recorded as one."""
    prompt_piece_s: float = 0.0
    """Host seconds to launch a layer of a prompt that is recorded around its attention. 0: not known, so prompts are launched kernel by
    kernel."""
    decode: Mapping[str, float] = field(default_factory=dict)
    """Format -> 1e9 elements a second that are decoded into memory."""
    products: Mapping[str, float] = field(default_factory=dict)
    """Format -> GB/s of stored bytes that a product of one row reads which decodes nothing into memory."""


@dataclass(frozen=True)
class Card:
    """One of several unlike GPUs of a host."""

    device: int
    """Its number."""
    vram_bytes: int
    gpu: Gpu


@dataclass(frozen=True)
class HardwareProfile:
    """One machine. Capacities are budgets: what a plan may use, the context included.

    ``gpu`` is None on a machine that computes on the CPU from DRAM (two tiers).
    """

    name: str
    vram_bytes: int
    dram_bytes: int
    ssd_bytes: int
    """Free: what lies there already, a checkpoint that exists among it, does not count."""
    ssd_read: tuple[SsdPoint, ...]
    ssd_write_gbps: float
    dram_copy_gbps: float
    dram_bus_gbps: float
    """All that passes through the host's memory, reads and writes together; 0: not known, so nothing waits for it."""
    pin_s_per_gb: float
    """Seconds to fault in and page-lock one GB of DRAM."""
    cpu_cores: int
    cpu_matvec_gbps: float
    """Bytes of BF16 weights that the CPU multiplies by one vector, per second."""
    cpu_dense_tflops: float
    layer_launch_s: float
    """Host seconds to issue one dense decoder layer: the floor of its time at decode. Others: ``contract.prices.launches``."""
    gpu: Gpu | None
    origin: dict[str, str] = field(default_factory=dict)
    """Figure -> where it comes from: ``measured DATE: how`` or ``datasheet: where``."""
    pass_s: float = 0.0
    """Seconds of each pass over the model in which nothing else goes on, as runs of this model found them; 0 without such runs."""
    start_s: float = 0.0
    """The same of a start, beyond reading, page-locking and the first kernels."""
    cpu_attention_gbps: float = 0.0
    """Bytes of K and V, repeated over query heads, that torch attends to on the CPU by one token, per second; 0: not known."""
    cpu_attention_tflops: float = 0.0
    """Of torch's causal attention on the CPU, FLOPs of the lower triangle alone; 0: not known."""
    spread: dict[str, float] = field(default_factory=dict)
    """``contract.lessons.corrections.Figure`` -> the share within which nine of ten runs lie, for figures that runs taught."""
    cpu_threads: int = 0
    """Threads that multiply fastest; 0: not known, torch's own choice."""
    ssd_long_gbps: float = 0.0
    """The drive's rate once it has read for ``ssd_burst_s`` without a pause; 0: not known."""
    ssd_burst_s: float = 0.0
    """Seconds for which it keeps the rates of ``ssd_read``."""
    cpu_decode: Mapping[str, float] = field(default_factory=dict)
    """Format -> 1e9 elements a second that the CPU decodes into memory."""
    cpu_products: Mapping[str, float] = field(default_factory=dict)
    """Format -> GB/s of stored bytes that the CPU multiplies by one row, without a card; a format that is missing is decoded."""
    host: HostRates | None = None
    """The CPU's products beside a card; None: not known, so the card computes everything."""
    devices: tuple[int, ...] = ()
    """Numbers of the cards that plans may use; empty: the first one alone. The first one is ``gpu``, of ``vram_bytes``."""
    others: tuple[Card, ...] = ()
    """Those of ``devices`` that are unlike the first one; all else are like it."""
    round_cards: tuple[Gpu, ...] = ()
    """Of a rank's share of unlike cards: the card of each rank, its own among them. Empty where all are alike."""
    links: Links = Links()
    """Of several cards, or ranks."""
    divided_by: Fraction = Fraction(1)
    """1 / a rank's share of its host's DRAM and drive; 1 of a machine as a whole."""
    hosts: int = 1
    """Machines like this one that ranks are dealt over, as many on each."""
    network: Network | None = None
    """Between them; None: not known, so that no plan is for several."""

    @property
    def cards(self) -> int:
        """Of one host, that plans may use."""
        return 0 if self.gpu is None else max(1, len(self.devices))

    def card(self, number: int) -> Card:
        """The card of that number among ``devices``. ValueError on a machine without one."""
        if self.gpu is None:
            raise ValueError(f"{self.name} has no GPU")
        device = self.devices[number] if self.devices else number
        return next((other for other in self.others if other.device == device), Card(device, self.vram_bytes, self.gpu))

    def links_gbps(self, cards: int) -> float:
        """What the links of the first so many cards carry to them, each alone, added up."""
        return math.fsum(self.card(number).gpu.h2d.peak for number in range(cards))

    def less(self, vram_bytes: int, dram_bytes: int) -> HardwareProfile:
        """What is left where something else has so many bytes."""
        return replace(self, vram_bytes=self.vram_bytes - vram_bytes, dram_bytes=self.dram_bytes - dram_bytes)

    def read_long(self) -> HardwareProfile:
        """The same with no read faster than the drive's long rate."""
        if not self.ssd_long_gbps:
            return self
        return replace(self, ssd_read=tuple(replace(p, gbps=min(p.gbps, self.ssd_long_gbps)) for p in self.ssd_read))

    @property
    def dense_tflops(self) -> float:
        """Matrix rate of the device that computes."""
        return self.gpu.dense_tflops if self.gpu else self.cpu_dense_tflops

    @property
    def attention_tflops(self) -> float:
        """Attention's rate on the device that computes."""
        return self.gpu.attention_tflops if self.gpu else self.cpu_attention_tflops or self.cpu_dense_tflops

    def bus_s(self, nbytes: float) -> float:
        """Seconds in which ``nbytes`` pass through the host's memory. What the SSD reads, what the card gets or gives and what the CPU
        multiplies by pass once, what is copied within DRAM twice."""
        return nbytes / self.dram_bus_gbps / GB if self.dram_bus_gbps else 0.0

    @property
    def copying_gbps(self) -> float:
        """Of copies within DRAM; without end where it is not known, so that nothing waits for it."""
        return self.dram_copy_gbps or math.inf

    def bus_may_bind(self, *gbps: float) -> bool:
        """Whether what passes through the host's memory at these rates together is more than the bus carries."""
        return 0 < self.dram_bus_gbps < sum(gbps)

    @property
    def ssd_peak_gbps(self) -> float:
        """Of the fastest block and depth."""
        return max(point.gbps for point in self.ssd_read)

    @property
    def weight_gbps(self) -> float:
        """Bytes of weights that the device that computes reads per second at decode."""
        return self.gpu.memory_gbps if self.gpu else self.cpu_matvec_gbps
