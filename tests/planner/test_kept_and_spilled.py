"""KV kept for prompts to come, where the running batch's may spill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.contract.decided.decisions import KvReuse
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.solver.program import solve
from tests.planner.small import MB, machine, model, work

SPILLING = work(batch=16, requests=16, prompt_tokens=4096, kv_spill=True)
KEEPING = replace(SPILLING, shared_prefix_tokens=2048, kept_tokens=4096)


@pytest.mark.parametrize(("vram", "dram"), [(0, 1400 * MB), (1600 * MB, 900 * MB)])
def test_where_kv_must_lie_on_the_ssd_no_pages_are_kept_beside_it(vram: int, dram: int) -> None:
    where = machine(vram, dram)
    made = solve(where, model(), KEEPING)
    assert made.kv.ssd_pages > 0 and made.kv.reuse == KvReuse()
    assert not broken_rules(where, model(), KEEPING, made)


def test_where_kv_leaves_vram_none_of_it_is_kept_there_for_prompts_that_could_not_use_it() -> None:
    where = machine(1600 * MB, 2000 * MB)
    made = solve(where, model(), KEEPING)
    assert made.kv.dram_pages > 0 and made.kv.reuse.dram_pages > 0 and made.kv.reuse.vram_pages == 0
    assert not broken_rules(where, model(), KEEPING, made)
