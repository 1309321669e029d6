"""The benchmark of prefix reuse measures every tier and its bound, on the CPU and on a CPU that is taken for a card."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.kv_cases import fill_store, measured_restart, measured_ttft, measured_writeback
from bench.kv_reuse import ROWS, Request, run_case, show
from bench.kv_rig import Rig, opened
from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import KvReuse
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.runtime.memory.device import CopyDevice
from tests.cli import ROOT
from tests.runtime.fakes import LockingCopier
from tests.support import decisions, plan_for, save_tiny, workload

PAGE, PREFIX, TAIL = 32, 130, 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("kv bench") / "tiny")


def plan_of(checkpoint: Path, gpu: bool) -> Plan:
    made = decisions(gpu=gpu, pages=12, prefill_chunk_tokens=64)
    made = replace(made, kv=replace(made.kv, page_tokens=PAGE, reuse=KvReuse(5 if gpu else 0, 24, 0)))
    return plan_for(checkpoint, made, gpu=gpu, work=workload(prompt_tokens=PREFIX + TAIL, new_tokens=16))


@pytest.mark.parametrize("copier", [None, LockingCopier()], ids=["cpu", "card"])
def test_each_tier_is_measured_beside_its_bound(checkpoint: Path, tmp_path: Path, copier: CopyDevice | None) -> None:
    with opened(plan_of(checkpoint, copier is not None), checkpoint, tmp_path / "kv", copier, CPU) as rig:
        got = measured_ttft(rig, PREFIX, TAIL, repeats=2, seed=3)
    assert set(got["tiers"]) == {"dram", "ssd"} | ({"vram"} if copier else set())
    assert got["restored_tokens"] == 128 and got["restored_bytes"] == 4 * 6 * 4096 and got["pages_skipped"] == 0
    for tier, figures in got["tiers"].items():
        each = {name: len(samples) for name, samples in figures["each"].items()}
        assert each == {"ttft_s": 3, "tail_s": 3, "layer_launch_s": 3, "tier_gbps": 0 if tier == "vram" else 3}
        assert min(figures[name] for name in ("ttft_s", "predicted_s", "predicted_by_probe_s")) > 0
        moved_s = 0 if tier == "vram" else got["restored_bytes"] / 1e9 / figures["tier_gbps"]
        assert figures["bound_s"] == pytest.approx(moved_s + figures["tail_s"])
    assert len(list(ROWS["ttft"](PREFIX, got))) == len(got["tiers"])


@pytest.mark.parametrize("copier", [None, LockingCopier()], ids=["cpu", "card"])
def test_a_restart_reads_what_it_restores_and_nothing_else(checkpoint: Path, tmp_path: Path, copier: CopyDevice | None) -> None:
    plan = plan_of(checkpoint, copier is not None)
    with opened(plan, checkpoint, tmp_path / "kv", copier, CPU) as rig:
        written = fill_store(rig, PREFIX, 3 << 20, seed=3)
    assert written["skipped_write_error"] == 0 < written["written"]
    with opened(plan, checkpoint, tmp_path / "kv", copier, CPU) as rig:
        got = measured_restart(rig, PREFIX, TAIL, seed=3)
    assert got["read_bytes"] == got["restored_bytes"] == 4 * 6 * 4096
    assert 3 << 20 >= got["store_bytes"] > 2 << 20 and got["open_s"] > 0
    assert [row.ratio for row in ROWS["restart"](PREFIX, got)][1] == 1


@pytest.mark.parametrize("copier", [None, LockingCopier()], ids=["cpu", "card"])
def test_steps_are_timed_while_pages_are_copied_out(checkpoint: Path, tmp_path: Path, copier: CopyDevice | None) -> None:
    with opened(plan_of(checkpoint, copier is not None), checkpoint, tmp_path / "kv", copier, CPU) as rig:
        got = measured_writeback(rig, PREFIX, 8, repeats=2, seed=3)
    assert got["pages_captured"] == 4 and got["pages_skipped"] == 0 and 1 <= got["steps"] <= 7
    for spread in (*got["during"].values(), *got["without"].values(), got["finish_s"]):
        assert 0 < spread["least"] <= spread["median"] <= spread["most"]
    assert got["pages_at_the_end"]["most"] <= 4 and 0 < got["finish_share"]["most"] < 1
    assert got["finish_s"]["most"] < got["during"]["batch_s"]["most"]
    assert len(list(ROWS["writeback"](PREFIX, got))) == 2


def test_batches_with_and_without_write_back_alternate_in_an_order_that_is_drawn(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[bool] = []
    with opened(plan_of(checkpoint, False), checkpoint, tmp_path / "kv", None, CPU) as rig:
        own = Rig.generate
        monkeypatch.setattr(Rig, "generate", lambda *given: order.append(given[2] is not None) or own(*given))
        got = measured_writeback(rig, PREFIX, 3, repeats=4, seed=3)
    assert order[:2] == [False, True], "one of each warms up"
    assert sum(order[2:]) == 4 == len(order[2:]) - 4 == got["repeats"] and order[2:] not in ([True] * 4 + [False] * 4, [False, True] * 4)


def test_a_case_runs_in_a_process_of_its_own_and_fails_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    write_plan(plan_of(checkpoint, False), tmp_path / "plan.yaml")
    request = Request(tail_tokens=TAIL, new_tokens=4, repeats=1, store_bytes=1 << 20)
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    arguments = (tmp_path / "plan.yaml", request, checkpoint, tmp_path / "kv", PREFIX, env)
    got = run_case("writeback", *arguments)
    assert got["prefix_tokens"] == PREFIX and "message" not in got
    refused = run_case("ttft", tmp_path / "no plan.yaml", *arguments[1:])
    assert "no plan.yaml" in refused["message"]


def test_a_store_that_is_no_directory_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "kv file").write_text("")
    with pytest.raises(UserError, match="kv file"), opened(plan_of(checkpoint, False), checkpoint, tmp_path / "kv file", None, CPU):
        pass


def test_the_table_says_what_was_measured_and_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    without, during, at_end = ({"median": m, "least": 0.9 * m, "most": 1.1 * m} for m in (0.01, 0.0102, 0.5))
    got = {"pages_captured": 4, "steps": 3, "pages_skipped": 0, "repeats": 5, "finish_s": at_end, "finish_share": at_end}
    got |= {"during": {"step_s": during, "batch_s": at_end}, "without": {"step_s": without, "batch_s": at_end}}
    got["pages_at_the_end"] = {"median": 2}
    made = list(ROWS["writeback"](4096, got))
    where = {"gpu": None, "cores": 2, "dram_gb": 8.0, "date": "2026-01-01", "torch": "2", "transformers": "5"}
    rows = [{**vars(row), "ratio": row.ratio} for row in made]
    measured = [{"case": "ttft", "prefix_tokens": 4096, "message": "cut after 5 s (limit_s)"}]
    show({"machine": where, "work": {"checkpoint": "8b", "page_tokens": 64, "tail_tokens": 64}, "rows": rows, "measured": measured})
    out = capsys.readouterr().out
    assert "0.5000 s (50.0%) for 2 of 4 pages, 0.2500 s each" in out
    assert "decode during write-back" in out and "1.020" in out and "ttft with 4096 tokens: cut after 5 s" in out


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("prefix=1", "prefix: choose from .*did you mean prefix_tokens"),
        ("prefix_tokens=64,x", "prefix_tokens=x: must be a whole number"),
        ("prefix_tokens=64", "prefix_tokens=64: no full page of page_tokens=256"),
        ("cases=ttf", "cases=ttf: choose from ttft.*did you mean ttft"),
        ("store_bytes=much", "store_bytes=much: must be a size"),
        ("repeats=0", "repeats=0: must be a whole number, 1 or more"),
    ],
)
def test_a_wrong_key_or_value_is_told_in_one_line(argument: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        Request.read([argument])
    assert "\n" not in str(refused.value)


def test_the_command_ends_with_status_2_and_one_line() -> None:
    done = subprocess.run([sys.executable, "bench/kv_reuse.py", "nothing=1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("kv_reuse: nothing: choose from") and done.stderr.count("\n") == 1


def test_keys_are_read() -> None:
    keys = ["prefix_tokens=512,1024", "page_tokens=64", "cases=restart,ttft", "store_bytes=1GiB", "checkpoint=/c", "model=demo"]
    request = Request.read(keys)
    assert request.prefix_tokens == (512, 1024) and request.cases == ("restart", "ttft") and request.store_bytes == 1 << 30
    assert request.checkpoint == Path("/c") and request.model == "demo"
