"""MoE layers as they are simulated: a router chooses, and each expert is computed as soon as it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from penstock.planner.common.timeline.spans import COMPUTE, CPU, EXPERTS, SSD
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.recording import come_together
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.simulate.lanes.events import Record
from penstock.planner.simulate.lanes.expert_lane import SimulatedExperts
from penstock.planner.simulate.lanes.lanes import Lanes, Work
from penstock.planner.simulate.lanes.wait import Wait
from penstock.planner.simulate.routers import Routers
from penstock.planner.simulate.simulated_work import Pass


class Sharing(Protocol):
    """Ranks that compute with slices of a layer's experts while the layer's own rank does."""

    def tell(self, layer: int, each: Pass) -> None:
        """Its router has chosen."""

    def gather(self, layer: int) -> Iterator[Wait]:
        """Until what all others made has come."""


class RoutedLayers:
    """Those of ``plan``, whose routers choose by ``routers``. Layers have the numbers of the whole model."""

    def __init__(self, plan: Plan, moved: Moved, lanes: Lanes, record: Record, routers: Routers):
        assert plan.model.experts is not None, "only a model with routed experts has such layers"
        self.experts = SimulatedExperts(plan, moved, lanes)
        self.sharing: Sharing | None = None
        """The other ranks, where each of them has a slice of every expert."""
        self.sequences = 0
        self._routers, self._lanes, self._record = routers, lanes, record
        self._places = {layer: i for i, layer in enumerate(plan.model.experts.layers)}
        self._issued_ns = 0
        """Of the coming compute, what the host could issue while it waited for experts."""

    def visit(self, each: Pass, layer: int) -> Iterator[Wait]:
        """Experts of ``layer``, which this rank computes; nothing where it is dense."""
        if layer not in self._places:
            return
        if self.sharing is not None:
            self.sharing.tell(layer, each)
        yield from self.route(each, layer)
        if self.sharing is not None:
            yield from self.sharing.gather(layer)

    def route(self, each: Pass, layer: int) -> Iterator[Wait]:
        """The experts of ``layer`` that are here, each as soon as it is there, or all behind the last."""
        experts, lanes = self.experts, self._lanes
        waits_for = EXPERTS if experts.card else SSD
        tokens = max(1, round(each.kv_new))
        routing = self._routers.next(self._places[layer], self.sequences, tokens, each.prefill)
        rows = Counter(routing.chosen.ravel().tolist())
        experts.visit(layer, routing, each.called_ns)
        ready = experts.ready_together if come_together(experts.card is not None, self.sequences * tokens) else experts.ready
        self._issued_ns = 0
        while experts.waiting:
            since = lanes.now
            yield Wait(lambda: experts.copied_only() or ready() is not None, f"experts of layer {layer}")
            copied_since = lanes.now
            yield Wait(lambda: ready() is not None, f"experts of layer {layer}")
            self._issued_ns += lanes.now - copied_since
            expert = ready()
            assert expert is not None, "it was waited for"
            name, length_ns = f"expert.{layer}.{expert}", each.expert_ns + round(each.row_ns * rows[expert])
            on_cpu = experts.is_computed(expert)
            self._record.waited(COMPUTE, CPU if on_cpu else waits_for, name, since, lanes.now)
            if on_cpu:
                experts.used(expert)
                continue
            length_ns -= self.hidden(each.expert_issued_ns)
            yield lanes.do(COMPUTE, Work(("expert", layer), name, 0, lambda: None), length_ns)
            experts.used(expert)

    def hidden(self, issuing_ns: int) -> int:
        """Of ``issuing_ns`` for a piece of compute what was over while the host waited for experts: it goes on to the next router."""
        hidden = min(issuing_ns, self._issued_ns)
        self._issued_ns -= hidden
        return hidden
