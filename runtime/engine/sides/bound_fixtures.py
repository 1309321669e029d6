"""What never moves, bound to the model where it lies: its bytes come later."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from penstock.runtime.engine.sides.card_side import CardSide
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.memory.arena import PageLock
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.model.binding import Binder, move_buffers, parameters
from penstock.runtime.model.lookup import LookUpOnHost


def bind_fixtures(
    model: PreTrainedModel, host: HostSide, card: CardSide | None, copier: CopyDevice | None, device: torch.device, binder: Binder
) -> None:
    """Point ``model`` at its fixtures on both sides; its buffers go to ``device``. The host looks up what kernels cannot reach."""

    def reached(at: int, nbytes: int) -> bool:
        return not isinstance(copier, PageLock) or host.arena.is_locked(at, nbytes)

    def reach(at: int, nbytes: int) -> torch.Tensor:
        """A fixed DRAM region as whatever computes with it sees it."""
        region = host.arena.slice(at, nbytes)
        return copier.alias(region) if copier is not None and reached(at, nbytes) else region

    in_dram = [(f, at) for f, at in host.fixed if f.bind]
    bound = [(f, parameters(f.bound(f.layout.tensors), reach(at, f.layout.nbytes))) for f, at in in_dram]
    if card is not None:
        on_card = [(f, parameters(f.bound(layout.tensors), buffer)) for f, layout, buffer in card.fixed]
        resident = {f.unit.layer: params["weight"] for f, params in on_card if f.unit and f.unit.kind == "head"}
        model.get_output_embeddings().feed(resident, binder)
        bound += on_card
    for f, params in bound:
        if f.bind:
            f.bind(params)
    move_buffers(model, device)
    if copier is not None and not all(reached(at, f.layout.nbytes) for f, at in in_dram):
        LookUpOnHost(device).convert(model)
