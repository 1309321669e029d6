"""Plans that share missed experts between the link and the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import MissedExperts
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.prices.cost import predict
from penstock.planner.solver.program import search
from tests.planner.small import GB, MB, machine, model, work

MIXTRAL = replace(model(8, experts=8), model_type="mixtral")


def with_host(gbps: float, **changed: object) -> HardwareProfile:
    """A card of 600 MB, and a CPU that multiplies at ``gbps``."""
    host = HostRates(2, {"BF16": Curve(((1, gbps), (8, gbps)))}, 2e-5, 1.0, 1.0)
    return machine(vram=600 * MB, dram=4 * GB, host=host, **changed)


@pytest.mark.parametrize("gbps, said", [(0.5, MissedExperts.copied), (60.0, MissedExperts.split)])
def test_a_plan_takes_the_cpu_where_it_is_fast_enough(gbps: float, said: MissedExperts) -> None:
    """What the program promises of it is what is predicted."""
    hardware, forced = with_host(gbps), Force(expert_host=MissedExperts.copied)
    found, alone = (search(hardware, MIXTRAL, work(), force) for force in (Force(), forced))
    told, told_alone = (predict(hardware, MIXTRAL, work(), one.decisions) for one in (found, alone))
    assert found.decisions.experts is not None and found.decisions.experts.host is said
    assert told_alone.total_s - told.total_s == pytest.approx(alone.best_s - found.best_s, rel=0.01, abs=1e-6)
    if said is MissedExperts.split:
        assert told.decode_s_per_token < 0.8 * told_alone.decode_s_per_token and told.decode_stages["cpu"] > 0
    else:
        assert told == told_alone


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


@pytest.mark.parametrize("gbps", [20.0, 60.0])
@pytest.mark.parametrize("launch_s", [2e-4, 5e-3])
def test_experts_are_shared_only_where_the_whole_plan_is_no_slower(gbps: float, launch_s: float) -> None:
    """The CPU's part follows the card's, so a card that is busy with launches leaves it less to gain."""
    hardware = with_host(gbps, layer_launch_s=launch_s)
    best_s, *forced = (
        search(hardware, MIXTRAL, work(), force).best_s for force in (Force(), *(Force(expert_host=h) for h in MissedExperts))
    )
    assert best_s == pytest.approx(min(forced))
