"""Decisions that the user fixes: the program solves around them, the runtime overrides a plan with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, ExpertPolicyName, ExpertSlots, KvPages, KvReuse, Tier

MOE = "expert_"
"""Begins the names of what a user sets as ``moe.NAME`` rather than ``force.NAME``; expert slots, forced like others, excepted."""


@dataclass(frozen=True)
class Force:
    """The frozen twin of ``schema.ForceConfig`` and of what ``schema.MoeConfig`` decides: None leaves a decision to the program."""

    policy: CachePolicy | None = None
    cap_layers: int | None = None
    hwm_layers: int | None = None
    prefetch_distance: int | None = None
    resident_attn: int | None = None
    resident_ffn: int | None = None
    resident_head: int | None = None
    embedding: Tier | None = None
    vram_slots: int | None = None
    vram_prefetch_distance: int | None = None
    block_bytes: int | None = None
    queue_depth: int | None = None
    staging_bytes: int | None = None
    chunk_bytes: int | None = None
    in_flight: int | None = None
    page_tokens: int | None = None
    prefill_chunk_tokens: int | None = None
    expert_vram_slots: int | None = None
    expert_dram_slots: int | None = None
    expert_policy: ExpertPolicyName | None = None
    expert_prefetch: int | None = None
    expert_read_ahead: int | None = None
    expert_in_flight: int | None = None
    expert_chunk_bytes: int | None = None

    @classmethod
    def from_config(cls, config: Any, moe: Any = None) -> Force:
        """``config`` is a ``ForceConfig``, ``moe`` a ``MoeConfig``."""
        names = [] if moe is None else [f.name for f in fields(cls) if cls.key(f.name).startswith("moe.")]
        return cls(**vars(config), **{name: getattr(moe, name.removeprefix(MOE)) for name in names})

    @staticmethod
    def key(name: str) -> str:
        """What a user sets to fix the decision ``name``."""
        return f"moe.{name.removeprefix(MOE)}" if name.startswith(MOE) and not name.endswith("_slots") else f"force.{name}"

    @property
    def given(self) -> dict[str, Any]:
        """Name -> value, of those that are fixed."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def without(self, *names: str) -> Force:
        """The same with ``names`` left to the program."""
        return replace(self, **dict.fromkeys(names))

    def culprits(self, breaks: Callable[[Force], bool]) -> str:
        """``key=value`` of those without which ``breaks`` is false; of all where no single one is to blame."""
        given = self.given
        blamed = [key for key in given if not breaks(self.without(key))] or list(given)
        return ", ".join(f"{self.key(name)}={given[name]}" for name in blamed)

    def apply(self, decisions: Decisions, layers: int) -> Decisions:
        """``decisions`` for a model of ``layers`` layers, the fixed ones in place; what follows from them (HWM after cap, staging after
        block) moves along.

        The result may break a rule: check it with ``penstock.planner.contract.rules.broken.broken_rules``.
        """
        w = decisions.weights
        units = w.vram.resident_units
        slots = _or(self.vram_slots, w.vram.slots)
        vram = replace(
            w.vram,
            resident_units=replace(
                units,
                attn=_or(self.resident_attn, units.attn),
                ffn=_or(self.resident_ffn, units.ffn),
                head=_or(self.resident_head, units.head),
            ),
            slots=slots,
            prefetch_distance=_or(self.vram_prefetch_distance, min(w.vram.prefetch_distance, max(0, slots - 2))),
        )
        policy = _or(self.policy, w.policy)
        cap = _or(self.cap_layers, w.dram.cap_layers)
        hwm = _or(self.hwm_layers, w.dram.hwm_layers + cap - w.dram.cap_layers)
        dram = replace(
            w.dram,
            cap_layers=cap,
            hwm_layers=hwm,
            prefetch_distance=_or(self.prefetch_distance, max(cap, min(hwm, w.dram.prefetch_distance))),
            resident_layers=cap if policy is CachePolicy.pinned else 0,
        )
        block, depth = _or(self.block_bytes, w.ssd.block_bytes), _or(self.queue_depth, w.ssd.queue_depth)
        unchanged = (block, depth) == (w.ssd.block_bytes, w.ssd.queue_depth)
        staging = _or(self.staging_bytes, w.ssd.staging_bytes if unchanged else block * depth)
        weights = replace(
            w,
            policy=policy,
            embedding=_or(self.embedding, w.embedding),
            vram=vram,
            dram=dram,
            ssd=replace(w.ssd, block_bytes=block, queue_depth=depth, staging_bytes=staging),
            h2d=replace(w.h2d, chunk_bytes=_or(self.chunk_bytes, w.h2d.chunk_bytes), in_flight=_or(self.in_flight, w.h2d.in_flight)),
        )
        kv = decisions.kv if self.page_tokens is None else _repaged(decisions.kv, layers * decisions.batch, self.page_tokens)
        chunk = _or(self.prefill_chunk_tokens, decisions.prefill_chunk_tokens)
        experts = None if decisions.experts is None else self.apply_to_experts(decisions.experts)
        return replace(decisions, weights=weights, kv=kv, experts=experts, prefill_chunk_tokens=chunk)

    def apply_to_experts(self, experts: ExpertSlots) -> ExpertSlots:
        """``experts`` with the fixed decisions in place."""
        return ExpertSlots(**{f.name: _or(getattr(self, MOE + f.name), getattr(experts, f.name)) for f in fields(ExpertSlots)})


def _or(forced: Any, decided: Any) -> Any:
    return decided if forced is None else forced


def _repaged(kv: KvPages, rows: int, page_tokens: int) -> KvPages:
    """The same tokens in pages of another size, rounded up for each of ``rows``: the sequences of a layer, over all layers. Kept pages are
    rounded down."""
    each = max(1, -(-kv.pages // rows))
    pages = -(-each * kv.page_tokens // page_tokens)
    vram, dram, ssd = (-(-old // each) * pages for old in (kv.vram_pages, kv.dram_pages, kv.ssd_pages))
    kept_vram, kept_dram = (n * kv.page_tokens // page_tokens for n in (kv.reuse.vram_pages, kv.reuse.dram_pages))
    return KvPages(page_tokens, vram, dram, ssd, KvReuse(kept_vram, kept_dram, kv.reuse.ssd_bytes))
