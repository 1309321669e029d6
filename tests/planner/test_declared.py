"""A decision is declared once: its key, its help, its rule, its words and its neighbours follow from its field."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import pytest

from penstock.planner.common.command.known_keys import keys_of
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.decided.allowed import OneOf, Span
from penstock.planner.contract.decided.decision import Decision
from penstock.planner.contract.decided.decisions import CachePolicy
from penstock.planner.contract.decided.declared import DECLARED, FORCED, Declared, _walk
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.setting import Setting
from penstock.planner.explain.neighbours import candidates
from penstock.planner.render.decided import decided
from penstock.planner.solver.program import solve
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, machine, model, work

QUESTION = Question(machine(vram=GB, dram=GB), model(16, experts=8), work(), Force())
MADE = solve(QUESTION.hardware, QUESTION.model, QUESTION.workload)
THROUGH_DRAM = solve(machine(vram=0, dram=GB), QUESTION.model, QUESTION.workload)
"""Layers pass through the DRAM cache: where none does it is not shown."""
SETTING_OF = partial(Setting, QUESTION.hardware, QUESTION.model)
SETTING = SETTING_OF(MADE)


@pytest.mark.parametrize("one", DECLARED, ids=lambda one: one.place)
def test_a_decision_is_put_where_it_is_read_and_what_the_program_decides_is_allowed(one: Declared) -> None:
    value = one.of(MADE)
    assert value in SETTING.allowed(one) and one.put(MADE, value) is MADE
    other = next(iter(SETTING.allowed(one).beside(value)), None)
    assert other is None or one.of(one.put(MADE, other)) == other


@pytest.mark.parametrize("one", [one for one in DECLARED if isinstance(SETTING.allowed(one), Span)], ids=lambda one: one.place)
def test_a_number_beyond_its_bounds_breaks_the_rule_of_its_decision(one: Declared) -> None:
    allowed = SETTING.allowed(one)
    for outside in [allowed.least - 1] + ([] if allowed.most is None else [allowed.most + 1]):
        found = {rule.name: rule for rule in SETTING_OF(one.put(MADE, outside)).broken()}
        rule = found[allowed.rule_of(outside, one.place)]
        assert rule.message.startswith(f"{one.place}={outside}; allowed: {allowed.words}")


@pytest.mark.parametrize("one", FORCED.values(), ids=lambda one: one.key)
def test_a_decision_that_can_be_fixed_is_a_key_with_its_docstring_and_is_shown(one: Declared) -> None:
    key = keys_of(SolveConfig)[one.key]
    assert (key.owner, key.field, key.kind) == (one.owner, one.field, one.kind)
    assert key.doc and key.optional and key.default is None
    elsewhere = {"KV kept", "CPU", "attention", "parts", "prompts", "drafts"}
    assert one.how.row in {row for d in (MADE, THROUGH_DRAM) for row, _, _ in decided(plan(d))} | elsewhere


def test_the_program_tries_the_values_beside_each_decision_that_it_weighs() -> None:
    tried = {name for name, _, _ in candidates(QUESTION, MADE)}
    weighed = {name for name, one in FORCED.items() if one.how.weighed}
    assert tried <= weighed and {"policy", "resident_ffn", "hwm_layers", "expert_dram_slots", "prefill_chunk_tokens"} <= tried


def test_what_is_shown_changes_with_the_decision() -> None:
    fixed = Force(queue_depth=MADE.weights.ssd.queue_depth + 1)
    before, after = (dict((row, words) for row, words, _ in decided(plan(d))) for d in (MADE, fixed.apply(MADE, 16)))
    assert {row for row, words in before.items() if after[row] != words} == {"SSD reads"}


def test_a_field_without_a_declaration_is_refused() -> None:
    @dataclass
    class Forgotten:
        said: Annotated[int, Decision(Span())]
        size: int

    globals()["Forgotten"] = Forgotten
    with pytest.raises(TypeError, match=r"Forgotten\.size is declared by no Decision"):
        list(_walk(Forgotten, ""))


def test_a_decision_that_is_none_cannot_be_fixed() -> None:
    for attempt in (lambda: Force(cap_layer=3), lambda: Force().but(cap_layer=3)):
        with pytest.raises(TypeError, match="cap_layer: no such decision; did you mean cap_layers"):
            attempt()
    with pytest.raises(AttributeError, match="cap_layer: no such decision"):
        _ = Force().cap_layer


def test_what_follows_a_fixed_decision_moves_along() -> None:
    cache = MADE.weights.dram
    moved = Force(cap_layers=cache.cap_layers - 1).apply(MADE, 16).weights.dram
    assert (moved.hwm_layers, moved.resident_layers) == (cache.hwm_layers - 1, cache.cap_layers - 1)
    assert Force(cap_layers=cache.cap_layers - 1, hwm_layers=cache.hwm_layers).apply(MADE, 16).weights.dram.hwm_layers == cache.hwm_layers
    assert Force(policy=CachePolicy.rolling).apply(MADE, 16).weights.dram.resident_layers == 0
    assert Force(block_bytes=2**20, queue_depth=3).apply(MADE, 16).weights.ssd.staging_bytes == 3 * 2**20


@pytest.mark.parametrize(
    ("allowed", "value", "words", "nearest", "beside"),
    [
        (Span(0, 4), 5, "0 to 4", 4, [3]),
        (Span(3), 1, "3 or more", 3, [4]),
        (Span(0, 0), 2, "0", 0, []),
        (Span(4096, multiple=4096), 5000, "multiples of 4096, 4096 or more", 4096, [8192]),
        (Span(3, 9, also=(0,), step=4), 11, "3 to 9 or 0", 9, [5]),
        (OneOf((16, 32, 64)), 50, "16, 32, 64", 64, [32]),
        (OneOf(("vram", "dram")), "ssd", "vram, dram", "vram", ["dram"]),
    ],
)
def test_what_is_not_allowed_is_told_with_the_nearest_that_is(
    allowed: Span | OneOf, value: int, words: str, nearest: int, beside: list[int]
) -> None:
    assert value not in allowed and allowed.words == words
    assert allowed.nearest(value) == nearest and nearest in allowed and allowed.beside(nearest) == beside


def plan(decisions) -> Plan:
    q = QUESTION
    return Plan(q.hardware, q.model, q.workload, decisions, predict(q.hardware, q.model, q.workload, decisions))


def test_a_forced_neighbour_is_what_the_program_then_decides() -> None:
    name, _, value = next(found for found in candidates(QUESTION, MADE) if found[0] == "queue_depth")
    forced = replace(QUESTION, force=QUESTION.force.but(**{name: value}))
    assert solve(forced.hardware, forced.model, forced.workload, forced.force).weights.ssd.queue_depth == value
