"""The plan acted out: batch after batch, pass after pass, as long as nothing comes again exactly as it was."""

from __future__ import annotations

from functools import partial

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.simulate.acted import Acted, Options, Progress
from penstock.planner.simulate.lanes.wait import Wait
from penstock.planner.simulate.routers import Routers
from penstock.planner.simulate.simulated_engine import SimulatedEngine
from penstock.planner.simulate.simulated_work import Pass, passes_of
from penstock.planner.simulate.sums import acted_out

AHEAD_PASSES = 2
"""Passes at the end of a run of equal ones that are acted out if KV streams. KV then moves for the passes that follow, which have more of
it."""


class Simulation:
    """One plan, from the moment at which it has loaded, all batches of its workload one after the other.

    Time is in whole nanoseconds and returns to 0 after each pass. If the state at a pass's end equals an earlier one, and coming passes are
    as long, everything repeats. As many whole periods as fit are then added up.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options | None = None,
        progress: Progress = lambda done, of: None,
        routers: Routers | None = None,
    ):
        self._plan, self._progress = plan, progress
        self.engine = SimulatedEngine(plan, options or Options(), routers)
        self._record = self.engine.record

    def run(self) -> Acted:
        """Act it out. UserError where nothing can go on."""
        work, batch, engine = self._plan.workload, self._plan.decisions.batch, self.engine
        waves, rest = divmod(max(work.requests, batch), batch)
        self._steps = (waves + bool(rest)) * (work.new_tokens - 1)
        engine.fill()
        while engine.lanes.step():
            engine.settle()
        engine.rebased(engine.lanes.rebase())
        self._record.begin()
        acted_out(waves, 0, lambda: self._batch(batch), engine.stand)
        if rest:
            self._batch(rest)
        return engine.outcome()

    def _batch(self, batch: int) -> None:
        engine, runs = self.engine, passes_of(self._plan, self.engine.units, batch)
        engine.begin_batch(batch, runs)
        began = self._record.offset_ns
        for run in runs:
            if run.each.prefill:
                self._pass(run.each)
                if engine.passes.over == engine.passes.prompts:
                    self._record.prefill_ns.append(self._record.offset_ns - began)
                    self._record.passed("prefill", began)
            else:
                for wait in engine.attend():
                    self._await(wait)
                acted_out(run.count, AHEAD_PASSES if engine.streams_kv else 0, partial(self._step, run.each), engine.stand)

    def _step(self, each: Pass) -> None:
        began = self._record.offset_ns
        self._pass(each)
        self._record.step_ns.append(self._record.offset_ns - began)
        self._record.passed(f"decode {self.engine.passes.over - self.engine.passes.prompts}", began)
        self._progress(len(self._record.step_ns), self._steps)

    def _pass(self, each: Pass) -> None:
        """Every unit once."""
        engine = self.engine
        before = engine.begin_pass(each)
        for wait in engine.embed(each.before_ns):
            self._await(wait)
        for at in range(len(engine.units)):
            for wait in engine.visit(each, at):
                self._await(wait)
        engine.end_pass(each, before)
        engine.rebased(engine.lanes.rebase())

    def _await(self, wait: Wait) -> None:
        while True:
            self.engine.settle()
            if wait.ready():
                return
            if not self.engine.lanes.step():
                raise wait.stuck()
