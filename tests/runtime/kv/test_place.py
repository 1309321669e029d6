"""Where pages are kept when nobody says where, and what is said when a drive is too slow for them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.kv_place import directory
from penstock.runtime.kv.pages.advice import advice, needed_gbps
from penstock.runtime.kv.pages.worth import Worth
from tests.cli import command, refusal
from tests.runtime.kv.pages import open_writer, put
from tests.support import decisions, machine, plan_for, save_tiny, workload

PLACE = Path("/data/pages")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Prompts of 300 tokens, computed in five passes."""
    checkpoint = save_tiny(tmp_path_factory.mktemp("place"))
    made = decisions(batch=2, pages=40, prefill_chunk_tokens=64)
    return plan_for(checkpoint, made, work=workload(prompt_tokens=300, batch=2))


def test_auto_is_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert directory("auto") == tmp_path / ".cache" / "penstock" / "kv"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert directory("auto") == tmp_path / "elsewhere" / "penstock" / "kv"
    assert directory("~/auto") == tmp_path / "auto" and directory("./auto") == Path("auto")


def test_the_verb_looks_there_when_told_no_directory(tmp_path: Path) -> None:
    there = tmp_path / "penstock" / "kv"
    assert f"{there}: cannot be read" in refusal("runtime", "kv", "list", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    with open_writer(there) as writer:
        put(writer, 0, 1)
    done = command("runtime", "kv", "list", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and f"{there}: 2 pages" in done.stdout


def restoring_pays(plan: Plan, read_gbps: float) -> bool:
    """With any full pages at all of the plan's prompts."""
    batch, length = plan.decisions.batch, plan.workload.prompt_tokens
    starts = range(plan.decisions.kv.page_tokens, length, plan.decisions.kv.page_tokens)
    worth = Worth(plan, read_gbps)
    whole_s = worth.prefill_s([length] * batch, [0] * batch)
    pages = {start: {Tier.ssd: batch * start // plan.decisions.kv.page_tokens} for start in starts}
    return any(worth.restore_s(pages[start]) < whole_s - worth.prefill_s([length] * batch, [start] * batch) for start in starts)


@pytest.mark.parametrize("chunk", [16, 50, 64, 299, 1 << 20])
@pytest.mark.parametrize("tflops", [1e-4, 1e-2, 0.2])
def test_the_rate_that_is_needed_is_the_least_at_which_restoring_pays(plan: Plan, chunk: int, tflops: float) -> None:
    made = replace(plan.decisions, prefill_chunk_tokens=chunk)
    plan = replace(plan, decisions=made, hardware=machine(cpu_dense_tflops=tflops))
    need = needed_gbps(plan, 2, 300)
    assert not math.isinf(need)
    assert restoring_pays(plan, need * 1.001) and not restoring_pays(plan, need * 0.999)


def test_a_drive_that_is_too_slow_is_warned_of_with_rate_need_and_remedy(plan: Plan) -> None:
    need = needed_gbps(plan, 2, 300)
    assert advice(PLACE, plan, need * 1.01) is None
    line = advice(PLACE, plan, need / 2)
    assert f"kv.dir={PLACE} reads {need / 2:.3g} GB/s" in line and "prompt of 300 tokens" in line
    assert f"above {need:.3g} GB/s" in line and "name a directory on a faster, local drive" in line


def test_where_no_drive_is_fast_enough_that_is_said(plan: Plan) -> None:
    """One pass over weights from a slow SSD takes as long for one token as for all."""
    slow = machine(cpu_dense_tflops=1e3, ssd_read=tuple(replace(point, gbps=1e-3) for point in plan.hardware.ssd_read))
    streamed = replace(plan, hardware=slow, decisions=replace(plan.decisions, prefill_chunk_tokens=1 << 20))
    assert math.isinf(needed_gbps(streamed, 2, 300)) and not restoring_pays(streamed, 1e9)
    assert "from no drive" in advice(PLACE, streamed, 100.0)
    assert math.isinf(needed_gbps(plan, 2, plan.decisions.kv.page_tokens)), "its last token is always computed"
