"""The decode steps of an engine, recorded: streaming, computed in part by the CPU, or over whatever lies in the buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import ALONE, OWN
from penstock.planner.contract.policy.schedule_choice import Schedule, ScheduleChoice
from penstock.planner.contract.prices.cost import predict
from penstock.runtime.beside.host_pool import pool_here
from penstock.runtime.engine.card_side import CardSide
from penstock.runtime.engine.host_side import HostSide
from penstock.runtime.engine.rehearsal import first_step, longest_step
from penstock.runtime.engine.stepper import Stepper
from penstock.runtime.memory.device import CopyDevice, CudaDevice
from penstock.runtime.model.binding import WeightStream, views
from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.agreement import disagreement
from penstock.runtime.recorded.card_graph import CardGraph
from penstock.runtime.recorded.graph_steps import GraphSteps
from penstock.runtime.recorded.host_steps import HostSteps, host_unit
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.scheduled_steps import ScheduledSteps
from penstock.runtime.recorded.slot_turns import SlotTurns
from penstock.runtime.store.decoder import decoder_layers, unit_modules


def launched_singly(plan: Plan) -> Plan:
    """``plan``, predicted anew for steps that are launched kernel by kernel."""
    gpu, weights = plan.hardware.gpu, replace(plan.decisions.weights, host=HostUnits())
    hardware, decisions = replace(plan.hardware, gpu=gpu and replace(gpu, layer_kernels_s=0.0)), replace(plan.decisions, weights=weights)
    return replace(plan, hardware=hardware, decisions=decisions, prediction=predict(hardware, plan.model, plan.workload, decisions))


@dataclass(frozen=True)
class FedStepper:
    """``stepper`` of ``model``, which is fed by another stream of weights inside ``fed_by``; ``rehearsal`` moves nothing."""

    stepper: Stepper
    model: PreTrainedModel
    rehearsal: WeightStream
    fed_by: Callable[[WeightStream], AbstractContextManager[object]]


class RecordedSide:
    """Steps of ``rows`` sequences of at most ``most_tokens``, each recorded once. Made when all places are filled or being filled."""

    def __init__(self, fed: FedStepper, host: HostSide, card: CardSide, copier: CopyDevice, rows: int, most_tokens: int):
        self._fed, self._host, self._card, self._copier = fed, host, card, copier
        self._rows, self._most_tokens = rows, most_tokens
        self._graphs: list[CardGraph] = []
        self._captured: list[GraphSteps] = []
        self._stack = ExitStack()
        self.steps: ScheduledSteps

    def record(self) -> ScheduledSteps:
        """Steps by the plan's schedule and, where the CPU takes part in it, by streaming alone."""
        weights = self._host.placement.weights
        recorded: dict[str, GraphSteps] = {}
        beside = weights.host.compute(self._rows)
        if beside:
            recorded[OWN] = self._streaming(self._host.placement.step_units, self._host_steps())
        if not beside or recorded[OWN].refused is None:
            recorded[ALONE if beside else OWN] = self._streaming(self._host.placement.streamed_units, None)
        if len(recorded) > 1 and recorded[ALONE].refused is None:
            self._hold_to_the_card(recorded)
        schedules = [one for one in self._host.options.schedules if one.name in recorded] or [Schedule(name, 1.0) for name in recorded]
        self.steps = ScheduledSteps(recorded, ScheduleChoice(schedules), self._host.options.tell)
        return self.steps

    def _hold_to_the_card(self, recorded: dict[str, GraphSteps]) -> None:
        """Compute one step both ways. Where rounding does not explain the difference, streaming alone is left, and the user is told."""
        vocab, made = self._host.placement.model.vocab, []

        def both(step: Step) -> None:
            for name in (OWN, ALONE):
                made.append(recorded[name].run(step).float().cpu())
                recorded[name].make_way()

        first_step(self._fed.stepper, [1009 * (k + 1) % vocab for k in range(self._rows)], both)
        why = disagreement(made[0], made[1], self._host.placement.model.layers)
        if why is not None:
            self._host.options.tell(why)
            recorded.pop(OWN).stop()
        for steps in recorded.values():
            steps.steps = 0  # what a run is told of are its own

    def record_still(self) -> ScheduledSteps:
        """After :meth:`stop`: steps over whatever lies in the buffers, in which nothing moves."""
        graph = self._graphs[0]
        stream = RecordedStream((), {}, graph, self._host.ledger, others=self._fed.rehearsal)
        steps = GraphSteps(self._fed.stepper, graph, stream, self._fed.rehearsal, self._fed.fed_by, None)
        self._capture(steps)
        return ScheduledSteps({OWN: steps}, ScheduleChoice([Schedule(OWN, 1.0)]), self._host.options.tell)

    @property
    def refused(self) -> str | None:
        """Why steps are launched one kernel after the other; None where they are not."""
        return self.steps.refused

    def settle(self) -> None:
        """Book the last step."""
        self.steps.settle()

    def facts(self) -> dict[str, object]:
        """For the report."""
        return self.steps.facts()

    def stop(self) -> None:
        """Nothing moves any more, and memory is given back. Safe to call twice, and after a failure in the middle of :meth:`record`."""
        for steps in self._captured:
            steps.stop()
        self._stack.close()

    def _streaming(self, units: Sequence[Unit], host: HostSteps | None) -> GraphSteps:
        assert isinstance(self._copier, CudaDevice)
        graph = CardGraph(self._copier, list(self._card.slots), self._graphs[0] if self._graphs else None)
        self._graphs.append(graph)
        stream = self._card.recorded(graph, units)
        turns = SlotTurns(self._card.ring, stream, self._card.from_dram, graph, self._host.dram, self._copier)
        steps = GraphSteps(self._fed.stepper, graph, stream, self._fed.rehearsal, self._fed.fed_by, turns, host)
        self._capture(steps)
        return steps

    def _capture(self, steps: GraphSteps) -> None:
        self._captured.append(steps)
        longest_step(self._fed.stepper, self._rows, self._most_tokens, steps.capture)

    def _host_steps(self) -> HostSteps:
        """The CPU's units, and the threads that compute them."""
        placement, host = self._host.placement, self._host
        pool = pool_here(host.options.host_threads, host.options.tell)
        self._stack.callback(pool.close)
        layers, units = decoder_layers(self._fed.model), []
        for unit in placement.host_units:
            ((name, module),) = unit_modules(layers, unit).items()
            tensors = views(host.layouts[unit].tensors, host.dram.stays(unit))
            units.append(host_unit(unit, name, module, tensors, placement.model.ffn_activation))
        return HostSteps(pool, units, self._rows, self._copier, host.ledger)
