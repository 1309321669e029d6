"""The routed experts of an engine: which source the model's MoE layers compute from, and what the report says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.common.timeline.spans import CPU
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_pool import pool_here
from penstock.runtime.experts.asked_ahead import make_ahead
from penstock.runtime.experts.card_experts import CardExperts
from penstock.runtime.experts.expert_forward import ExpertSource, layer_experts
from penstock.runtime.experts.expert_rehearsal import RehearsedExperts
from penstock.runtime.experts.expert_room import ExpertHost, ExpertRoom
from penstock.runtime.experts.host_experts import ComputeClock, HostExperts
from penstock.runtime.experts.products.beside_card import BesideCard, ExpertUnits
from penstock.runtime.experts.products.expert_views import SlotViews
from penstock.runtime.experts.routing_record import RoutingRecorder
from penstock.runtime.experts.tiers.expert_stats import IssueTime
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.model.rows import Step
from penstock.runtime.moving.filler import Fill
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.store.decoder import unit_modules
from penstock.runtime.store.expert_modules import layers_with_experts


class Experts:
    """Computes from ``places``, slots of any tier, until :meth:`start`, then from the plan's tiers. ``slots`` lie in VRAM; without a GPU
    there are none."""

    def __init__(
        self,
        host: ExpertHost,
        layers: nn.ModuleList,
        slots: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        device: CopyDevice | None,
        clock: ComputeClock,
        ledger: Ledger,
        record: Path | None = None,
    ):
        experts, decided = host.room.decided
        self.dram, self._room = host.dram, host.room
        self.card: CardExperts | None = None
        self._beside: BesideCard | None = None
        if device is None or host.vram_cache is None:
            tensors = {key: layout.tensors for key, layout in host.room.layouts.items()}
            self._tiers: ExpertSource = HostExperts(host.dram, tensors, clock)
        else:
            layouts = host.room.on_card
            tensors = {key: layout.tensors for key, layout in layouts.items()}
            self._beside = self._open_beside(host.room, layers, device, slots[0].device)
            self._tiers = self.card = CardExperts(
                layouts, slots, host.vram_cache, host.dram, device.twin(), clock, ledger,
                decided.chunk_bytes, decided.in_flight, self._beside,
            )  # fmt: skip
            for number in range(len(layers)):
                for block in unit_modules(layers, Unit("attn", number)).values():
                    _pass_by(block, self.card)
        self._rehearsed = RehearsedExperts(next(iter(tensors.values())), places, experts.count)
        self._layers = layer_experts(layers)
        self._ahead = make_ahead(host.room.policy().needs_ahead, layers)
        self._recorder = None if record is None else RoutingRecorder(record, layers)

    def _open_beside(self, room: ExpertRoom, layers: nn.ModuleList, device: CopyDevice, card: torch.device) -> BesideCard | None:
        """The CPU beside the card, where the plan has it compute and it can; a line says why it cannot."""
        share = room.share
        if share is None or room.experts is None:
            return None
        try:
            units = {layer: ExpertUnits(module, share.dtype) for layer, module in layers_with_experts(layers)}
            key, layout = next(iter(room.layouts.items()))
            anywhere = torch.empty(layout.nbytes, dtype=torch.uint8)
            units[key[0]].of(key[1], SlotViews({key: layout.tensors}).of(key, 0, anywhere))
            pool = pool_here(share.threads, share.ahead_bytes, share.tell)
        except UserError as error:
            share.tell(f"all missed experts are copied, and steps take longer than planned: {error}")
            return None
        views = SlotViews({key: layout.tensors for key, layout in room.layouts.items()})

        def unit_of(layer: int, expert: int, slot: int, buffer: torch.Tensor) -> HostFfn:
            return units[layer].of(expert, views.of((layer, expert), slot, buffer))

        shape = share.rows, room.experts.top_k, share.hidden
        return BesideCard(share.split, room.experts.expert_bytes, pool, unit_of, shape, device, card, share.dtype, share.alone)

    @property
    def results(self) -> torch.Tensor | None:
        """Where the CPU puts rows of experts, as kernels read them; None where it computes none."""
        return None if self._beside is None else self._beside.results

    def fills(self) -> list[Fill]:
        """What VRAM is to be filled with past DRAM, which knows what it keeps: experts that it does not, so that both hold as many
        different ones as they can."""
        room = self._room
        if self.card is None:
            return []
        places = self.card.keep_first()
        return [Fill(room.layouts[key], room.on_card[key].segments, place) for key, place in places.items()]

    def start(self) -> None:
        """DRAM has what it was to be filled with: fill what is left of VRAM, and make ready what the CPU computes with."""
        if self.card is not None:
            self.card.start()
        if self._beside is not None:
            self._beside.prepare({key: self.dram.place(*key) for key in self._room.layouts if self.dram.here(*key)})

    def rehearse(self) -> None:
        """Compute from anywhere until :meth:`stream`."""
        for layer in self._layers:
            layer.feed(self._rehearsed)

    def warm_up(self, tokens: int) -> None:
        """Meet all kernels that a pass of a prompt's ``tokens`` may need, while computing from anywhere; layers are alike."""
        self._layers[0].warm_up(tokens)

    def stream(self) -> None:
        """Compute from the tiers."""
        for layer in self._layers:
            layer.feed(self._tiers, self._ahead, self._recorder)
            layer.issued = IssueTime()
        if self._beside is not None:
            self._beside.computed = 0

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next."""
        for layer in self._layers:
            layer.of_prompts = step.has_prompt
        if self._recorder is not None:
            self._recorder.begin_pass(step)

    def facts(self) -> dict[str, Any]:
        """Counters of both tiers; the shares of a decode step's experts that VRAM missed (None without a GPU) and that both did; the host's
        time for a layer's visit by a decode step (None before the first); experts that the CPU computed (None where it computes none)."""
        first = self.card.stats if self.card else self.dram.stats
        tiers = {"vram": self.card.stats if self.card else None, "dram": self.dram.stats}
        asked = first.hits + first.misses
        missed = {name: stats.misses / asked if stats and asked else None for name, stats in tiers.items()}
        issued = [layer.issued for layer in self._layers]
        visits = sum(layer.visits for layer in issued)
        each_s = sum(layer.seconds for layer in issued) / visits if visits else None
        on_cpu = None if self._beside is None else self._beside.computed
        more = {"missed": missed, "host_s_per_visit": each_s, "computed_on_cpu": on_cpu}
        return {name: stats and stats.report() for name, stats in tiers.items()} | more

    def on_cpu(self) -> dict[str, tuple[int, float]]:
        """Bytes and busy seconds of the CPU beside the card, as a stage; empty where it computes no expert."""
        return {} if self._beside is None else {CPU: self._beside.used()}

    def settle(self) -> None:
        """Book all copies that are over; never blocks."""
        if self.card is not None:
            self.card.settle()

    def close(self) -> None:
        """Nothing is read or copied any more."""
        if self._recorder is not None:
            self._recorder.close()
        if self.card is not None:
            self.card.close()
        if self._beside is not None:
            self._beside.close()
        self.dram.close()


def _pass_by(block: nn.Module, card: CardExperts) -> None:
    """Let ``card`` queue more where the host enters and leaves ``block``: between a layer's experts and its successor's router."""
    block.register_forward_pre_hook(lambda *_: card.fetch_ahead())
    block.register_forward_hook(lambda *_: card.fetch_ahead())
