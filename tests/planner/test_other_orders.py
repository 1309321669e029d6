"""What explain offers where a checkpoint's numbers lie in another order than products read, or are computed with in F16."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import KNOWN_FORMATS, Dtype
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.explain import purchases as purchases_module
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import machine, model, work


def test_the_order_of_rows_is_offered_where_numbers_lie_in_another() -> None:
    plain = model(8)
    for name, rows in (("AWQ-128", "INT4-128-asym"), ("GPTQ8-row", "INT8-row-asym"), ("GPTQ4-64-order", None), ("INT4-128", None)):
        asked = Question(machine(), plain.stored_as(KNOWN_FORMATS[name]), work())
        found = next((offer.question.model for offer in purchases_module._in_rows(asked)), None)
        assert (found and {unit.format.name for unit in found.units}) == (rows and {rows, "BF16"})
        assert found is None or abs(found.weight_bytes / asked.model.weight_bytes - 1) < 0.02


def test_bf16_is_offered_for_f16_where_the_cpu_could_multiply() -> None:
    said = replace(model(8), ffn_activation="silu", compute_dtype=Dtype.float16, kv_dtype=Dtype.float16)
    halves = said.stored_as(KNOWN_FORMATS["AWQ-128"])
    host, other = (
        replace(machine(), host=HostRates(4, {name: Curve(((1, 50.0),))}, 2e-5, 0.9, 0.9, 0.0, 1e-4)) for name in ("INT4-128", "BF16")
    )
    for hardware, keys in ((machine(), ["rows"]), (host, ["rows", "bf16"]), (other, ["rows"])):
        found = {offer.key: offer.question.model for offer in purchases_module._in_rows(Question(hardware, halves, work()))}
        assert list(found) == keys and all(it.kv_dtype is it.compute_dtype for it in found.values())
        assert "bf16" not in found or {unit.format.name for unit in found["bf16"].units} == {"INT4-128-asym", "BF16"}
