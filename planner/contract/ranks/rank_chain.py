"""How long layers take that lie with several ranks: each waits for the hidden state of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB
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
    last_part: float = 1.0
    """Seconds of a pass's last part, of those of a mean one."""
    recorded: bool = False
    """Whether the passes are recorded, and their hops with them."""
    served_s: float = 0.0
    """Of a layer whose experts are sliced: what the other ranks launch for it once they are told."""


def recorded_hop_s(hardware: HardwareProfile, nbytes: float) -> float:
    """Seconds of a hop of ``nbytes`` inside a recorded step: one card's kernel writes it to the host's memory, the other's reads it."""
    assert hardware.gpu is not None
    return hardware.links.word_hop_s + nbytes / GB * (1 / hardware.gpu.d2h.peak + 1 / hardware.gpu.h2d.peak)


def hops_of(hardware: HardwareProfile, model: ModelSpec, rows: float, recorded: bool = False) -> tuple[float, float]:
    """Seconds of a hop of ``rows`` tokens between two layers, and of one behind all layers; none of a model that is not dealt.

    Of several hosts, whose ranks have neighbouring numbers, ``hosts`` of each round of ``count`` hops go over the network, and so do those
    behind the layers. The first figure is the mean of a round.
    """
    if model.dealt is None:
        return 0.0, 0.0
    nbytes, network = rows * model.hidden * model.compute_dtype.nbytes, hardware.network if hardware.hosts > 1 else None
    if recorded:
        return recorded_hop_s(hardware, nbytes), hardware.links.word_hop_s
    between, behind = hardware.links.hop_of(nbytes), hardware.links.hop_s
    if network is None:
        return between, behind
    far = hardware.hosts / model.dealt.count
    return far * network.hop_of(nbytes) + (1 - far) * between, network.hop_s


def told_bytes(model: ModelSpec) -> int:
    """What a layer's rank tells each other one of a token whose experts are sliced: its hidden state, its experts and their weights."""
    return model.hidden * model.compute_dtype.nbytes + 8 * (model.routers.top_k if model.routers else 0)


def exchange_s(hardware: HardwareProfile, model: ModelSpec, rows: float) -> float:
    """Seconds that hidden states take to all other ranks and what they made of them takes back, in one layer of sliced experts."""
    if model.slices == 1:
        return 0.0
    way = hardware.network if hardware.hosts > 1 and hardware.network is not None else hardware.links
    return way.hop_of(rows * told_bytes(model)) + way.hop_of(rows * model.hidden * model.compute_dtype.nbytes)


Own = Callable[[HardwareProfile, ModelSpec, float], float]
"""Compute seconds of a rank's model on a machine, where a layer's kernels beside its products take so long at least."""


def chained_s(hardware: HardwareProfile, model: ModelSpec, passed: Passed, own_s: Own) -> float:
    """Compute seconds of ``passed`` over the whole model, where ``own_s`` are those of the layers in ``model`` on a machine.

    Each layer takes C seconds for a pass's tokens on its rank's card, which a rank reckons for all others as if the layers there were like
    its own. One of m parts takes C / m, and a hop to another rank h seconds a part. With a, the layer before, and o, the one before it on
    its own rank, a layer's first part begins, and its first and last part end, at

        begin = max(first(a) + h, last(o), begin(o) + way)
        first = begin + C / m
        last  = max(begin + C, last(a) + h + C / m)

    where ``way`` is all parts' time on the slowest way between two ranks. That is exact for equal parts: by induction part p ends at a
    convex function of p, so that the first or the last one decides. The last part's own seconds stand for C / m in ``last``: its tokens
    attend to most, which nothing hides where there are hardly more parts than ranks. Behind the layers come two hops and the LM head. So N
    ranks take L * C and hops for m = 1, and L / N * C and the filling of the ring for a large m.

    A card's kernels are queued while it waits for the others, so only its own launches count there: it takes no less than ``own_s`` with
    launches. Each layer's kernels then take what they take on the card. Routed experts are launched when their layer's router has spoken,
    so of a model that has some all launches count. All ranks compute with slices of an expert at the same time, after an exchange
    (:func:`exchange_s`) and what the others launch first.
    """
    alone_s = own_s(hardware, model, 0.0)
    dealt = model.dealt
    if dealt is None:
        return alone_s
    queued, in_turn = hardware if hardware.gpu is None or dealt.routed else replace(hardware, layer_launch_s=0.0), model.in_turn
    kernels_s = 0.0 if queued is hardware or queued.gpu is None else queued.gpu.layer_kernels_s
    device_s = alone_s if queued is hardware and in_turn is model else own_s(queued, in_turn, kernels_s)
    head_s = min(passed.head_s, device_s) / passed.passes
    layer_s = (device_s / passed.passes - head_s) / model.layers
    between_s, behind_s = hops_of(hardware, model, passed.rows / passed.parts, passed.recorded)
    slowest = hardware.network if hardware.hosts > 1 and hardware.network is not None else hardware.links
    wide_s = between_s if passed.recorded else slowest.hop_of(passed.rows * model.hidden * model.compute_dtype.nbytes)
    cards = [(card, card.layer_kernels_s if kernels_s else 0.0) for card in hardware.round_cards]
    each_s = [layer_s * own_s(replace(queued, gpu=card), in_turn, least_s) / device_s for card, least_s in cards] or [layer_s] * dealt.count
    ring = Ring(each_s, passed.parts, between_s, wide_s, passed.last_part)
    exchanged_s = len(model.experts.layers) * (exchange_s(hardware, model, passed.rows) + passed.served_s) if model.experts else 0.0
    return max(alone_s, passed.passes * (ring.through(dealt.owners) + exchanged_s + BEHIND_LAYERS * behind_s + head_s))


@dataclass(frozen=True)
class Ring:
    """What the layers of a pass wait for, as :func:`chained_s` has it."""

    layer_s: Sequence[float]
    """Seconds of one of each rank's layers."""
    parts: int
    hop_s: float
    way_s: float
    last_part: float = 1.0

    def through(self, owners: Sequence[int]) -> float:
        """Seconds from the first layer's beginning to the last one's end, where they lie with ``owners``."""
        free_s = [0.0] * len(self.layer_s)
        begin_s = first_s = last_s = hop_s = 0.0
        before = owners[0]
        for owner in owners:
            if owner != before:
                free_s[before], hop_s = max(free_s[before], begin_s + self.way_s), self.hop_s
            layer_s = self.layer_s[owner]
            part_s = layer_s / self.parts
            begin_s = max(first_s + hop_s, free_s[owner])
            first_s = begin_s + part_s
            last_s = max(begin_s + layer_s, last_s + hop_s + part_s * self.last_part)
            free_s[owner], before, hop_s = last_s, owner, 0.0
        return last_s


def fetching_turns(model: ModelSpec) -> float:
    """:func:`turns` of links that bring a layer's experts, by the layers that route: of slices all links bring theirs at once."""
    return 1 if model.dealt is None or model.slices > 1 else model.dealt.routed / max(1, len(model.moe))


def turns(model: ModelSpec) -> float:
    """How many times as long as its own layers all ranks' take that compute one after the other, in a pass that is not cut into parts."""
    return 1 if model.dealt is None else model.dealt.layers / model.layers
