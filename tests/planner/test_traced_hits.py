"""The curve of hits from a trace, and what two tiers keep of it together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.cost import predict
from planner.decisions import ExpertPolicyName
from planner.errors import UserError
from planner.hits import default_hit_rates, flaw
from planner.misses import SECOND_TIER
from planner.program import solve
from planner.schema import MoeConfig
from planner.traced_hits import with_hits
from tests.planner.small import GB, machine, model, work
from tests.planner.test_checkpoint import SHARED

replay = pytest.importorskip("planner.replay")
TRACE = SHARED.parent / "traces" / "tiny-mixtral.jsonl.xz"


def trace_file(directory: Path, choices: list[list[int]], phase: str = "decode", layers: int = 2) -> str:
    """Tokens that use the same experts in each layer."""
    path = directory / "trace.jsonl"
    rows = [{"prompt": 0, "phase": phase, "pos": i, "experts": [chosen] * layers} for i, chosen in enumerate(choices)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_without_a_trace_the_known_figures_of_the_policy_stand():
    m, curve = with_hits(model(experts=8), MoeConfig(policy=ExpertPolicyName.lru))
    assert m.experts.hit_rates == default_hit_rates(8, 2, ExpertPolicyName.lru) and curve is None
    assert with_hits(model(), MoeConfig()) == (model(), None)


def test_a_trace_gives_the_curve_and_the_plan_follows_it(tmp_path):
    """Tokens that use the same two experts find them all in two slots; those that take turns do not."""
    hardware, same, turns = machine(vram=GB), [[0, 1]] * 60, [[i % 8, (i + 1) % 8] for i in range(0, 120, 2)]
    steps = []
    for choices in (same, turns):
        m, curve = with_hits(model(experts=8), MoeConfig(traces=trace_file(tmp_path, choices)))
        assert not flaw(m.experts.hit_rates, 8) and curve == "mix on trace.jsonl"
        steps.append(predict(hardware, m, work(), solve(hardware, m, work())).decode_s_per_token)
    assert steps[0] < steps[1]


@pytest.mark.parametrize("phase, choices, policy, says", [
    ("decode", [[0, 1, 2]] * 3, None, "use 3 experts a layer, those of small 2"),
    ("decode", [[0, 8]] * 3, None, "trace.jsonl"),
    ("prefill", [[0, 1]] * 3, None, "no decode steps"),
    ("decode", [[0, 1]] * 3, ExpertPolicyName.lookahead, "moe.policy=lookahead: .* has no scores"),
])  # fmt: skip
def test_a_trace_that_does_not_suit_is_refused_in_one_line(phase, choices, policy, says, tmp_path):
    with pytest.raises(UserError, match=says) as refused:
        with_hits(model(experts=8), MoeConfig(traces=trace_file(tmp_path, choices, phase), policy=policy))
    assert "\n" not in str(refused.value)


def test_a_dense_model_has_no_use_for_a_trace(tmp_path):
    with pytest.raises(UserError, match="small has no routed experts"):
        with_hits(model(), MoeConfig(traces=trace_file(tmp_path, [[0, 1]])))


def missed_by_both(trace, policy: ExpertPolicyName, in_vram: int, in_dram: int) -> float:
    """Share of the experts visited that neither tier has, DRAM's policy observing what VRAM misses."""
    from planner.policy.experts import make_expert_policy

    def keep(judge, layer, held, used, slots):
        judge.observe(layer, used)
        worth = judge.worth(layer)
        return set(sorted(held | set(used), key=lambda e: (-worth[e], e))[:slots])

    judges = [make_expert_policy(policy, trace.layers, trace.count, trace.top_k) for _ in range(2)]
    kept = [[set() for _ in range(trace.layers)] for _ in range(2)]
    missed = 0
    for token in trace.experts[trace.decode].tolist():
        for layer, used in enumerate(token):
            vram = [e for e in used if e not in kept[0][layer]]
            missed += sum(e not in kept[1][layer] for e in vram)
            kept[0][layer] = keep(judges[0], layer, kept[0][layer], used, in_vram)
            if vram:
                kept[1][layer] = keep(judges[1], layer, kept[1][layer], vram, in_dram)
    return missed / trace.experts[trace.decode].size


@pytest.mark.skipif(not TRACE.exists(), reason="needs the shared trace")
@pytest.mark.parametrize("in_vram, in_dram", [(2, 4), (3, 3), (4, 2), (1, 5)])
def test_a_slot_of_the_smaller_tier_counts_for_half(in_vram, in_dram):
    from planner.traces import read_trace

    whole = read_trace(TRACE)
    trace = replace(whole, experts=whole.experts[:1500], prompt=whole.prompt[:1500], decode=whole.decode[:1500])
    one = replay.hit_curve(trace, ExpertPolicyName.mix)
    slots = max(in_vram, in_dram) + SECOND_TIER * min(in_vram, in_dram)
    expected, larger, both = (1 - np.interp(n, range(9), one) for n in (slots, max(in_vram, in_dram), in_vram + in_dram))
    missed = missed_by_both(trace, ExpertPolicyName.mix, in_vram, in_dram)
    assert both < missed < larger and missed == pytest.approx(expected, abs=0.02)
