"""The layers whose KV a plan keeps outside the compute device, in an engine: their memory, and a stream of them for each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import align_up
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.kv_tiers import kv_tiers
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import kv_layer_bytes
from penstock.runtime.engine.host_side import HostSide
from penstock.runtime.kv.batch.contiguous import windows
from penstock.runtime.kv.batch.kv_block import Pair
from penstock.runtime.kv.batch.kv_home import DramHome, KvHome
from penstock.runtime.kv.batch.kv_rows import Rows
from penstock.runtime.kv.batch.kv_scratch import Scratch
from penstock.runtime.kv.batch.spill import SpillHome
from penstock.runtime.kv.batch.streamed_kv import HostKv, KvStream, RehearsedKv, RingKv, StreamedPlace
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.store.decoder import decoder_layers


def _nothing_lies_there(layer: int, _batch: int) -> Pair:
    raise RuntimeError(f"KV of layer {layer} cannot be looked at now")


class OutsideKv:
    """``slots`` are VRAM for one layer's KV each, none without a GPU. With a scratch file for the SSD's layers in ``directory``, taken at
    once: UserError where there is no room. One batch at a time: a new one ends the one before."""

    def __init__(self, plan: Plan, host: HostSide, slots: list[torch.Tensor], copier: CopyDevice | None, model: nn.Module, directory: Path):
        tiers = kv_tiers(plan.model.layers, plan.decisions.kv)
        own = Tier.dram if copier is None else Tier.vram
        self._in_dram = [i for i, tier in enumerate(tiers) if tier is Tier.dram and own is Tier.vram]
        self._on_ssd = [i for i, tier in enumerate(tiers) if tier is Tier.ssd]
        self.layers = sorted(self._in_dram + self._on_ssd)
        self._plan, self._host, self.slots = plan, host, slots
        self._device = copier.twin() if copier is not None and self.layers else None
        self._bytes = align_up(kv_layer_bytes(plan.model, plan.decisions.kv))
        self._windows = windows(model.config)
        self._rows: dict[int, Rows] = {}
        self._homes: Mapping[int, KvHome] = {}
        self._stack = ExitStack()
        self._stream: KvStream | None = None
        if not self.layers:
            return
        strange = next((i for i in self.layers if i not in self._windows), None)
        if strange is not None:
            raise UserError(f"kv: layer {strange} of the model keeps no keys and values that could move; set workload.kv_spill=false")
        places = [host.arena.slice(at, size) for at, size in host.kv_places]
        self._regions, self._passing = dict(zip(self._in_dram, places, strict=False)), places[len(self._in_dram) :]
        self._views = [host.arena.view[at : at + size] for at, size in host.kv_places[len(self._in_dram) :]]
        self._scratch: Scratch | None = None
        if self._on_ssd:
            self._scratch = Scratch(directory, len(self._on_ssd) * self._bytes)
            self._stack.callback(self._scratch.close)
        layers = decoder_layers(model)
        for i in self.layers:
            layers[i].self_attn.register_forward_hook(lambda *_, i=i: self._stream.leave(i))

    def rehearse(self, capacity: int) -> Mapping[int, StreamedPlace]:
        """Places for a rehearsal with ``capacity`` tokens a sequence; none when every layer is computed with where it lies."""
        if not self.layers:
            return {}
        return self._open(RehearsedKv((self.slots or self._passing)[0], capacity, self._rows))

    def begin(self, batch: int, capacity: int) -> Mapping[int, StreamedPlace]:
        """Places for ``batch`` sequences, once a rehearsal has shown their shape."""
        if not self.layers:
            return {}
        self.end()
        rows = {layer: rows.for_batch(batch) for layer, rows in self._rows.items()}
        homes: dict[int, KvHome] = {}
        self._homes = homes
        if self._in_dram:
            homes |= dict.fromkeys(self._in_dram, DramHome(self._regions, self._device))
        if self._on_ssd:
            passing = list(zip(self._passing, self._views, strict=True))
            spilled = SpillHome(self._on_ssd, self._bytes, passing, self._host.pool, self._scratch, self._device, self._host.ledger)
            homes |= dict.fromkeys(self._on_ssd, spilled)
        if self._device is None:
            return self._open(HostKv(homes[self.layers[0]], self._windows))
        copies = self._plan.decisions.weights.h2d
        stream = RingKv(homes, self._windows, rows, self.slots, self._device, copies.chunk_bytes, copies.in_flight, self._host.ledger)

        def between(layer: int, sequences: int) -> Pair:
            if sequences != batch:
                raise RuntimeError(f"KV of {batch} sequences lies there, not of {sequences}")
            return rows[layer].pair(homes[layer].take(layer), capacity)

        return self._open(stream, between)

    def begin_pass(self) -> None:
        """A pass of the batch begins."""
        if self._stream is not None:
            self._stream.begin_pass()

    def settle(self) -> None:
        """Block until what lies in DRAM between passes is as computed. From any thread."""
        for layer in self._in_dram:
            self._homes[layer].take(layer)

    def end(self) -> None:
        """Nothing moves any more until the next :meth:`begin`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Give the scratch file back. Safe to call twice."""
        self.end()
        self._stack.close()

    def _open(self, stream: KvStream, between: Callable[[int, int], Pair] = _nothing_lies_there) -> Mapping[int, StreamedPlace]:
        self._stream = stream
        return {layer: StreamedPlace(stream, layer, between) for layer in self.layers}
