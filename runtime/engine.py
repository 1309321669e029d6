"""A streamed model, assembled from a plan: store, arena, cache, ring and the `transformers` module bound to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.decisions import CachePolicy, Tier
from planner.placement import Placement, Unit
from planner.plan import Plan
from planner.policy import LayerPolicy, PinnedPolicy, RollingPolicy
from runtime.arena import Arena
from runtime.device import CopyDevice
from runtime.dram import DramTier
from runtime.fixtures import Fixture, device_fixtures, head_rows, host_fixtures
from runtime.ledger import Ledger
from runtime.load import Fill, Filler, read_all
from runtime.model import Binder, BlockedHead, build_skeleton, decoder_layers, parameters
from runtime.ring import VramRing
from runtime.store.base import UnitLayout, open_store
from runtime.store.reader import ReadPool
from runtime.stream import HostStream, RingStream
from runtime.vram import VramPool, device_layout

BOUNCE_BYTES = 16 << 20
"""One bounce buffer on the way to VRAM at start: large enough for the drive's and the link's full rate."""
BOUNCES = 4

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
        checkpoint: Path,
        copier: CopyDevice | None,
        device: torch.device,
        options: EngineOptions,
        say: Callable[[str], None] | None = None,
    ):
        self.device = device
        self.ledger = Ledger(options.keep_spans)
        self.ring: VramRing | None = None
        self._copier = copier
        self._options = options
        self._placement = plan.placement
        self._stack = ExitStack()
        self.model = build_skeleton(checkpoint)
        self.store = open_store(checkpoint, self.model)
        self._layers = decoder_layers(self.model)
        self._blocks = [u for u, _ in self._placement.units if u.kind != "head"]
        self._layouts: dict[Unit, UnitLayout] = {u: self.store.unit(u) for u in self._blocks}
        if copier is None:
            self._fixtures = host_fixtures(self.store, self.model)
            self._streamed = ()
        else:
            self._fixtures = device_fixtures(self._placement, self.store, self.model, self._layers)
            self._streamed = self._placement.streamed_units
            self._layouts |= {f.unit: f.layout for f in self._fixtures if f.unit and f.unit.kind == "head"}
        try:
            self._take_dram(plan, say)
            if copier is None:
                self.stream = HostStream(self.dram, {u: x.tensors for u, x in self._layouts.items()}, self.ledger)
            else:
                self._take_vram(plan, copier)
            self._stack.callback(self.stream.close)
        except BaseException:
            self.close()
            raise

    def _take_dram(self, plan: Plan, say: Callable[[str], None] | None) -> None:
        ssd = plan.decisions.weights.ssd
        fixed = [f for f in self._fixtures if f.tier is Tier.dram]
        cache_bytes = DramTier.nbytes(self._placement, self._layouts)
        bounce_bytes = max(cache_bytes, BOUNCES * BOUNCE_BYTES) if self._copier else cache_bytes
        total = sum(f.layout.nbytes for f in fixed) + bounce_bytes + ssd.staging_bytes
        self.arena = Arena(total, pin=self.device.type == "cuda")
        self._stack.callback(self.arena.close)
        staging_at, _ = self.arena.take(ssd.staging_bytes)
        self.pool = ReadPool(ssd.queue_depth, ssd.block_bytes, self.arena.view[staging_at : staging_at + ssd.staging_bytes])
        self._stack.callback(self.pool.close)
        self._dram_at: list[tuple[Fixture, int]] = [(f, self.arena.take(f.layout.nbytes)[0]) for f in fixed]
        self._cache_at, _ = self.arena.take(bounce_bytes)
        heads = {f.unit: self.arena.slice(at, f.layout.nbytes) for f, at in self._dram_at if f.unit}
        policy = make_policy(self._placement, self._options.wrap_around)
        self.dram = DramTier(self._placement, self._layouts, self.arena, self._cache_at, self.pool, policy, heads, say, self._options.keep_log)

    def _take_vram(self, plan: Plan, copier: CopyDevice) -> None:
        weights = plan.decisions.weights
        streamed = {u: device_layout(self._layouts[u]) for u in self._streamed}
        fixed = [(f, device_layout(f.layout)) for f in self._fixtures if f.tier is Tier.vram]
        size = {name: max((x.nbytes for u, x in streamed.items() if u.ring_class == name), default=0) for name in ("attn", "ffn")}
        slots = {name: (count, size[name]) for name, (count, _) in self._placement.ring_classes.items()}
        self.vram = VramPool(sum(x.nbytes for _, x in fixed) + sum(count * nbytes for count, nbytes in slots.values()), self.device)
        self._vram_at = [(f, layout, self.vram.take(layout.nbytes)) for f, layout in fixed]
        self.ring = VramRing(
            units=self._streamed,
            segments={u: x.segments for u, x in streamed.items()},
            slots={name: [self.vram.take(nbytes) for _ in range(count)] for name, (count, nbytes) in slots.items()},
            source=self.dram,
            device=copier,
            distance=weights.vram.prefetch_distance,
            chunk_bytes=weights.h2d.chunk_bytes,
            in_flight=weights.h2d.in_flight,
            ledger=self.ledger,
            wrap=self._options.wrap_around,
        )
        self.stream = RingStream(self.ring, self.dram, {u: x.tensors for u, x in streamed.items()}, copier, self.ledger)

    def load(self, progress: Progress) -> None:
        """Fill every fixed place, then start the stream; returns when the cache's first layers have arrived (unless told not to wait)."""
        total = sum(f.layout.payload_bytes for f in self._fixtures)
        done = 0

        def loaded(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress("load", min(done, total), total)

        read_all(self.pool, ((f.layout.extents, self.arena.view[at : at + f.layout.nbytes]) for f, at in self._dram_at), loaded)
        for f, at in self._dram_at:
            if f.bind:
                f.bind(parameters(f.layout.tensors, self.arena.slice(at, f.layout.nbytes)))
        if self._copier is not None:
            self._load_vram(self._copier, loaded)
        self.dram.cache.preload(not self._options.skip_preload_wait, lambda arrived, layers: progress("preload", arrived, layers))
        self._binder = Binder(self._layers, self._blocks, self.stream)
        if self.ring is not None:
            self.ring.start()

    def _load_vram(self, copier: CopyDevice, loaded: Callable[[int], None]) -> None:
        starts = [self._cache_at + k * BOUNCE_BYTES for k in range(BOUNCES)]
        bounces = [(self.arena.view[at : at + BOUNCE_BYTES], self.arena.slice(at, BOUNCE_BYTES)) for at in starts]
        Filler(self.pool, bounces, copier).run((Fill(f.layout, x.segments, dst) for f, x, dst in self._vram_at), loaded)
        resident = {}
        for f, layout, buffer in self._vram_at:
            params = parameters(layout.tensors, buffer)
            if f.bind:
                f.bind(params)
            else:
                resident[f.unit.layer] = params["weight"]
        rows = head_rows(self._placement.model.vocab, self._placement.weights.head_blocks)
        self.model.set_output_embeddings(BlockedHead(rows, resident, self.stream, self.model.get_output_embeddings()))
        embed = self.model.get_input_embeddings()
        for module in self.model.modules():
            home = embed.weight.device if module is embed else self.device
            module._buffers.update({name: b.to(home) for name, b in module._buffers.items() if b is not None})

    def close(self) -> None:
        """Stop threads, free page-locked memory. Safe to call twice, and after a failure in the middle."""
        self._stack.close()
