"""The DRAM side of an engine: the arena divided, the layer cache in it, and the threads that fill it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from penstock.planner.common.host_memory import usable_cores
from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.common.measures import GB, align_down, align_up
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.placement import Placement, Unit
from penstock.planner.contract.policy import make_policy
from penstock.planner.contract.prices.sizes import OVERHEADS
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.experts.expert_room import ExpertHost, ExpertRoom
from penstock.runtime.kv.outside.kv_share import KvShare
from penstock.runtime.memory.arena import Arena
from penstock.runtime.model.binding import views
from penstock.runtime.model.fixtures import Fixture, device_fixtures, host_fixtures
from penstock.runtime.model.skeleton import Skeleton
from penstock.runtime.moving.arriving_scales import ArrivingScales, MeteredSoundReads, UrgentSoundReads
from penstock.runtime.moving.dram_side import DramTier
from penstock.runtime.moving.filler import Arrival, start_reads
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.reading.cached import CachedReads
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.recorded.host_steps import HostUnit, host_block, host_unit
from penstock.runtime.store.base import UnitLayout
from penstock.runtime.store.decoder import decoder_layers, unit_modules

FEWEST_BOUNCES = 4
"""Buffers on the way to VRAM at start, at least: some are read into while others are copied from."""
SMALLEST_BOUNCE = 2 << 20
"""Bytes of such a buffer: smaller copies do not reach the link's rate."""


class HostSide:
    """What an engine has in DRAM. Reading may begin before there is a device to compute on.

    ``take`` gives an arena of at least so many bytes, resident; it stays its giver's to close, after this. ``ssd_gbps`` is the drive's
    usual rate with the placement's blocks and depth, by which a read that stalls is known.
    """

    def __init__(
        self,
        placement: Placement,
        kv: KvShare,
        experts: ExpertRoom,
        ssd_gbps: float,
        skeleton: Skeleton,
        take: Callable[[int], Arena],
        options: EngineOptions,
        say: Callable[[str], None] | None = None,
    ):
        self.options, self.placement, self.kv = options, placement, kv
        self.ledger = Ledger(options.keep_spans)
        self.blocks = [u for u, _ in self.placement.units if u.kind != "head"]
        self.layouts: dict[Unit, UnitLayout] = {u: skeleton.store.unit(u) for u in self.blocks}
        if not placement.gpu:
            self.fixtures = host_fixtures(skeleton.store, skeleton.model)
        else:
            self.fixtures = device_fixtures(self.placement, skeleton.store, skeleton.model, skeleton.layers)
            rows = {f.unit: f for f in self.fixtures if f.unit and f.unit.kind == "head"}
            self.layouts |= {unit: replace(f.layout, tensors=tuple(f.bound(f.layout.tensors))) for unit, f in rows.items()}
        self._reads: list[tuple[Arrival, int]] | None = None
        self._stack = ExitStack()
        ssd = placement.weights.ssd
        fixed = [f for f in self.fixtures if f.tier is Tier.dram]
        cache_bytes = DramTier.nbytes(self.placement, self.layouts)
        bounce_bytes = OVERHEADS.bounce_bytes if placement.gpu else 0
        kv_sizes = [align_up(kv.layer_bytes)] * kv.arena_slots
        pages_bytes, experts_bytes = options.page_room.dram_bytes, experts.dram_bytes
        sizes = (*(f.layout.nbytes for f in fixed), cache_bytes, bounce_bytes, ssd.staging_bytes, *kv_sizes, pages_bytes, experts_bytes)
        self.arena = take(sum(map(align_up, sizes)))
        staging_at, _ = self.arena.take(ssd.staging_bytes)
        self.fixed: list[tuple[Fixture, int]] = [(f, self.arena.take(f.layout.nbytes)[0]) for f in fixed]
        self.cache_at, _ = self.arena.take(cache_bytes)
        self.bounces = self._bounces(bounce_bytes)
        self.kv_places = [(self.arena.take(size)[0], size) for size in kv_sizes]
        """(offset, bytes) of each buffer for one layer's KV: of the layers that lie in DRAM, then those that the SSD's pass through."""
        self.pages_at, _ = self.arena.take(pages_bytes)
        experts_at, _ = self.arena.take(experts_bytes)
        try:
            with uninterrupted():
                staging = self.arena.view[staging_at : staging_at + ssd.staging_bytes]
                on_block = self.ledger.keep_block if options.keep_spans else None
                usual_s = ssd.queue_depth * ssd.block_bytes / GB / ssd_gbps
                self.pool = ReadPool(ssd.queue_depth, ssd.block_bytes, staging, on_block=on_block, usual_s=usual_s)
                self._stack.callback(self.pool.close)
                cached = CachedReads(self.pool, usable_cores())
                self._stack.callback(cached.close)
            scales = ArrivingScales(scale for scale in skeleton.store.scales if scale.comes_with_weights)
            self.cached, past = MeteredSoundReads(cached, scales), UrgentSoundReads(self.pool, scales)
            self.experts = ExpertHost(experts, self.arena, experts_at, past) if experts.layouts else None
            policy = make_policy(self.placement, options.wrap_around)
            heads = {f.unit: self.arena.slice(at, f.layout.nbytes) for f, at in self.fixed if f.unit}
            self.dram = DramTier(self.placement, self.layouts, self.arena, self.cache_at, past, policy, heads, say, options.keep_log)
        except BaseException:
            self.close()
            raise

    def _bounces(self, nbytes: int) -> list[tuple[memoryview, torch.Tensor]]:
        """``nbytes`` of the arena as one buffer for each core that copies from the page cache."""
        if not nbytes:
            return []
        count = min(max(usable_cores(), FEWEST_BOUNCES), nbytes // SMALLEST_BOUNCE)
        first, size = self.arena.take(nbytes)[0], align_down(nbytes // count)
        places = [first + i * size for i in range(count)]
        return [(self.arena.view[at : at + size], self.arena.slice(at, size)) for at in places]

    def begin_reading(self) -> None:
        """Start to fill the fixed places and the cache's first layers, from the page cache where they lie there. A second call does
        nothing."""
        if self._reads is None:
            places = ((f.layout.extents, self.arena.view[at : at + f.layout.nbytes]) for f, at in self.fixed)
            self._reads = start_reads(self.cached, places)
            self.dram.preload(self.cached)
            if self.experts is not None:
                self._reads += self.experts.dram.preload(self.cached)

    def units_on_host(self, model: PreTrainedModel, of: Sequence[Unit]) -> list[HostUnit]:
        """``of`` the units of ``model``, for the CPU to compute where they lie in DRAM, or will once they have arrived."""
        layers, units, planned = decoder_layers(model), [], self.placement.model
        for unit in of:
            tensors = views(self.layouts[unit].tensors, self.dram.stays(unit))
            dtype = getattr(torch, planned.compute_dtype)
            if unit.kind == "head":
                units.append(host_block(unit, model.get_output_embeddings(), tensors, dtype))
                continue
            ((name, module),) = unit_modules(layers, unit).items()
            units.append(host_unit(unit, name, module, tensors, planned.ffn_activation, dtype))
        return units

    @property
    def reads(self) -> list[tuple[Arrival, int]]:
        """Reads into fixed places, with their bytes."""
        return self._reads or []

    def close(self) -> None:
        """Stop reading. Safe to call twice."""
        self._stack.close()
