"""A server over ranks says what each prompt alone is told, whoever shares its passes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.solver.drafts.draft_choice import drafted
from penstock.runtime.company.company import Company
from penstock.runtime.serve.wire.messages import Cancel
from tests.runtime.ranks.company import dealt_plan
from tests.runtime.serve.motors import alone, motor, submit
from tests.support import decisions, save_tiny


@pytest.mark.parametrize(
    ("drafter", "dealt"), [(Drafter.none, 2), (Drafter.lookup, 2), (Drafter.draft, 2), (Drafter.draft, (1, 5))], ids=str
)
def test_rows_join_share_prefixes_and_leave_over_ranks_as_on_one(
    drafter: Drafter, dealt: int | tuple[int, ...], company: Company, checkpoint: Path, tmp_path: Path
) -> None:
    exact_checkpoint = tmp_path / "exact"
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).save_pretrained(exact_checkpoint)
    draw = random.Random(1)
    stem = draw.choices(range(1, 300), k=40)
    made = decisions(batch=3, pages=24, prefill_chunk_tokens=8)
    plan = dealt_plan(exact_checkpoint, made, dealt, batch=3, prompt_tokens=64, new_tokens=32, requests=3)
    small = spec_from_checkpoint(save_tiny(tmp_path / "small", layers=1)) if drafter is Drafter.draft else None
    if drafter is not Drafter.none:
        plan = drafted(plan, Speculation(drafter, 4, 0.9, small))
    with motor(plan, exact_checkpoint, company=company) as served:
        asked = [submit(k, [*stem[: 8 * k], *draw.choices(range(1, 300), k=9)], 4 + 3 * k) for k in range(6)]
        served.front.say(*asked[:4])
        served.front.say(*asked[4:], Cancel(1))
        served.front.wait(*asked)
        for one in asked:
            said = served.front.requests[one.id].tokens[0]
            assert said == alone(served.served, one.prompt, one.new_tokens)[: len(said)]
            assert len(said) == one.new_tokens or one.id == 1
        chains = served.served.session.chains
        assert (chains is not None and int(str(chains.facts()["drafted"])) > 0) == (drafter is not Drafter.none)
