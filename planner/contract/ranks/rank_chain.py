"""How long layers take that lie with several ranks: each waits for the hidden state of the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec

BEHIND_LAYERS = 2
"""Hops of a pass behind its layers: the last hidden state to all ranks, and their rows of logits to the first one."""


@dataclass(frozen=True)
class Passed:
    """What goes round the ranks."""

    rows: int
    """Tokens of a pass."""
    passes: int = 1
    parts: int = 1
    """Of each pass, one behind the other."""
    head_s: float = 0.0
    """Seconds in which a rank multiplies by its rows of the LM head in all passes, while the others do."""


def hops_of(hardware: HardwareProfile, model: ModelSpec, rows: float) -> tuple[float, float]:
    """Seconds of a hop of ``rows`` tokens between two layers, and of one behind all layers; none of a model that is not dealt.

    Of several hosts, whose ranks have neighbouring numbers, ``hosts`` of each round of ``count`` hops go over the network, and so do those
    behind the layers. The first figure is the mean of a round.
    """
    if model.dealt is None:
        return 0.0, 0.0
    nbytes, network = rows * model.hidden * model.compute_dtype.nbytes, hardware.network if hardware.hosts > 1 else None
    between, behind = hardware.links.hop_of(nbytes), hardware.links.hop_s
    if network is None:
        return between, behind
    far = hardware.hosts / model.dealt.count
    return far * network.hop_of(nbytes) + (1 - far) * between, network.hop_s


def chained_s(hardware: HardwareProfile, model: ModelSpec, passed: Passed, own_s: Callable[[HardwareProfile], float]) -> float:
    """Compute seconds of ``passed`` over the whole model, where ``own_s`` are those of the layers in ``model`` on a machine.

    A rank's J of all L layers take C seconds each for a pass's tokens, and C / m for one of its m parts. The part reaches the next rank
    after a hop of h more. So N ranks begin a layer each in

        P = max(C, N * (C / m + h))

    seconds: a rank begins its next layer when it is through with one, and the first part has gone round. Nor is P less than all parts' time
    on the slowest way between two ranks. With r the rank of the last layer, a pass takes

        (J - 1) * P + r * (C / m + h) + C + 2 hops, and the LM head

    which is L * C and hops for m = 1, and L / N * C and the filling of the ring for a large m. A card's kernels are queued while it waits
    for the others, so only its own launches count there: it takes no less than ``own_s`` with launches. Routed experts
    are launched when their layer's router has spoken, so of a model that has some all launches count.
    """
    alone_s = own_s(hardware)
    if model.dealt is None:
        return alone_s
    device_s = alone_s if hardware.gpu is None or model.dealt.routed else own_s(replace(hardware, layer_launch_s=0.0))
    count, own = model.dealt.count, model.layers
    # ranks behind the first may have a layer less
    rounds, last = divmod(model.dealt.layers - 1, count)
    head_s = min(passed.head_s, device_s) / passed.passes
    layer_s = (device_s / passed.passes - head_s) / own
    between_s, behind_s = hops_of(hardware, model, passed.rows / passed.parts)
    part_s = layer_s / passed.parts + between_s
    slowest = hardware.network if hardware.hosts > 1 and hardware.network is not None else hardware.links
    wide_s = slowest.hop_of(passed.rows * model.hidden * model.compute_dtype.nbytes)
    period_s = max(layer_s, count * part_s, wide_s)
    pass_s = rounds * period_s + last * part_s + layer_s + BEHIND_LAYERS * behind_s + head_s
    return max(alone_s, passed.passes * pass_s)


def turns(model: ModelSpec) -> int:
    """Ranks that compute one after the other in a pass that is not cut into parts."""
    return 1 if model.dealt is None else model.dealt.count
