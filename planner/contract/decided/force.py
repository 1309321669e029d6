"""Decisions that the user fixes: the program solves around them, the runtime overrides a plan with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.planner.common.errors import nearest
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, ExpertSlots, KvPages, KvReuse
from penstock.planner.contract.decided.declared import FORCED


class Force:
    """What is fixed, by the names of :data:`FORCED`: ``Force(cap_layers=3).cap_layers`` is 3, and None leaves a decision to the program."""

    def __init__(self, **fixed: Any):
        for name in fixed:
            if name not in FORCED:
                raise TypeError(f"{name}: no such decision{nearest(name, FORCED)}")
        self.given: Mapping[str, Any] = {name: fixed[name] for name in FORCED if fixed.get(name) is not None}
        """Name -> value, in the order of a plan's file."""

    def __getattr__(self, name: str) -> Any:
        if name not in FORCED:
            raise AttributeError(f"{name}: no such decision{nearest(name, FORCED)}")
        return self.given.get(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Force) and self.given == other.given

    def __hash__(self) -> int:
        return hash(tuple(self.given.items()))

    def __repr__(self) -> str:
        return f"Force({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    @classmethod
    def from_config(cls, config: Any, moe: Any = None) -> Force:
        """``config`` is a ``ForceConfig``, ``moe`` a ``MoeConfig``."""
        sections = {"force": config, "moe": moe}
        return cls(**{name: getattr(sections[d.section], d.leaf) for name, d in FORCED.items() if sections[d.section] is not None})

    @staticmethod
    def key(name: str) -> str:
        """What a user sets to fix the decision ``name``."""
        return FORCED[name].key

    def but(self, **fixed: Any) -> Force:
        """The same with ``fixed``; None leaves one to the program."""
        return Force(**{**self.given, **fixed})

    def without(self, *names: str) -> Force:
        """The same with ``names`` left to the program."""
        return self.but(**dict.fromkeys(names))

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
        made = self._put(decisions)
        made = self._put(replace(made, weights=replace(made.weights, **self._followers(decisions, made))))
        if self.page_tokens is None:
            return made
        return self._put(replace(made, kv=_repaged(decisions.kv, layers, decisions.batch, self.page_tokens)))

    def apply_to_experts(self, experts: ExpertSlots) -> ExpertSlots:
        """``experts`` with the fixed decisions in place."""
        own = {d.field: self.given[name] for name, d in FORCED.items() if d.owner is ExpertSlots and name in self.given}
        return replace(experts, **own)

    def _followers(self, before: Decisions, now: Decisions) -> dict[str, Any]:
        """Of the weights' decisions those that move along with the fixed ones, which are in ``now``."""
        old, w = before.weights, now.weights
        moved = old.dram.hwm_layers + w.dram.cap_layers - old.dram.cap_layers
        hwm = moved if self.hwm_layers is None else self.hwm_layers
        dram = replace(
            w.dram,
            hwm_layers=hwm,
            prefetch_distance=max(w.dram.cap_layers, min(hwm, old.dram.prefetch_distance)),
            resident_layers=w.dram.cap_layers if w.policy is CachePolicy.pinned else 0,
        )
        ffn_slots = w.vram.ffn_slots if self.vram_slots is None or self.vram_ffn_slots is not None else 0
        vram = replace(w.vram, prefetch_distance=min(old.vram.prefetch_distance, max(0, w.vram.slots - 2)), ffn_slots=ffn_slots)
        unchanged = (w.ssd.block_bytes, w.ssd.queue_depth) == (old.ssd.block_bytes, old.ssd.queue_depth)
        staging = old.ssd.staging_bytes if unchanged else w.ssd.block_bytes * w.ssd.queue_depth
        rows = w.host.rows or (now.batch if w.host.count and self.host_rows is None else 0)
        return {"host": replace(w.host, rows=rows), "dram": dram, "vram": vram, "ssd": replace(w.ssd, staging_bytes=staging)}

    def _put(self, decisions: Decisions) -> Decisions:
        for name, value in self.given.items():
            decisions = FORCED[name].put(decisions, value)
        return decisions


def _repaged(kv: KvPages, layers: int, batch: int, page_tokens: int) -> KvPages:
    """The same tokens in pages of another size, rounded up for each sequence of each layer. Where sequences of all lengths share a layer's
    pages, each may leave more of a larger page empty, and go on with another one. Kept pages are rounded down. Where a page
    is to have no tokens, all else stays: the rule of page sizes refuses it."""
    if page_tokens < 1:
        return replace(kv, page_tokens=page_tokens)
    each = max(1, -(-kv.pages // layers))
    if each % batch == 0:
        each //= batch
        pages = -(-each * kv.page_tokens // page_tokens)
    else:
        pages = -(-each * kv.page_tokens // page_tokens) + (2 * batch if page_tokens > kv.page_tokens else 0)
    kept_vram, kept_dram = (n * kv.page_tokens // page_tokens for n in (kv.reuse.vram_pages, kv.reuse.dram_pages))
    vram, dram, ssd = (-(-n // each) * pages for n in (kv.vram_pages, kv.dram_pages, kv.ssd_pages))
    return KvPages(page_tokens, vram, dram, ssd, KvReuse(kept_vram, kept_dram, kv.reuse.ssd_bytes), kv.host_layers)
