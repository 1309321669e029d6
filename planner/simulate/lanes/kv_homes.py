"""Layers of KV between visits, without bytes: on the SSD or in DRAM, outside the device that computes with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.planner.common.timeline.spans import SSD, SSD_WRITE
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.kv_tiers import kv_tiers
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy.layer_slots import Held, LayerSlots
from penstock.planner.contract.policy.rolling import RollingPolicy
from penstock.planner.contract.prices.price import Resource
from penstock.planner.simulate.lanes.lanes import Lanes, Work, ns

Tokens = Callable[[int], tuple[float, float]]
"""Pass of the batch -> (tokens that are brought in, new ones that go out)."""


def outside_kv(plan: Plan) -> dict[int, Tier]:
    """Layers whose KV does not lie where it is computed with, and where it does."""
    own = Tier.vram if plan.hardware.gpu else Tier.dram
    return {i: tier for i, tier in enumerate(kv_tiers(plan.model.layers, plan.decisions.kv)) if tier is not own}


@dataclass(frozen=True)
class KvRates:
    """Seconds and bytes of one token of one layer's KV for the whole batch, each with its link to itself."""

    nbytes: float
    ssd_s: float
    write_s: float
    h2d_s: float
    d2h_s: float

    @classmethod
    def of(cls, plan: Plan, moved: Moved, batch: int) -> KvRates:
        tiers = list(outside_kv(plan).values())
        share = batch / plan.decisions.batch / plan.workload.max_tokens
        all_, on_ssd = share / max(1, len(tiers)), share / max(1, tiers.count(Tier.ssd))
        nbytes = max(moved.kv_h2d_bytes * all_, moved.kv_ssd_bytes * on_ssd)
        read, kv = moved.kv.read, moved.kv
        ssd_s, write_s = read.of(Resource.ssd) * on_ssd, kv.written.of(Resource.ssd) * on_ssd
        return cls(nbytes, ssd_s, write_s, read.of(Resource.h2d) * all_, kv.back.of(Resource.d2h) * all_)


class SpilledKv:
    """``penstock.runtime.kv.outside.spill``: ``layers`` on the SSD, read ahead into ``slots`` of DRAM, new rows written behind."""

    def __init__(self, layers: Sequence[int], slots: int, rates: KvRates, tokens: Tokens, lanes: Lanes):
        self._slots = LayerSlots(RollingPolicy(tuple(layers), max(1, slots - 1), slots, slots - 1), slots)
        self._rates, self._tokens, self._lanes = rates, tokens, lanes
        self._taken: set[int] = set()
        self._later: dict[int, Held] = {}
        self._visits: Counter[int] = Counter()
        self._asked: int | None = None
        self._start(self._slots.preload())

    def there(self, layer: int) -> bool:
        return layer not in self._taken and self._slots.is_ready(layer)

    def ask(self, layer: int) -> None:
        self._asked = layer
        self._access()

    def _access(self) -> None:
        """A layer is asked of the slots only when its rows of the pass before were written."""
        if self._asked is not None and self._asked not in self._taken:
            layer, self._asked = self._asked, None
            self._start(self._slots.access(layer))

    def take(self, layer: int) -> None:
        self._slots.take(layer)
        self._taken.add(layer)

    def give_back(self, layer: int) -> None:
        _, new = self._tokens(self._visits[layer])
        nbytes = round(new * self._rates.nbytes)
        self._lanes.add(SSD_WRITE, Work(("kv", layer), f"kv.{layer}", nbytes, partial(self._written, layer)), ns(new * self._rates.write_s))

    def state(self) -> tuple[object, ...]:
        return self._slots.state(), tuple(sorted(self._taken)), tuple(sorted(self._later)), self._asked

    def _written(self, layer: int) -> None:
        self._taken.remove(layer)
        self._visits[layer] += 1
        later = self._later.pop(layer, None)
        self._start(self._slots.leave(layer))
        if later is not None:
            self._start([later])
        self._access()

    def _start(self, started: list[Held]) -> None:
        todo = list(started)
        while todo:
            held = todo.pop(0)
            if held.layer in self._taken:
                self._later[held.layer] = held
                continue
            old, _ = self._tokens(self._visits[held.layer])
            if old:
                work = Work(("kv", held.layer), f"kv.{held.layer}", round(old * self._rates.nbytes), partial(self._read, held))
                self._lanes.add(SSD, work, ns(old * self._rates.ssd_s))
            else:
                todo += self._slots.arrived(held)

    def _read(self, held: Held) -> None:
        self._start(self._slots.arrived(held))


class DramKv:
    """``penstock.runtime.kv.outside.kv_home.DramHome``: each layer has its place, and is there once its new rows are."""

    def __init__(self) -> None:
        self._storing: set[int] = set()

    def there(self, layer: int) -> bool:
        return layer not in self._storing

    def ask(self, layer: int) -> None:
        """It is there, or on its way."""

    def take(self, layer: int) -> None:
        self._storing.add(layer)

    def give_back(self, layer: int) -> None:
        self._storing.discard(layer)

    def state(self) -> tuple[object, ...]:
        return tuple(sorted(self._storing))
