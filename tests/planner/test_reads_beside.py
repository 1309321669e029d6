"""The CPU beside a card where memory is short and each pass reads some layers from the SSD: what presets promise is what is simulated."""

from __future__ import annotations

from statistics import fmean

import pytest

from penstock.planner.cli import PROGRAM
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.simulate.act import Simulation
from penstock.planner.solver.planning import make_plan

WORK = ("workload.new_tokens=32", "workload.context_tokens=2048")


def solved(hardware: str, model: str, *typed: str) -> Plan:
    return make_plan(PROGRAM.configuration("solve", [f"hardware={hardware}", f"model={model}", *WORK, *typed]))


@pytest.mark.parametrize(
    ("hardware", "model", "dram", "speculate", "gain"),
    [
        ("rtx4080", "qwen3-32b", "50GB", "none", 2.3),
        ("rtx5080", "llama70b", "120GiB", "none", 1.15),
        ("rtx4090", "llama70b", "116GB", "lookup", 2.1),
    ],
)
def test_presets_promise_what_is_simulated(hardware: str, model: str, dram: str, speculate: str, gain: float) -> None:
    """What the bus holds up while the drive reads is part of it. Steps that verify drafts have units of the CPU, too."""
    typed = f"hardware.dram_bytes={dram}", f"speculate={speculate}"
    plan, alone = (solved(hardware, model, *typed, *more) for more in ((), ("force.host_ffn=0",)))
    placement, record = plan.placement, Simulation(plan).run().record
    assert placement.ssd_layers and placement.host_units
    steps_s = fmean(record.step_ns) / 1e9
    assert plan.prediction.decode_s_per_token == pytest.approx(steps_s, rel=0.07)
    assert plan.prediction.ttft_s == pytest.approx(fmean(record.prefill_ns) / 1e9, rel=0.03)
    assert alone.prediction.decode_s_per_token > gain * steps_s
    assert record.counts["decode ssd bytes"] == pytest.approx(len(record.step_ns) * placement.ssd_bytes_per_pass, rel=0.02)


def test_no_unit_is_the_cpus_where_reading_takes_longer_than_copying() -> None:
    """There nothing would be gained, and the program has fewer numbers to find."""
    plan = solved("rtx4080", "llama70b", "hardware.dram_bytes=56GB")
    assert plan.prediction.bottleneck_decode == "ssd" and not plan.placement.host_units
