"""A streamed model, assembled from a plan: store, arena, cache, ring and the `transformers` module bound to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from planner.decisions import CachePolicy, Tier
from planner.interrupt import uninterrupted
from planner.memory import OVERHEADS
from planner.placement import Placement, Unit
from planner.plan import Plan
from planner.policy import LayerPolicy, PinnedPolicy, RollingPolicy
from runtime.arena import Arena, PageLock
from runtime.device import CopyDevice
from runtime.dram import DramTier
from runtime.fixtures import Fixture, device_fixtures, head_rows, host_fixtures
from runtime.generate import Batch, Sequences
from runtime.ledger import Ledger
from runtime.load import Fill, Filler, start_reads
from runtime.lookup import look_up_on_host
from runtime.model import Binder, BlockedHead, Skeleton, move_buffers, parameters
from runtime.ring import VramRing
from runtime.store.base import UnitLayout
from runtime.store.reader import ReadPool
from runtime.stream import HostStream, Rehearsal, RingStream
from runtime.vram import VramPool, device_layout

BOUNCES = 4
"""Bounce buffers on the way to VRAM at start: some are read into while others are copied from."""

Progress = Callable[[str, int, int], None]
"""Told (phase, done, total)."""


@dataclass(frozen=True)
class EngineOptions:
    """How a plan is executed, beside what it decides."""

    wrap_around: bool = True
    skip_preload_wait: bool = False
    keep_log: bool = False
    keep_spans: bool = False


def make_policy(placement: Placement, wrap: bool) -> LayerPolicy:
    """The plan's DRAM cache policy over the layers that pass through DRAM."""
    dram = placement.weights.dram
    layers, slots = placement.dram_layers, placement.dram_slots
    if placement.weights.policy is CachePolicy.pinned:
        return PinnedPolicy(layers, placement.resident_layers, slots, dram.prefetch_distance, wrap)
    return RollingPolicy(layers, min(dram.cap_layers, slots), slots, dram.prefetch_distance, wrap)


class Engine:
    """``model`` can be called like the unstreamed one after :meth:`load`; units move underneath by the plan.

    Takes the arena (the plan's DRAM share of weights) at once and, with a GPU, one block of VRAM; nothing is allocated after
    :meth:`load` but activations and KV. ``copier`` is None to compute on the CPU from two tiers.
    """

    def __init__(
        self,
        plan: Plan,
        skeleton: Skeleton,
        copier: CopyDevice | None,
        device: torch.device,
        options: EngineOptions,
        say: Callable[[str], None] | None = None,
    ):
        self.device = device
        self.model = skeleton.model
        self.ledger = Ledger(options.keep_spans)
        self.ring: VramRing | None = None
        self.copier = copier
        copies = plan.decisions.weights.h2d
        self.chunking = copies.chunk_bytes, copies.in_flight
        self._options = options
        self._placement = plan.placement
        self._stack = ExitStack()
        blocks = [u for u, _ in self._placement.units if u.kind != "head"]
        self._layouts: dict[Unit, UnitLayout] = {u: skeleton.store.unit(u) for u in blocks}
        if copier is None:
            self._fixtures = host_fixtures(skeleton.store, self.model)
        else:
            self._fixtures = device_fixtures(self._placement, skeleton.store, self.model, skeleton.layers)
            self._layouts |= {f.unit: f.layout for f in self._fixtures if f.unit and f.unit.kind == "head"}
        try:
            self._take_dram(plan, say)
            if copier is None:
                tensors = {u: x.tensors for u, x in self._layouts.items()}
                self.stream = HostStream(self.dram, tensors, self.ledger)
                slot = self.arena.slice(self._cache_at, self.dram.slot_bytes)
                self._rehearsal = Rehearsal(tensors, lambda _: slot)
            else:
                self._take_vram(plan, copier)
            self._stack.callback(self.stream.close)
            self._binder = Binder(skeleton.layers, blocks, self._rehearsal)
            self._bind_fixtures()
        except BaseException:
            self.close()
            raise

    def _take_dram(self, plan: Plan, say: Callable[[str], None] | None) -> None:
        ssd = plan.decisions.weights.ssd
        fixed = [f for f in self._fixtures if f.tier is Tier.dram]
        cache_bytes = DramTier.nbytes(self._placement, self._layouts)
        bounce_bytes = OVERHEADS.bounce_bytes if self.copier else 0
        total = sum(f.layout.nbytes for f in fixed) + cache_bytes + bounce_bytes + ssd.staging_bytes
        with uninterrupted():
            self.arena = Arena(total)
            self._stack.callback(self.arena.close)
        self.arena.occupy(self.copier if isinstance(self.copier, PageLock) else None)
        staging_at, _ = self.arena.take(ssd.staging_bytes)
        staging = self.arena.view[staging_at : staging_at + ssd.staging_bytes]
        on_block = self.ledger.keep_block if self._options.keep_spans else None
        with uninterrupted():
            self.pool = ReadPool(ssd.queue_depth, ssd.block_bytes, staging, on_block=on_block)
            self._stack.callback(self.pool.close)
        self._dram_at: list[tuple[Fixture, int]] = [(f, self.arena.take(f.layout.nbytes)[0]) for f in fixed]
        self._cache_at, _ = self.arena.take(cache_bytes)
        bounces_at, _ = self.arena.take(bounce_bytes)
        ranges = [(at, at + bounce_bytes // BOUNCES) for at in range(bounces_at, bounces_at + bounce_bytes, bounce_bytes // BOUNCES or 1)]
        self._bounces = [(self.arena.view[first:last], self.arena.slice(first, last - first)) for first, last in ranges]
        heads = {f.unit: self.arena.slice(at, f.layout.nbytes) for f, at in self._dram_at if f.unit}
        policy = make_policy(self._placement, self._options.wrap_around)
        self.dram = DramTier(
            self._placement, self._layouts, self.arena, self._cache_at, self.pool, policy, heads, say, self._options.keep_log
        )

    def _take_vram(self, plan: Plan, copier: CopyDevice) -> None:
        weights = plan.decisions.weights
        streamed = {u: device_layout(self._layouts[u]) for u in self._placement.streamed_units}
        fixed = [(f, device_layout(f.layout)) for f in self._fixtures if f.tier is Tier.vram]
        size = {name: max((x.nbytes for u, x in streamed.items() if u.ring_class == name), default=0) for name in ("attn", "ffn")}
        counts = {name: count for name, (count, _) in self._placement.ring_classes.items()}
        self.vram = VramPool(sum(x.nbytes for _, x in fixed) + sum(count * size[name] for name, count in counts.items()), self.device)
        self._vram_at = [(f, layout, self.vram.take(layout.nbytes)) for f, layout in fixed]
        slots = {name: [self.vram.take(size[name]) for _ in range(count)] for name, count in counts.items()}
        self.ring = VramRing(
            units=self._placement.streamed_units,
            segments={u: x.segments for u, x in streamed.items()},
            slots=slots,
            source=self.dram,
            device=copier,
            distance=weights.vram.prefetch_distance,
            chunk_bytes=weights.h2d.chunk_bytes,
            in_flight=weights.h2d.in_flight,
            ledger=self.ledger,
            wrap=self._options.wrap_around,
        )
        tensors = {u: x.tensors for u, x in streamed.items()}
        self.stream = RingStream(self.ring, self.dram, tensors, copier, self.ledger)
        self._rehearsal = Rehearsal(tensors, lambda u: slots[u.ring_class][0])

    def _bind_fixtures(self) -> None:
        """Point the model at what never moves; its bytes come with :meth:`load`."""
        bound = [(f, parameters(f.layout.tensors, self._reach(at, f.layout.nbytes))) for f, at in self._dram_at if f.bind]
        if self.copier is not None:
            on_card = [(f, parameters(layout.tensors, buffer)) for f, layout, buffer in self._vram_at]
            resident = {f.unit.layer: params["weight"] for f, params in on_card if f.unit and f.unit.kind == "head"}
            rows = head_rows(self._placement.model.vocab, self._placement.weights.head_blocks)
            self.model.set_output_embeddings(BlockedHead(rows, resident, self._binder, self.model.get_output_embeddings()))
            bound += on_card
        for f, params in bound:
            if f.bind:
                f.bind(params)
        move_buffers(self.model, self.device)
        if self.copier is not None and not all(self._kernels_reach(at, f.layout.nbytes) for f, at in self._dram_at if f.bind):
            look_up_on_host(self.model.get_input_embeddings(), self.device)

    def _reach(self, at: int, nbytes: int) -> torch.Tensor:
        """A fixed DRAM region as whatever computes with it sees it."""
        host = self.arena.slice(at, nbytes)
        return self.copier.alias(host) if self.copier is not None and self._kernels_reach(at, nbytes) else host

    def _kernels_reach(self, at: int, nbytes: int) -> bool:
        return not isinstance(self.copier, PageLock) or self.arena.is_locked(at, nbytes)

    def load(self, batch: Batch, progress: Progress) -> None:
        """Fill every place and start the stream. While the SSD is read, passes of ``batch``'s shape are rehearsed.

        Returns when the cache's first layers have arrived, unless told not to wait.
        """
        total = sum(f.layout.payload_bytes for f in self._fixtures)
        done = 0

        def loaded(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress("load", min(done, total), total)

        reads = start_reads(self.pool, ((f.layout.extents, self.arena.view[at : at + f.layout.nbytes]) for f, at in self._dram_at))
        self.dram.preload()
        self._rehearse(batch)
        if self.copier is not None:
            Filler(self.pool, self._bounces, self.copier).run((Fill(f.layout, x.segments, dst) for f, x, dst in self._vram_at), loaded)
        for arrival, nbytes in reads:
            arrival.wait()
            loaded(nbytes)
        if not self._options.skip_preload_wait:
            self.dram.cache.wait_preloaded(lambda arrived, layers: progress("preload", arrived, layers))
        self._binder.stream = self.stream
        if self.ring is not None:
            self.ring.start()

    def _rehearse(self, batch: Batch) -> None:
        """A prefill and a decode pass over whatever lies in the buffers, so that the real ones find their kernels and memory.

        On the CPU a short prompt is enough: nothing is loaded on demand there, and a long one would cost as much as the real one.
        """
        tokens = max(map(len, batch.prompts)) if self.copier else 1
        shape = replace(batch, prompts=[[0] * tokens] * len(batch.prompts))
        with torch.inference_mode():
            sequences = Sequences(self.model, self.device, shape, self._rehearsal.begin_pass)
            sequences.prefill()
            fed = torch.zeros(len(shape.prompts), dtype=torch.long, device=self.device)
            sequences.step(fed)
            sequences.jump_to_end()
            sequences.step(fed).cpu()

    def stage_totals(self) -> dict[str, tuple[int, float]]:
        """Stage -> (bytes, busy seconds) since the engine was made."""
        self.stream.settle()
        totals = {name: (t.bytes, t.busy_s) for name, t in self.ledger.totals().items()}
        return {"ssd": (self.pool.meter.bytes, self.pool.meter.busy_seconds), **totals}

    def facts(self) -> dict[str, Any]:
        """Counters for the report: the cache's hits, loads, evictions and waits, the ring's waits, the reader's retries."""
        return {
            "cache": asdict(self.dram.cache.stats),
            "ring": asdict(self.ring.stats) if self.ring else None,
            "arena": {"bytes": self.arena.nbytes, "page_locked_bytes": self.arena.locked_bytes, "refused": self.arena.refused},
            "stalls": self.pool.stalls.facts(),
            "ssd": {
                "reads": self.pool.meter.reads,
                "retries": self.pool.meter.retries,
                "direct_files": [str(f) for f in self.pool.direct_files],
                "buffered_files": [str(f) for f in self.pool.buffered_files],
            },
        }

    def stop(self) -> None:
        """End the stream: no unit moves any more, the pool and the arena may be used for something else."""
        self.stream.close()

    def close(self) -> None:
        """Stop threads, free page-locked memory. Safe to call twice, and after a failure in the middle."""
        self._stack.close()
