"""Launched steps that hand units over to the CPU, on both sides of memory."""

from __future__ import annotations

from contextlib import ExitStack

from transformers import PreTrainedModel

from penstock.runtime.beside.host_pool import pool_here
from penstock.runtime.engine.sides.card_side import CardSide
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.handed.handed_steps import HandedSteps
from penstock.runtime.handed.launched_units import LaunchedUnits
from penstock.runtime.handed.ring_turns import RingTurns
from penstock.runtime.memory.device import CopyDevice


def open_handed(host: HostSide, card: CardSide, copier: CopyDevice, locked: bool, model: PreTrainedModel, stack: ExitStack) -> HandedSteps:
    """What has the CPU compute its units of ``model``; copying has begun. ``stack`` closes it, and the threads that compute. ``locked``:
    whether its memory is to be page-locked."""
    placement, tell = host.placement, host.options.tell
    pool = pool_here(host.options.host_threads, host.options.host_ahead_bytes, tell)
    stack.callback(pool.close)
    decided = placement.weights.host
    units = LaunchedUnits(
        pool, host.units_on_host(model, placement.host_units), decided.rows, copier, locked, host.ledger, placement.model.layers, tell
    )
    ring, steps = card.another_ring(placement.step_units)
    turns = RingTurns(card.ring, ring, lambda unit, into: card.from_dram[unit].copy(into, copier.copy), host.dram, copier, card.walk)
    handed = HandedSteps(decided, units, card.stream, card.ring, steps, ring, turns)
    stack.callback(handed.close)
    turns.start()
    return handed
