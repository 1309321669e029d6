"""Every row of the table of mechanisms does the same work, and leaves out what it says."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench.handicaps import CASES, Measured, huge_page_bytes, measure, residents_first, small_pages
from bench.mechanisms import Request, Row, present, run_row
from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.generate import Batch
from tests.runtime.fakes import LockingCopier
from tests.support import decisions, plan_for, save_tiny

BATCH = Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=5, capacity=64, chunk_tokens=1 << 20)
STREAMED = ("synchronous", "asynchronous", "prefetch", "locked")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("mechanisms") / "tiny")


@pytest.fixture(scope="module")
def plan(checkpoint: Path) -> Plan:
    return plan_for(checkpoint, decisions(gpu=True, resident=(2, 2, 0), cap=4, hwm=7, distance=4), gpu=True)


@pytest.fixture(scope="module")
def rows(checkpoint: Path, plan: Plan) -> dict[str, Measured]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: measure(case, plan, checkpoint, LockingCopier(), torch.device("cpu"), BATCH) for name, case in CASES.items()}
    finally:
        torch.set_num_threads(threads)


def test_every_row_generates_the_same_tokens(rows: dict[str, Measured]) -> None:
    assert len({str(row.tokens) for row in rows.values()}) == 1
    assert all(len(row.step_s) == 4 and row.prefill_s > 0 and row.limit_gbps > 0 for row in rows.values())


def test_only_the_lower_rows_copy_from_pageable_memory(rows: dict[str, Measured]) -> None:
    assert {name for name, row in rows.items() if row.locked_share == 0} == {"synchronous", "asynchronous", "prefetch"}
    assert all(row.locked_share in (0, 1) for row in rows.values())


def test_the_host_stands_still_for_every_unit_where_nothing_is_ahead_and_for_every_copy_where_copies_are_synchronous(
    rows: dict[str, Measured], plan: Plan
) -> None:
    units = len(plan.placement.units)
    assert rows["asynchronous"].waits_per_pass == units
    assert rows["synchronous"].waits_per_pass >= 2 * units
    assert rows["prefetch"].waits_per_pass < units


def test_residents_take_the_same_bytes_off_the_link_wherever_they_lie(rows: dict[str, Measured], plan: Plan) -> None:
    residents, everything = plan.placement.vram_resident_bytes, sum(plan.placement.unit_bytes(u) for u, _ in plan.placement.units)
    for name, row in rows.items():
        assert row.resident_bytes == (0 if name in STREAMED else residents)
        assert row.h2d_bytes_per_token == pytest.approx(everything - row.resident_bytes, rel=0.3)
    assert residents > 0


def test_residents_of_the_first_layers_are_as_many_as_in_the_plan(plan: Plan) -> None:
    first = residents_first(plan).placement
    for tiers, solved in ((first.attn, plan.placement.attn), (first.ffn, plan.placement.ffn)):
        assert tiers == (Tier.vram,) * 2 + (Tier.dram,) * 4 and sorted(solved) == sorted(tiers) and solved != tiers


def test_huge_pages_can_be_left_out() -> None:
    def huge(nbytes: int = 64 << 20) -> int:
        before = huge_page_bytes()
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.write(bytes(nbytes))
            return huge_page_bytes() - before

    if huge() < 32 << 20:
        pytest.skip("this kernel gives no huge pages")
    with small_pages():
        assert huge() < 32 << 20
    assert huge() >= 32 << 20


def test_a_plan_that_reads_the_ssd_is_refused(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    with pytest.raises(UserError, match="fits in DRAM"):
        measure(CASES["spread"], plan, checkpoint, LockingCopier(), torch.device("cpu"), BATCH)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "checkpoint: missing"),
        (["checkpoint=x", "promt_tokens=5"], "did you mean prompt_tokens?"),
        (["checkpoint=x", "rows=spred"], "did you mean spread?"),
        (["checkpoint=x", "vram_bytes=much"], "must be a size such as 6GiB"),
        (["checkpoint=x", "new_tokens=1"], "must be a whole number, 2 or more"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        Request.read(arguments)
    assert says in str(error.value)


def test_a_row_that_fails_stands_in_the_table_with_its_message(checkpoint: Path, tmp_path: Path) -> None:
    request = Request(checkpoint)
    row = run_row("spread", tmp_path / "missing.yaml", request, os.environ)
    assert row.measured is None and "no such file" in row.message
    assert run_row("spread", tmp_path / "missing.yaml", replace(request, limit_s=0), os.environ).message == "cut after 0 s (limit_s)"


def test_the_document_becomes_a_table_a_picture_and_one_line(
    rows: dict[str, Measured], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [Row(name, measured=replace(row, prefill_s=3.0, step_s=[0.5])) for name, row in rows.items()]
    lines[0] = replace(lines[0], measured=replace(lines[0].measured, step_s=[2.0]))
    lines[3] = Row("locked", "cut after 300 s (limit_s)")
    document = {
        "machine": {"gpu": "a card", "cores": 4, "dram_gb": 64.0, "date": "2026-01-01", "torch": "2.11", "transformers": "5.17"},
        "work": {"checkpoint": "8b", "checkpoint_bytes": 16 * 10**9, "vram_bytes": 6 << 30, "prompt_tokens": 2048, "new_tokens": 8},
        "rows": [asdict(line) for line in lines],
    }
    out = tmp_path / "mechanisms.json"
    present(json.loads(json.dumps(document)), out)
    said = capsys.readouterr().out
    for words in ("a card, 4 cores", "4.00", "+ page-locked arena: cut after 300 s", "prompt 2048", "VRAM budget 6.44 GB"):
        assert words in said
    assert json.loads(said.splitlines()[-1])["decode_s"]["synchronous"] == 2.0
    if importlib.util.find_spec("matplotlib"):
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "draw it where matplotlib is" in said
