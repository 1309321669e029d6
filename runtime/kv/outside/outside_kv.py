"""The layers whose KV a plan keeps outside the compute device, in an engine: their memory, and the stream that they pass through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import align_up
from penstock.planner.contract.decided.decisions import H2dCopies, Tier
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import windows
from penstock.runtime.kv.batch.token_shape import TokenShape
from penstock.runtime.kv.outside.host_attention import HostAttention
from penstock.runtime.kv.outside.kv_home import DramHome, KvHome
from penstock.runtime.kv.outside.kv_scratch import Scratch
from penstock.runtime.kv.outside.kv_share import KvShare
from penstock.runtime.kv.outside.living_rows import LivingRows
from penstock.runtime.kv.outside.spill import SpillHome
from penstock.runtime.kv.outside.streamed_kv import HostKv, KvStream, RehearsedKv, RingKv
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.model.rows import Step
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.reading.reader import Reads


class KvHost(Protocol):
    """What of an engine's DRAM side KV needs."""

    arena: Arena
    ledger: Ledger

    @property
    def pool(self) -> Reads: ...

    @property
    def kv_places(self) -> Sequence[tuple[int, int]]:
        """(offset, bytes) in the arena of each buffer for one layer: of the layers that lie in DRAM, then those that the SSD's pass
        through."""


class OutsidePlace:
    """One layer outside: a ``KvPlace``."""

    def __init__(self, outside: OutsideKv, layer: int):
        self._outside, self._layer = outside, layer
        self._token_bytes = 0

    def enter(self, shape: TokenShape) -> torch.Tensor:
        self._token_bytes = shape.nbytes
        return self._outside.enter(self._layer, shape.nbytes)

    def written(self) -> None:
        self._outside.written(self._layer, self._token_bytes)

    def leave(self) -> None:
        self._outside.leave(self._layer, self._token_bytes)

    def forget(self, sequence: int) -> None:
        self._outside.living.forget(sequence)


class OutsideKv:
    """``slots`` are VRAM for one layer's KV each, none without a GPU. With a scratch file for the SSD's layers in ``directory``, taken at
    once: UserError where there is no room."""

    def __init__(
        self,
        kv: KvShare,
        copies: H2dCopies,
        host: KvHost,
        slots: list[torch.Tensor],
        copier: CopyDevice | None,
        model: PreTrainedModel,
        directory: Path,
        attending: Callable[[Mapping[int, torch.Tensor]], HostAttention] | None = None,
    ):
        """``attending`` makes what attends to layers where they lie in DRAM, of these layers' memory."""
        own = Tier.dram if copier is None else Tier.vram
        in_dram = [i for i, tier in enumerate(kv.tiers) if tier is Tier.dram and own is Tier.vram]
        self._on_ssd = [i for i, tier in enumerate(kv.tiers) if tier is Tier.ssd]
        self.layers = sorted(in_dram + self._on_ssd)
        self._copies, self._host, self.slots = copies, host, slots
        self._device = copier.twin() if copier is not None and self.layers else None
        self._nbytes = kv.layer_bytes
        self._tokens = kv.tokens
        self._token_bytes: dict[int, int] = {}
        """Of the layers that were rehearsed."""
        self._stack = ExitStack()
        self._pool: KvPool | None = None
        self._stream: KvStream | None = None
        self.held = False
        """Whether the layer that is entered stays so when it is left: a further part of the pass computes it."""
        self._entered: torch.Tensor | None = None
        seen = windows(model.config)
        self.living = LivingRows(kv.page_tokens, seen)
        self.regions: dict[int, torch.Tensor] = {}
        """Where the layers in DRAM lie, uint8."""
        self.attention: HostAttention | None = None
        """What attends to some layers where they lie; None where all are computed with on the device."""
        self._attends = False
        """In the stream that is open, or in a rehearsal's pass."""
        self._home = None if self._device is None else DramHome(self.regions, self._device)
        if not self.layers:
            return
        strange = next((i for i in self.layers if i not in seen), None)
        if strange is not None:
            raise UserError(f"kv: layer {strange} of the model keeps no keys and values that could move; set workload.kv_spill=false")
        places = [host.arena.slice(at, self._nbytes) for at, _ in host.kv_places]
        views = [host.arena.view[at : at + size] for at, size in host.kv_places]
        self.regions.update(zip(in_dram, places, strict=False))
        self._passing = list(zip(places, views, strict=True))[len(in_dram) :]
        self._attended = frozenset(kv.attended if attending else ())
        if attending is not None:
            self.attention = attending({layer: self.regions[layer] for layer in kv.attended})
        self._scratch: Scratch | None = None
        if self._on_ssd:
            self._scratch = Scratch(directory, len(self._on_ssd) * align_up(self._nbytes))
            self._stack.callback(self._scratch.close)

    @property
    def stream(self) -> KvStream:
        """What layers pass through now."""
        if self._stream is None:
            raise RuntimeError("no pass over KV outside VRAM is in progress")
        return self._stream

    def rehearse(self) -> Mapping[int, OutsidePlace]:
        """Places for a rehearsal; none when every layer is computed with where it lies."""
        if self.layers:
            self._pool, self._stream = None, RehearsedKv((self.slots or [slot for slot, _ in self._passing])[0])
        return self._places

    def begin(self, pool: KvPool) -> Mapping[int, OutsidePlace]:
        """Places for what ``pool`` computes from now on, once a rehearsal has shown the layers' shapes."""
        self.end()
        self._pool = pool
        return self._places

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next. Where its rows read what the stream does not bring, or another pass attends to other layers where they lie,
        that begins anew."""
        if not self.layers:
            return
        self.held, self._entered = False, None
        attends = self.attention is not None and self.attention.begin_pass(step, live=self._pool is not None)
        if self._pool is not None:
            if not self.living.follow(step) or attends is not self._attends:
                self._end_stream()
            self._attends = attends
            if self._stream is None:
                self._stream = self._open()
            self.living.compute()
        self.stream.begin_pass()

    def book(self) -> None:
        """What the CPU has attended to counts in the ledger from now on. From any thread."""
        if self.attention is not None:
            self.attention.book()

    def settle(self) -> None:
        """Block until what lies in DRAM between passes is as computed. From any thread."""
        if self.attention is not None:
            self.attention.settle()
        if self._home is not None:
            for layer in self.regions:
                self._home.take(layer)

    def end(self) -> None:
        """Nothing moves any more until the next :meth:`begin`."""
        self.book()
        self._end_stream()
        self._pool = None

    def close(self) -> None:
        """Give the scratch file back. Safe to call twice."""
        self.end()
        self._stack.close()

    def enter(self, layer: int, token_bytes: int) -> torch.Tensor:
        """What the pool's tokens take of the buffer of ``layer``. RuntimeError where that is more than was planned for."""
        self._token_bytes[layer] = token_bytes
        if self._tokens * token_bytes > self._nbytes:
            raise RuntimeError(f"KV of layer {layer}: {self._tokens} tokens of {token_bytes} bytes, planned are {self._nbytes}")
        if self._entered is None:
            self._entered = self.stream.enter(layer, token_bytes)
        return self._entered[: self._tokens * token_bytes]

    def written(self, layer: int, token_bytes: int) -> None:
        """Of the pass's last part, so that new tokens go out together."""
        if not self.held:
            self.stream.written(layer, token_bytes)

    def leave(self, layer: int, token_bytes: int) -> None:
        if not self.held:
            self._entered = None
            self.stream.leave(layer, token_bytes)

    @property
    def _places(self) -> Mapping[int, OutsidePlace]:
        return {layer: OutsidePlace(self, layer) for layer in self.layers}

    def _open(self) -> KvStream:
        streamed = [layer for layer in self.layers if not (self._attends and layer in self._attended)]
        if not streamed:
            return RehearsedKv(self.slots[0])
        wanted = {layer: self.living.wanted(layer, self._token_bytes[layer]) for layer in streamed}
        homes: dict[int, KvHome] = {} if self._home is None else {layer: self._home for layer in self.regions if layer in wanted}
        if self._scratch is not None:
            first = {layer: wanted[layer] for layer in self._on_ssd}
            nbytes, host = align_up(self._nbytes), self._host
            spilled = SpillHome(first, nbytes, self._passing, host.pool, self._scratch, self._device, host.ledger)
            homes |= dict.fromkeys(self._on_ssd, spilled)
        if self._device is None:
            return HostKv(homes[self.layers[0]], self.living)
        ledger, (chunk, flying) = self._host.ledger, (self._copies.chunk_bytes, self._copies.in_flight)
        return RingKv(homes, wanted, self.living, self.slots[: len(streamed)], self._device, chunk, flying, ledger)

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
