"""Kept pages of a dealt model: each rank keeps those of its layers, and a prefix is restored as far as all ranks have it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.planner.common.measures import ALIGN
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.company.company import Company
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler
from tests.runtime.kv.pages import flip
from tests.runtime.ranks.company import dealt_plan, opened
from tests.support import decisions

PAGE, PAGE_BYTES = 32, 4096
PROMPT = tuple((7 * i) % 251 + 1 for i in range(100))
WHOLE = 3 * PAGE


def run(checkpoint: Path, place: Path, count: int, company: Company | None) -> tuple[Generation, list[dict[str, Any]]]:
    """What is generated, and each rank's facts of what it kept."""
    made = decisions()
    plan = dealt_plan(checkpoint, replace(made, kv=replace(made.kv, page_tokens=PAGE)), count)
    reuse = ReuseConfig(dir=str(place), read_gbps=1e9)
    with opened(plan, checkpoint, company if count > 1 else None, reuse) as session:
        batch, sampler = Batch([PROMPT], 4, 1 << 20), Sampler(Sampling(), session.device)
        session.load(batch, samplers=[sampler])
        done = session.generate(batch, sampler, keep_logits=True)
        session.flush()
        reports = [] if session.rank is None else session.rank.reports()
        return done, [session.kept_facts(), *(report["kv_reuse"] for report in reports)]


def test_a_prefix_is_restored_as_far_as_every_rank_has_it_and_what_one_lost_is_computed_and_kept_again(
    company: Company, checkpoint: Path, tmp_path: Path
) -> None:
    alone, dealt = tmp_path / "alone", tmp_path / "dealt"

    def damage(folder: Path, layers: int) -> None:
        second = ALIGN + layers * PAGE_BYTES
        flip(folder / "segment-00000000.kv", second + ALIGN + 17)

    def compare(restored: int) -> list[dict[str, Any]]:
        """Both say the same bit for bit, each by what was kept by runs before."""
        want, (kept,) = run(checkpoint, alone, 1, None)
        got, ranks = run(checkpoint, dealt, 2, company)
        assert got.tokens == want.tokens and all(map(torch.equal, got.logits, want.logits))
        assert [sum(facts["restored_tokens"].values()) for facts in (kept, ranks[0])] == [restored, restored]
        return ranks

    cold = compare(0)
    assert [facts["pages_written"] for facts in cold] == [3, 3] and {facts["page_bytes"] for facts in cold} == {3 * PAGE_BYTES}
    damage(alone, 6)
    damage(dealt / "rank-1-of-2", 3)
    assert [facts["failures"] for facts in compare(PAGE)] == [0, 1]
    compare(WHOLE)
    for folder in (alone, dealt / "rank-1-of-2"):
        shutil.rmtree(folder)
    compare(0)
