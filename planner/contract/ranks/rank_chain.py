"""How long layers take that lie with several ranks: each waits for the hidden state of the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec

BEHIND_LAYERS = 2
"""Hops of a pass behind its layers: the last hidden state to all ranks, and their rows of logits to the first one."""


def hops_s(hardware: HardwareProfile, model: ModelSpec, rows: int, passes: int = 1) -> float:
    """Seconds of all hops of ``passes`` over ``rows`` tokens each; 0 for a model that is not dealt.

    passes * (layers * (hop_s + rows * row bytes / p2p_gbps) + 2 * hop_s)

    Of several hosts, whose ranks have neighbouring numbers, ``hosts`` of each round of ``count`` hops go over the network, and so do those
    behind the layers.
    """
    if model.dealt is None:
        return 0.0
    nbytes, network = rows * model.hidden * model.compute_dtype.nbytes, hardware.network if hardware.hosts > 1 else None
    between, behind = hardware.links.hop_of(nbytes), hardware.links.hop_s
    if network is not None:
        far = hardware.hosts / model.dealt.count
        between, behind = far * network.hop_of(nbytes) + (1 - far) * between, network.hop_s
    return passes * (model.dealt.layers * between + BEHIND_LAYERS * behind)


def chained_s(hardware: HardwareProfile, model: ModelSpec, rows: int, passes: int, own_s: Callable[[HardwareProfile], float]) -> float:
    """Compute seconds of ``passes`` over the whole model, of which ``own_s`` are those of the layers in ``model`` on a machine.

        count * own + hops

    A card's kernels are queued while it waits for the others, so only its own launches count there:

        max(own with launches, count * own without + hops)
    """
    alone_s = own_s(hardware)
    if model.dealt is None:
        return alone_s
    hopped_s = hops_s(hardware, model, rows, passes)
    if hardware.gpu is None:
        return model.dealt.count * alone_s + hopped_s
    return max(alone_s, model.dealt.count * own_s(replace(hardware, layer_launch_s=0.0)) + hopped_s)


def turns(model: ModelSpec) -> int:
    """Ranks that compute one after the other in a pass."""
    return 1 if model.dealt is None else model.dealt.count
