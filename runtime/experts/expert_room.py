"""What a plan's expert slots take of DRAM and VRAM, and who decides what lies in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.experts.expert_cache import ExpertCache
from penstock.planner.contract.experts.expert_caches import expert_caches
from penstock.planner.contract.experts.host_split import HostSplit
from penstock.planner.contract.experts.policies import ExpertPolicy, make_expert_policy
from penstock.planner.contract.given.model import Experts
from penstock.runtime.experts.tiers.dram_experts import DramExperts, slot_bytes
from penstock.runtime.experts.tiers.expert_fetch import Key, most_of
from penstock.runtime.memory.arena import Arena
from penstock.runtime.moving.device_layout import DeviceLayout, alike
from penstock.runtime.reading.reader import UrgentReads
from penstock.runtime.store.base import Store, UnitLayout
from penstock.runtime.store.expert_modules import layers_with_experts


@dataclass(frozen=True)
class CpuShare:
    """Which missed experts the CPU computes, by which threads, and the step that they belong to."""

    split: HostSplit
    threads: int
    ahead_bytes: int
    """That each of them reads ahead."""
    rows: int
    """Of a step, at most."""
    hidden: int
    dtype: torch.dtype
    """What the model computes in."""
    alone: bool = True
    """Whether these threads have their cores to themselves: those of several ranks work in turn."""
    tell: Callable[[str], None] = lambda line: None
    """Gets lines for the user."""


@dataclass(frozen=True)
class ExpertRoom:
    """A plan's routed experts, with their layouts on the SSD; none of a dense model, which takes no room."""

    experts: Experts | None
    """Of the model."""
    slots: ExpertSlots | None
    """As decided."""
    gpu: bool
    layouts: Mapping[Key, UnitLayout]
    share: CpuShare | None = None
    """The CPU's share of missed experts; None where all are copied."""

    @classmethod
    def of(
        cls, experts: Experts | None, slots: ExpertSlots | None, gpu: bool, store: Store, layers: nn.ModuleList,
        share: CpuShare | None = None,
    ) -> ExpertRoom:  # fmt: skip
        """UserError where the decoder's ``layers`` have other experts than the plan knows."""
        _refuse_other(experts, {layer: module.num_experts for layer, module in layers_with_experts(layers)})
        keys = [(layer, e) for layer in experts.layers for e in range(experts.count)] if experts else []
        return cls(experts, slots, gpu, {key: store.unit(Unit("expert", *key)) for key in keys}, share)

    @property
    def decided(self) -> tuple[Experts, ExpertSlots]:
        """Of a model that has routed experts, which ``ExpertHost`` is made for alone. RuntimeError for another."""
        if self.experts is None or self.slots is None:
            raise RuntimeError("a dense model has no slots for experts")
        return self.experts, self.slots

    @property
    def dram_slots(self) -> int:
        return min(self.slots.dram_slots, len(self.layouts)) if self.slots else 0

    @property
    def vram_slots(self) -> int:
        return min(self.slots.vram_slots, len(self.layouts)) if self.slots else 0

    @property
    def dram_bytes(self) -> int:
        return self.dram_slots * slot_bytes(self.layouts)

    @cached_property
    def on_card(self) -> dict[Key, DeviceLayout]:
        """How each expert lies in a slot of VRAM."""
        return dict(zip(self.layouts, alike(self.layouts.values()), strict=True))

    @property
    def vram_share(self) -> tuple[int, int]:
        """Slots of VRAM, and the bytes of one."""
        return self.vram_slots, max((layout.nbytes for layout in self.on_card.values()), default=0)

    @property
    def reads(self) -> bool:
        """Whether a pass may miss an expert in both tiers, which the SSD gives then."""
        return max(self.dram_slots, self.vram_slots) < len(self.layouts)

    def caches(self) -> tuple[ExpertCache | None, ExpertCache]:
        """What decides for VRAM (None without a GPU) and for DRAM, each with a policy of its own."""
        return expert_caches(*self.decided, self.gpu)

    def policy(self) -> ExpertPolicy:
        """A fresh one, as the plan says."""
        experts, slots = self.decided
        return make_expert_policy(slots.policy, len(experts.layers), experts.count, experts.top_k)


def _refuse_other(experts: Experts | None, found: Mapping[int, int]) -> None:
    planned = dict.fromkeys(experts.layers, experts.count) if experts else {}
    strange = sorted(layer for layer in planned.keys() | found.keys() if planned.get(layer) != found.get(layer))
    if strange:
        layer = strange[0]
        raise UserError(
            f"layer {layer} has {found.get(layer, 0)} routed experts in the model as transformers builds it and {planned.get(layer, 0)} in "
            f"the plan; the model is made in a way that is not supported: use another one, or write the plan again with `planner solve`"
        )


class ExpertHost:
    """The DRAM side of the experts of an MoE model: its tier in the arena, from ``base`` on, and the decisions of both tiers."""

    def __init__(self, room: ExpertRoom, arena: Arena, base: int, pool: UrgentReads):
        _, decided = room.decided
        self.room, self.at = room, base
        self.vram_cache, cache = room.caches()
        part_bytes = min(decided.chunk_bytes, most_of(slot_bytes(room.layouts))) if room.gpu else decided.chunk_bytes
        self.dram = DramExperts(room.layouts, arena, base, cache, pool, part_bytes, decided.in_flight)
