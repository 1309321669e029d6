"""Plans that share missed experts between the link and the CPU."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import MissedExperts
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.simulate.act import Simulation
from penstock.planner.solver.program import search
from tests.planner.small import GB, MB, machine, model, work

MIXTRAL = replace(model(8, experts=8), model_type="mixtral")


def with_host(gbps: float, **changed: object) -> HardwareProfile:
    """A card of 600 MB, and a CPU that multiplies at ``gbps``."""
    host = HostRates(2, {"BF16": Curve(((1, gbps), (8, gbps)))}, 2e-5, 1.0, 1.0)
    return machine(vram=600 * MB, dram=4 * GB, host=host, **changed)


def test_the_cpu_takes_a_share_where_that_is_faster() -> None:
    """What the program promises of it is what is predicted."""
    hardware, force = with_host(60.0), Force(expert_host=MissedExperts.copied)
    found, alone = (search(hardware, MIXTRAL, work(), one) for one in (Force(), force))
    told, told_alone = (predict(hardware, MIXTRAL, work(), one.decisions) for one in (found, alone))
    assert found.decisions.experts is not None and found.decisions.experts.host is MissedExperts.split
    assert told_alone.total_s - told.total_s == pytest.approx(alone.best_s - found.best_s, rel=0.02)
    assert told.decode_s_per_token < 0.8 * told_alone.decode_s_per_token and told.decode_stages["cpu"] > 0


@pytest.mark.parametrize(
    "hardware, changed, why",
    [
        (machine(vram=600 * MB, dram=4 * GB), {}, "not measured"),
        (machine(vram=0, dram=4 * GB), {}, "no GPU"),
        (with_host(60.0), {"model_type": "llama4_text"}, "does not compute this model's experts"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_its_reason(hardware: HardwareProfile, changed: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        search(hardware, replace(MIXTRAL, **changed), work(), Force(expert_host=MissedExperts.split))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gbps", [0.5, 4.0, 12.0, 60.0])
def test_the_plans_own_way_is_within_three_percent_of_the_better_one(gbps: float, batch: int) -> None:
    """As both are simulated, by the runtime's own policies; none where the CPU is slow."""
    hardware, work_ = with_host(gbps), work(batch=batch, requests=batch, new_tokens=48)
    took, own = {}, search(hardware, MIXTRAL, work_).decisions
    for way in MissedExperts:
        made = search(hardware, MIXTRAL, work_, Force(expert_host=way)).decisions
        steps = Simulation(Plan(hardware, MIXTRAL, work_, made, predict(hardware, MIXTRAL, work_, made))).run().record.step_ns
        took[way] = fmean(steps[8:])
    assert own.experts is not None and took[own.experts.host] <= 1.03 * min(took.values()), took
    assert gbps > 0.5 or own.experts.host is MissedExperts.copied
