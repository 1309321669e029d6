"""The steps of an engine, recorded: streaming, computed in part by the CPU, or over whatever lies in the buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from penstock.planner.contract.decided.placement import Placement, Unit
from penstock.planner.contract.plan.schedules import ALONE, OWN
from penstock.planner.contract.policy.near_choice import choice_of
from penstock.planner.contract.policy.schedule_choice import Schedule, ScheduleChoice
from penstock.planner.contract.speculation.verify_shapes import VerifyShape
from penstock.runtime.beside.host_pool import HostPool, pool_here
from penstock.runtime.engine.passes.rehearsal import first_step, longest_step
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.engine.sides.card_side import CardSide
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.memory.device import CopyDevice, CudaDevice
from penstock.runtime.model.binding import Binder, WeightStream
from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.agreement import disagreement
from penstock.runtime.recorded.card_pass import CardPass
from penstock.runtime.recorded.graph_steps import GraphSteps, Others
from penstock.runtime.recorded.host_steps import HostSteps, HostUnit
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.scheduled_steps import ScheduledSteps
from penstock.runtime.recorded.shaped_steps import ShapedSteps
from penstock.runtime.recorded.slot_turns import SlotTurns


@dataclass(frozen=True)
class FedStepper:
    """``stepper`` of ``model``, which ``binder`` feeds; the stream ``rehearsal`` moves nothing."""

    stepper: Stepper
    model: PreTrainedModel
    binder: Binder
    rehearsal: WeightStream


@dataclass(frozen=True)
class _Feed:
    """What feeds recorded passes over the same streamed units, whatever their shapes."""

    graph: CardPass
    stream: RecordedStream
    turns: SlotTurns


class RecordedSide:
    """Steps of ``rows`` sequences of at most ``most_tokens``, each recorded once, and passes of ``shapes`` that verify. Made when all
    places are filled or being filled. ``beside``: rows of those passes of which the CPU computes units. ``others`` make theirs at the same
    time: there it may be units of another rank, and this one's schedules differ by nothing."""

    def __init__(
        self,
        fed: FedStepper,
        host: HostSide,
        card: CardSide,
        copier: CopyDevice,
        rows: int,
        most_tokens: int,
        shapes: Sequence[VerifyShape],
        beside: Collection[int],
        others: Others | None = None,
    ):
        self._fed, self._host, self._card, self._copier = fed, host, card, copier
        self._rows, self._most_tokens, self._shapes, self._beside, self._others = rows, most_tokens, shapes, beside, others
        self._feeds: dict[str, _Feed] = {}
        self._captured: list[GraphSteps] = []
        self._units: dict[tuple[Unit, ...], Sequence[HostUnit]] = {}
        self._verify: list[GraphSteps] = []
        self._stack = ExitStack()
        self.steps: ScheduledSteps

    def record(self) -> ScheduledSteps:
        """Steps by the plan's schedule and, where the CPU takes part in it, by streaming alone. Those that verify by the one of both that
        the plan has for their rows."""
        recorded: dict[str, GraphSteps] = {}
        beside, placement = self._rows in self._beside, self._host.placement
        if beside:
            recorded[OWN] = self._streaming(OWN, placement.step_units, self._host_steps(self._rows, placement))
        if not beside or recorded[OWN].refused is None:
            alone = ALONE if beside else OWN
            recorded[alone] = self._streaming(alone, placement.streamed_units, None)
        near = self._near() if len(recorded) > 1 and recorded[ALONE].refused is None else []
        for one in near:
            other = replace(placement, weights=placement.weights.with_host_ffn(one.host_ffn))
            recorded[one.name] = steps = self._streaming(one.name, other.step_units, self._host_steps(self._rows, other))
            if steps.refused is not None:
                self._host.options.tell(f"steps with {one.name} are not tried: {steps.refused}")
        if len(recorded) > 1 and recorded[ALONE].refused is None:
            self._hold_to_the_card(recorded)
        able = [name for name, steps in recorded.items() if steps.refused is None] or list(recorded)
        schedules = [one for one in self._host.options.schedules if one.name in able] or [Schedule(name, 1.0) for name in able]
        near = [one for one in near if one.name in able and OWN in able]
        verify = self._verifying(recorded, ALONE if beside else OWN)
        shaped = {name: ShapedSteps(steps, verify[name]) for name, steps in recorded.items()}
        judges = self._others is None or self._others.leads
        self.steps = ScheduledSteps(shaped, choice_of(schedules, near) if judges else None, self._host.options.tell)
        return self.steps

    def _near(self) -> list[Schedule]:
        """Schedules near the plan's, of an engine that verifies no drafts: those passes follow the plan's or stream alone."""
        known = {OWN, ALONE}
        return [] if self._shapes or self._others is not None else [one for one in self._host.options.schedules if one.name not in known]

    def _verifying(self, recorded: Mapping[str, GraphSteps], alone: str) -> Mapping[str, Sequence[GraphSteps]]:
        """Schedule -> passes that verify, largest first: with the CPU as far as the plan has it compute so many rows, else streaming."""
        found: dict[str, list[GraphSteps]] = {name: [] for name in recorded}
        for shape in sorted(self._shapes, key=lambda shape: -shape.all_tokens):
            on_host = shape.all_tokens in self._beside
            name = OWN if on_host else alone
            if name not in recorded or recorded[name].refused is not None or shape.tokens > self._most_tokens:
                continue
            feed = self._feeds[name]
            graph = CardPass(self._cuda, feed.graph)
            stream = self._card.recorded(graph, feed.stream.units, feed.stream)
            steps = self._steps(
                _Feed(graph, stream, feed.turns), self._host_steps(shape.all_tokens, self._host.placement) if on_host else None
            )
            self._capture(steps, shape.rows, shape.tokens)
            self._verify.append(steps)
            if steps.refused is None:
                for one in (name,) if on_host else recorded:
                    found[one].append(steps)
        return found

    def _hold_to_the_card(self, recorded: dict[str, GraphSteps]) -> None:
        """Compute one step each way. Where rounding does not explain a difference, on any rank, streaming alone is left, and the user is
        told."""
        model, made = self._host.placement.model, dict[str, torch.Tensor]()
        beside = [name for name, steps in recorded.items() if steps.refused is None and name != ALONE]

        def each(step: Step) -> None:
            for name in (*beside, ALONE):
                made[name] = recorded[name].run(step).float().cpu()
                recorded[name].make_way()

        first_step(self._fed.stepper, [1009 * (k + 1) % model.vocab for k in range(self._rows)], each)
        layers = model.layers if model.dealt is None else model.dealt.layers
        why = next(filter(None, (disagreement(made[name], made[ALONE], layers) for name in beside)), None)
        if self._others is not None:
            why = self._others.agree(why)
        if why is not None:
            self._host.options.tell(why)
            for name in beside:
                recorded.pop(name).stop()
        for steps in recorded.values():
            steps.steps = 0  # what a run is told of are its own

    def record_still(self) -> ScheduledSteps:
        """After :meth:`stop`: steps over whatever lies in the buffers, in which nothing moves."""
        graph = next(iter(self._feeds.values())).graph
        stream = RecordedStream((), {}, graph, self._host.ledger, others=self._fed.rehearsal)
        steps = GraphSteps(self._fed.stepper, graph, stream, self._fed.rehearsal, self._fed.binder.fed_by, None)
        self._capture(steps, self._rows)
        return ScheduledSteps({OWN: ShapedSteps(steps)}, ScheduleChoice([Schedule(OWN, 1.0)]), self._host.options.tell)

    @property
    def refused(self) -> str | None:
        """Why steps are launched one kernel after the other; None where they are not."""
        return self.steps.refused

    def settle(self) -> None:
        """Book the last step."""
        self.steps.settle()

    def facts(self) -> dict[str, object]:
        """For the report."""
        shapes = [[steps.rows, steps.tokens] for steps in self._verify if steps.refused is None]
        refused = next((steps.refused for steps in self._verify if steps.refused is not None), None)
        verify = {"shapes": shapes, "refused": refused, "steps": sum(steps.steps for steps in self._verify)}
        return self.steps.facts() | ({"verify": verify} if self._verify else {})

    def stop(self) -> None:
        """Nothing moves any more, and memory is given back. Safe to call twice, and after a failure in the middle of :meth:`record`."""
        for steps in self._captured:
            steps.stop()
        self._stack.close()

    @property
    def _cuda(self) -> CudaDevice:
        assert isinstance(self._copier, CudaDevice)
        return self._copier

    def _streaming(self, name: str, units: Sequence[Unit], host: HostSteps | None) -> GraphSteps:
        graph = CardPass(self._cuda, next((feed.graph for feed in self._feeds.values()), None))
        stream = self._card.recorded(graph, units)
        turns = SlotTurns(self._card.ring, stream, self._card.from_dram, graph, self._host.dram, self._copier)
        self._feeds[name] = _Feed(graph, stream, turns)
        steps = self._steps(self._feeds[name], host)
        self._capture(steps, self._rows)
        return steps

    def _steps(self, feed: _Feed, host: HostSteps | None) -> GraphSteps:
        return GraphSteps(
            self._fed.stepper, feed.graph, feed.stream, self._fed.rehearsal, self._fed.binder.fed_by, feed.turns, host, self._others
        )

    def _capture(self, steps: GraphSteps, rows: int, tokens: int = 1) -> None:
        self._captured.append(steps)
        longest_step(self._fed.stepper, rows, self._most_tokens, steps.capture, tokens)

    def _host_steps(self, rows: int, placement: Placement) -> HostSteps | None:
        """The CPU's units by ``placement``, for passes of so many rows; None where all are other ranks'."""
        if not placement.host_units:
            return None
        asked = placement.host_units
        if asked not in self._units:
            self._units[asked] = self._host.units_on_host(self._fed.model, asked)
        return HostSteps(self._pool, self._units[asked], rows, self._copier, self._host.ledger, in_turn=self._others is not None)

    @cached_property
    def _pool(self) -> HostPool:
        """The threads that compute units."""
        options = self._host.options
        pool = pool_here(options.host_threads, options.host_ahead_bytes, options.tell)
        self._stack.callback(pool.close)
        return pool
