"""The DRAM tier without bytes: the runtime's slots under the plan's policy, filled by the SSD's lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from penstock.planner.common.measures import GB
from penstock.planner.common.timeline.spans import SSD
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.placement import Placement, Unit
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.policy import LayerPolicy, make_policy
from penstock.planner.contract.policy.layer_slots import Held, LayerSlots
from penstock.planner.contract.prices.stages import ssd_gbps
from penstock.planner.simulate.lanes.events import Record
from penstock.planner.simulate.lanes.lanes import Lanes, Work, ns


class SimulatedDram:
    """``read_ns`` and ``nbytes`` are those of a layer's units that pass through. LM-head blocks lie still."""

    def __init__(
        self,
        placement: Placement,
        policy: LayerPolicy,
        read_ns: Mapping[int, int],
        nbytes: Mapping[int, int],
        lanes: Lanes,
        record: Record,
        keep_log: bool,
    ):
        self.policy = policy
        self.slots = LayerSlots(policy, placement.dram_slots, keep_log=keep_log)
        self._lanes, self._record = lanes, record
        self._read_ns, self._bytes = read_ns, nbytes
        kinds = (("attn", placement.attn), ("ffn", placement.ffn))
        self._units = {i: tuple(Unit(kind, i) for kind, tiers in kinds if tiers[i] is not Tier.vram) for i in placement.dram_layers}
        self._given_back: Counter[int] = Counter()
        self._asked: tuple[int, int] | None = None
        """The layer that somebody waits for, and since when."""

    def preload(self) -> None:
        """The first fill, which is over before anything is timed."""
        started = self.slots.preload()
        while started:
            started = [more for held in started for more in self.slots.arrived(held)]

    def arrived(self, unit: Unit) -> bool:
        """Whether asking for ``unit``, the next one, would not wait."""
        return unit.kind == "head" or unit != self._units[unit.layer][0] or self.slots.is_ready(unit.layer)

    def ask(self, unit: Unit) -> None:
        """The consumer turns to ``unit``."""
        if unit.kind == "head" or unit != self._units[unit.layer][0]:
            return
        self._start(self.slots.access(unit.layer))
        self._record.saw_held(len(self.policy.held))
        self._asked = unit.layer, self._lanes.now

    def take(self, unit: Unit) -> None:
        """``unit``, which was asked for, has arrived and is in use from now on."""
        if self._asked is None:
            return
        layer, since = self._asked
        self._asked = None
        if self._lanes.now > since:
            self.slots.stats.waits += 1
            self._record.counts["cache waits, ns"] += self._lanes.now - since
        self.slots.take(layer)

    def give_back(self, unit: Unit) -> None:
        """``unit`` was used. A layer is left with the last of its units."""
        if unit.kind == "head":
            return
        self._given_back[unit.layer] += 1
        if self._given_back[unit.layer] == len(self._units[unit.layer]):
            self._given_back[unit.layer] = 0
            self._start(self.slots.leave(unit.layer))

    def state(self) -> tuple[object, ...]:
        return self.policy.held, self.slots.state(), tuple(sorted(item for item in self._given_back.items() if item[1])), self._asked

    def rebase(self, passed_ns: int) -> None:
        """The clock was set back."""
        if self._asked is not None:
            self._asked = self._asked[0], self._asked[1] - passed_ns

    def _start(self, started: list[Held]) -> None:
        for held in started:
            layer = held.layer
            work = Work(("layer", layer), f"layer {layer}", self._bytes[layer], partial(self._over, held))
            self._lanes.add(SSD, work, self._read_ns[layer])

    def _over(self, held: Held) -> None:
        self._start(self.slots.arrived(held))


def open_dram(placement: Placement, machine: HardwareProfile, wrap_around: bool, lanes: Lanes, record: Record, log: bool) -> SimulatedDram:
    """The tier as a plan has it, whose layers come from the drive of ``machine``."""
    ssd = placement.weights.ssd
    rate = ssd_gbps(machine, ssd.block_bytes, ssd.queue_depth) * GB
    nbytes = {i: placement.layer_dram_bytes(i) for i in placement.dram_layers}
    read_ns = {i: ns(n / rate) for i, n in nbytes.items()}
    return SimulatedDram(placement, make_policy(placement, wrap_around), read_ns, nbytes, lanes, record, log)
