"""What a plan has of each tier for the KV of the running batch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.kv_tiers import attended_on_host, kv_tiers
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.sizes import kv_arena_slots, kv_layer_bytes, kv_ring_slots


@dataclass(frozen=True)
class KvShare:
    """Buffers of one layer's KV each, and the pages that each of them holds."""

    pages: int
    """Of each layer."""
    page_tokens: int
    layer_bytes: int
    """K and V of one layer's pages."""
    tiers: tuple[Tier, ...]
    """Where each layer lies between passes."""
    arena_slots: int
    """Buffers in DRAM: of the layers that lie there beside a GPU, and those that the SSD's pass through."""
    ring_slots: int
    """Buffers in VRAM that layers pass through."""
    attended: tuple[int, ...] = ()
    """Layers in DRAM that the CPU attends to in decode steps."""
    rows: int = 1
    """Of such a step, at most."""

    @classmethod
    def of(cls, plan: Plan) -> KvShare:
        model, kv = plan.model, plan.decisions.kv
        slots = kv_arena_slots(plan.hardware, model, kv), kv_ring_slots(model, kv)
        tiers = tuple(kv_tiers(model.layers, kv))
        attended = attended_on_host(model.layers, kv) if plan.hardware.gpu else ()
        return cls(kv.pages // model.layers, kv.page_tokens, kv_layer_bytes(model, kv), tiers, *slots, attended, plan.decisions.batch)

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return self.pages * self.page_tokens
