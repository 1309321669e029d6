"""Compute seconds of a pass, cut up by unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.planner.contract.decided.decisions import WeightForm
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.decided.recording import are_tabled
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import touched_experts
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.decoding import decode_s, unit_s
from penstock.planner.contract.prices.launches import OPERATIONS, are_grouped, serving_issue_s
from penstock.planner.contract.prices.stages import attended_s, between_products_s, packed
from penstock.planner.simulate.lanes.lanes import NS, ns


class Cut(NamedTuple):
    """Nanoseconds of compute, as :class:`penstock.planner.simulate.simulated_work.Pass` has them."""

    unit_ns: tuple[int, ...]
    unit_issued_ns: tuple[int, ...]
    expert_ns: int
    expert_issued_ns: int
    row_ns: float
    served_ns: int

    @property
    def not_hidden(self) -> Cut:
        """Where no launches go on while experts are copied."""
        return self._replace(unit_issued_ns=(0,) * len(self.unit_ns), expert_issued_ns=0)


class UnitShares:
    """Compute seconds of a pass, divided among its units. Launches are divided by operations. The rest is divided by seconds of reading or
    of products, whichever takes longer for the whole pass; a CPU's prompt by both, since these follow each other. Beside its products a
    card decodes what is coded, and does in each layer's attention what lies between them. The sum is that of
    ``penstock.planner.contract.prices.stages``. With slices of experts it is that of a rank's own layers: others' are computed alike."""

    def __init__(self, plan: Plan, units: tuple[Unit, ...], batch: int):
        self._plan, self._units, self._batch = plan, units, batch
        self._placement = plan.placement
        self._head_rows = batch

    def cut(
        self,
        device_s: float,
        issued_s: float,
        context: float,
        tokens: int,
        attended: frozenset[int] = frozenset(),
        recorded: bool = False,
        prompt: bool = False,
        beside_s: float = 0.0,
    ) -> Cut:
        """The pass has ``tokens`` tokens over all sequences. Each of them attends to ``context`` others on average, in layers ``attended``
        elsewhere. ``issued_s``: what issuing takes longer than the device's ``device_s``. What is ``recorded`` is launched with the next
        layer's experts. ``prompt``: whether the tokens are a prompt's. ``beside_s``: of all layers, the same in each, what the device takes
        besides; it is no expert's."""
        experts = self._plan.model.experts
        routed, touched = (len(self._plan.model.moe), touched_experts(experts, tokens)) if experts else (0, 1.0)
        work, work_each, work_row = self._work(context, tokens, routed, touched, attended, prompt)
        issue, issue_each = [self._operations(unit, tokens, recorded) for unit in self._units], 0
        if experts and recorded:
            issue_each = OPERATIONS.piece_each(tokens, are_tabled(self._plan.model, tokens))
        elif experts:
            issue_each = OPERATIONS.each(tokens, self._plan.hardware.gpu is not None, self._grouped(tokens))
        rows = tokens * experts.top_k if experts else 0
        by_work = device_s / (sum(work) + routed * (touched * work_each + rows * work_row))
        issues = sum(issue) + routed * touched * issue_each
        by_issue = issued_s / issues if issues else 0.0
        attending = [unit.kind == "attn" for unit in self._units]
        beside = [beside_s / sum(attending) if attends else 0.0 for attends in attending]
        unit_ns = tuple(ns(by_work * w + by_issue * i + b) for w, i, b in zip(work, issue, beside, strict=True))
        each_ns, issued_ns = ns(by_work * work_each + by_issue * issue_each), (*(ns(by_issue * i) for i in issue),)
        served_ns = ns(serving_issue_s(self._plan.hardware, self._plan.model, tokens))
        return Cut(unit_ns, issued_ns, each_ns, ns(by_issue * issue_each), by_work * work_row * NS, served_ns)

    def _work(
        self, context: float, tokens: int, routed: int, touched: float, attended: frozenset[int], prompt: bool
    ) -> tuple[list[float], float, float]:
        """Of each unit, of one of the ``touched`` experts of each of ``routed`` layers, and of a token in it: seconds of reading, or of
        products, of decoding beside them, and of what a card does between them. Of both, where a CPU computes a ``prompt``."""
        model, hardware, experts = self._plan.model, self._plan.hardware, self._plan.model.experts
        read_kv_s = attended_s(hardware, model, self._batch * context) / model.layers
        here = {unit for unit in self._units if unit.kind == "attn" and unit.layer not in attended}
        read = [self._product_s(unit_s, unit, tokens) + (read_kv_s if unit in here else 0.0) for unit in self._units]
        score_s = tokens * model.attention_flops(context) / model.layers / hardware.attention_tflops / 1e12
        flops = [
            2 * self._elements(unit) * (self._head_rows if unit.kind == "head" else tokens) / hardware.dense_tflops / 1e12
            + (score_s if unit in here else 0.0)
            for unit in self._units
        ]
        read_each, decode_each, row_s, rows = 0.0, 0.0, 0.0, 0
        if experts:
            expert, rows = model.of_kind(UnitKind.expert)[0], tokens * experts.top_k
            each_rows = max(1.0, rows / touched)
            read_each, row_s = unit_s(hardware, expert, each_rows), 2 * expert.elements / hardware.dense_tflops / 1e12
            decode_each = decode_s(hardware, expert, each_rows) if hardware.gpu else 0.0
        if hardware.gpu:
            between_s = between_products_s(hardware, model, tokens, int(prompt)) / model.layers
            for at, unit in enumerate(self._units):
                flops[at] += self._product_s(decode_s, unit, tokens) + (between_s if unit.kind == "attn" else 0.0)
        if prompt and hardware.gpu is None:
            times = packed(tokens)
            return [f * times + r for f, r in zip(flops, read, strict=True)], read_each, row_s * times
        if sum(read) + routed * touched * read_each > sum(flops) + routed * (touched * decode_each + rows * row_s):
            return read, read_each, 0.0
        return flops, decode_each, row_s

    def _operations(self, unit: Unit, tokens: int, recorded: bool) -> float:
        if unit.kind == "head":
            return 0.0
        if recorded:
            routed = unit.kind == "ffn" and unit.layer in self._plan.model.moe
            return OPERATIONS.piece_routing(tokens, are_tabled(self._plan.model, tokens)) if routed else 0.0
        marks = OPERATIONS.marks / 2 if self._plan.hardware.gpu else 0.0
        if unit.kind == "attn":
            return OPERATIONS.attention + marks
        if unit.layer not in self._plan.model.moe:
            return OPERATIONS.mlp + marks
        return OPERATIONS.routing(tokens, self._grouped(tokens)) + OPERATIONS.shared(self._plan.model.slices) + marks

    def _grouped(self, tokens: int) -> bool:
        return are_grouped(self._plan.hardware, self._plan.model, tokens)

    def _product_s(self, law: Callable[[HardwareProfile, UnitSpec, float], float], unit: Unit, tokens: int) -> float:
        """``law``'s seconds of a product of ``tokens`` rows with ``unit``, as it is kept."""
        spec = self._placement.spec(unit)
        kept = spec.decoded if self._placement.form(unit) is WeightForm.decoded else spec
        return law(self._plan.hardware, kept, tokens) / self._parts(unit)

    def _elements(self, unit: Unit) -> int:
        return self._placement.spec(unit).elements // self._parts(unit)

    def _parts(self, unit: Unit) -> int:
        return self._plan.decisions.weights.head_blocks if unit.kind == "head" else 1
