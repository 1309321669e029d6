"""How much each rank has of what the ranks of a host divide."""

from __future__ import annotations

from fractions import Fraction

from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.ranks.dealing import Dealing

SLOT_LAYERS = 2
"""Of its mean layers, whose VRAM holds what streams; and what a rank counts for at least, since it loads through DRAM."""


def host_shares(hardware: HardwareProfile, model: ModelSpec, dealing: Dealing) -> tuple[Fraction, ...]:
    """Of DRAM and drive, each rank's share of its host's. Equal ones where cards and numbers of layers are alike, or where the first rank
    alone has fewer since something else lies with it. Else in proportion to the weights that its own card cannot hold, and what they need
    to pass: they lie in DRAM or are read from the drive."""
    ranks_a_host = dealing.count // hardware.hosts
    if (dealing.is_even or dealing.spares_first) and not hardware.others:
        return (Fraction(1, ranks_a_host),) * dealing.count
    layer_bytes = [0] * model.layers
    for unit in model.units:
        if unit.layer is not None:
            layer_bytes[unit.layer] += unit.stored_bytes * unit.count
    outside = []
    for rank in range(dealing.count):
        mine, rows = [layer_bytes[layer] for layer in dealing.of(rank)], dealing.vocab_rows(rank, model.vocab)
        slots = SLOT_LAYERS * sum(mine) // len(mine)
        needed, room = sum(mine) + slots + model.lm_head.stored_bytes * len(rows) // model.vocab, 0
        if hardware.gpu is not None:
            card = hardware.card(rank % ranks_a_host)
            room = card.vram_bytes - card.gpu.context_bytes
        outside.append(max(slots, needed - room))
    of_host = [sum(outside[rank // ranks_a_host * ranks_a_host :][:ranks_a_host]) for rank in range(dealing.count)]
    return tuple(Fraction(mine, together) for mine, together in zip(outside, of_host, strict=True))
