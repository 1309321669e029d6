"""What a run says of itself: its report, its last line and its log."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock.planner.contract.bills.cost import Prediction
from penstock.planner.contract.decided.decisions import CachePolicy, KvPages
from penstock.planner.contract.plan.planfile import read_plan
from penstock.runtime.memory.cuda import VramWatch
from penstock.runtime.told.busy import busy_line, busy_shares
from penstock.runtime.told.stage_clock import StageUse
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import put_in
from tests.runtime.running import Desk, desk
from tests.support import decisions, machine, plan_for, save_tiny, workload

SEED = Path(__file__).resolve().parents[3] / "shared" / "seeds" / "002_a25de60ddec25d1d.txt"
NOT_MEASURED = {"bottleneck_prefill", "bottleneck_decode", "prefill_stages", "decode_stages", "total_s", "restored_tokens", "restore_s"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("report"))


@pytest.fixture
def here(checkpoint: Path, tmp_path: Path) -> Desk:
    return desk(tmp_path, plan_for(checkpoint, decisions(cap=2, hwm=5, distance=4), work=workload(requests=2)))


def keys(value: object, path: str = "") -> set[str]:
    """Dotted names of everything in nested mappings."""
    if not isinstance(value, dict):
        return {path}
    return set().union(*(keys(v, f"{path}.{k}".lstrip(".")) for k, v in value.items()))


@pytest.mark.skipif(not SEED.exists(), reason="no ../shared/seeds beside this checkout")
def test_the_report_has_all_the_keys_of_the_seeds_benchmark(here: Desk) -> None:
    block = re.search(r"## JSON .*?```json\n(.*?)```", SEED.read_text(encoding="utf-8"), re.DOTALL)
    assert block
    wanted = json.loads(block.group(1))
    report = here.run()
    assert keys(wanted) <= keys(report)
    for key, example in wanted.items():
        if isinstance(example, int | float) and not isinstance(example, bool):
            assert isinstance(report[key], int | float) and report[key] > 0, key


def test_the_seeds_figures_agree_with_each_other(here: Desk) -> None:
    report = here.run()
    assert report["prompt_lens"] == [16, 16] and report["prefill_tokens_total"] == 32
    assert report["decode_tokens_total"] == sum(map(len, report["tokens"])) == 16
    assert report["e2e_ms"] == pytest.approx(report["prefill_ms"] + report["first_token_decode_ms"] + report["decode_ms"])
    assert report["ttft_ms"] == pytest.approx((report["prefill_ms"] + report["first_token_decode_ms"]) / 2)
    assert report["throughput_tok_s"] == pytest.approx(14 / report["decode_ms"] * 1e3)
    assert report["end_to_end_tok_s"] == pytest.approx(16 / report["e2e_ms"] * 1e3)


def test_every_predicted_figure_is_measured_and_compared(here: Desk) -> None:
    report = here.run()
    figures = {name for name in Prediction.__dataclass_fields__} - NOT_MEASURED
    assert figures <= set(report["measured"]) and figures == set(report["ratio"])
    for name in figures:
        predicted, measured = report["predicted"][name], report["measured"][name]
        assert report["ratio"][name] == (pytest.approx(predicted / measured) if measured else 1.0), name
    assert {"bottleneck_prefill", "bottleneck_decode"} <= set(report["measured"])
    assert set(report["predicted"]) == set(asdict(Prediction(*[0] * len(Prediction.__dataclass_fields__))))


def test_stages_and_counters_add_up(here: Desk) -> None:
    report = here.run()
    ssd = report["stages"]["decode"]["ssd"]
    assert ssd["mbps"] == pytest.approx(ssd["bytes"] / ssd["busy_s"] / 1e6) == report["io_bw_MBps"]["weight_ssd_MBps"]
    steps = len(report["step_s"])
    assert steps == 14 and report["measured"]["ssd_bytes_per_token"] == round(ssd["bytes"] / steps)
    assert report["ratio"]["ssd_bytes_per_token"] == pytest.approx(1, abs=0.35), "4 of 6 layers a token, and the pages at their edges"
    assert all(report["stages"][phase]["compute"]["busy_s"] > 0 for phase in ("prefill", "decode"))
    moved = report["step_bytes"]["ssd"]
    assert len(moved) == steps and min(moved) > 0 and ssd["bytes"] - max(moved) <= sum(moved) <= ssd["bytes"]
    cache = report["cache"]
    assert cache["hits"] + cache["misses"] == cache["accesses"] == 6 * (2 + steps)
    assert cache["loads"] > 4 * (1 + steps) and cache["peak_layers"] == 5 <= 5
    assert cache["evictions_in_window"] == 0 < cache["evictions_out_of_window"]
    assert {"waits", "wait_s", "shrinks"} <= set(cache) and report["ssd"]["retries"] == 0 and report["rules_broken"] == []
    assert (report["mode"], report["device"], report["wsm"]["ssd_enabled"]) == ("mixed", "cpu", True)
    assert set(report["versions"]) == {"python", "torch", "transformers"}


def test_each_resource_has_its_share_of_the_time(here: Desk) -> None:
    hardware = machine(gpu=True, dram_bus_gbps=10.0)
    stages = {"compute": StageUse(0, 1.0), "h2d": StageUse(12 * 10**9, 3.0), "cpu": StageUse(6 * 10**9, 2.0), "d2h": StageUse(10**9, 0.1)}
    assert busy_shares(stages, 4.0, hardware) == {"card": 0.25, "link": 0.75, "cpu": 0.5, "bus": pytest.approx(1.9 / 4), "ssd": 0.0}
    assert (
        busy_line("decode", busy_shares(stages, 4.0, hardware)) == "decode: busy card 25.0%, link 75.0%, CPU 50.0%, bus 47.5% of the time"
    )
    assert busy_shares(stages, 4.0, machine(gpu=True, dram_bus_gbps=0.0))["bus"] is None
    assert busy_shares(stages, 0.5, machine()) == {"cpu": 1.0, "bus": None, "ssd": 0.0}, "the CPU is what computes"
    told = here.run()["busy"]
    assert set(told) == {"prefill", "decode"} and 0 < told["decode"]["ssd"] <= 1 and 0 < told["decode"]["cpu"] <= 1


@pytest.mark.parametrize("resident", [(2, 2, 0), (6, 6, 1)], ids=["weights stream, too", "weights stay"])
def test_weights_and_kv_on_the_link_are_counted_apart(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: tuple[int, int, int]
) -> None:
    put_in(monkeypatch, LockingCopier())
    through_dram = {} if resident == (2, 2, 0) else {"cap": 0, "hwm": 3, "distance": 0, "slots": 2, "vram_distance": 0}
    made = decisions(gpu=True, resident=resident, head_blocks=1, **through_dram)
    plan = plan_for(checkpoint, replace(made, kv=KvPages(64, 2, 4, 0)), True, workload(kv_spill=True))
    report = desk(tmp_path, plan).run()
    assert report["rules_broken"] == []
    decode, rates = report["stages"]["decode"], report["io_bw_MBps"]
    kv = decode["h2d.kv"]
    assert 0 < kv["bytes"] <= decode["h2d"]["bytes"] and rates["kv_h2d_MBps"] == kv["mbps"] > 0 and rates["kv_d2h_MBps"] > 0
    assert round(decode["h2d"]["bytes"] / len(report["step_s"])) == report["measured"]["h2d_bytes_per_token"], "the link's bytes are both"
    streamed = decode["h2d"]["bytes"] > kv["bytes"]
    assert streamed == (resident == (2, 2, 0)) == (rates["weight_h2d_MBps"] is not None) == report["wsm"]["enabled"]


def test_stdout_ends_with_one_json_line(here: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    report = here.run()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["report"] == str(here.out)
    assert line["decode_s_per_token"] == report["measured"]["decode_s_per_token"] and line["rules_broken"] == []


def test_one_token_has_no_decode_figures_and_no_false_ones(here: Desk) -> None:
    report = here.run(max_new_tokens=1)
    assert report["measured"]["decode_s_per_token"] is None and report["ratio"]["decode_s_per_token"] is None
    assert report["throughput_tok_s"] is None and report["step_s"] == []
    assert "NaN" not in here.out.read_text() and "Infinity" not in here.out.read_text()


def test_an_older_report_is_replaced_and_a_new_directory_is_made(here: Desk) -> None:
    here.out.write_text("old")
    assert here.run(max_new_tokens=2)["max_new_tokens"] == 2
    new = here.plan.parent / "deep" / "er = er" / "run.json"
    here.run(max_new_tokens=2, out=str(new))
    assert json.loads(new.read_text())["max_new_tokens"] == 2 and [new] == list(new.parent.iterdir())


def test_the_verbose_log_names_each_load_and_eviction(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rolling = decisions(policy=CachePolicy.rolling, cap=1, hwm=4, distance=3)
    report = desk(tmp_path, plan_for(checkpoint, rolling)).run(verbose=True)
    out = capsys.readouterr().out
    cache = report["cache"]

    def said(pattern: str) -> int:
        return len(re.findall(rf"^\[penstock\] {pattern}$", out, re.MULTILINE))

    assert cache["loads"] - 4 <= said(r"loaded layer \d+ to DRAM cache") <= cache["loads"], "the last four may still be on their way"
    assert said(r"evict \(out of window\): layer \d+") == cache["evictions_out_of_window"] > 0
    assert said(r"DRAM cache shrink: current=\d+, count=4") == cache["shrinks"] > 0


def test_without_verbose_there_is_no_log(here: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    here.run()
    assert "[penstock]" not in capsys.readouterr().out


@pytest.mark.parametrize("times", [0, 231])
def test_vram_that_is_asked_of_the_driver_in_the_middle_is_said(
    here: Desk, times: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VramWatch, "facts", lambda watch: {"allocations_after_warmup": times})
    assert here.run()["allocations_after_warmup"] == times
    assert ("asked for VRAM 231 times after the start" in capsys.readouterr().out) == (times > 0)


def test_notes_of_the_plan_and_of_the_environment_are_said_once(here: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    here.edit("\nweights:", "\nnotes:\n  - WSM_X applied\n\nweights:")
    here.run(notes=["WSM_X applied", "WSM_Y is ignored"])
    out = capsys.readouterr().out
    assert out.count("WSM_X applied") == out.count("WSM_Y is ignored") == 1


def test_a_run_says_that_it_compares_no_packed_store_with_its_checksums(
    here: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, packed = read_plan(here.plan), tmp_path / "packed"
    here.run()
    assert "checksums" not in capsys.readouterr().out
    pack_checkpoint(Path(plan.model.checkpoint or ""), packed, None, False, lambda done, total: None)
    here.run(checkpoint=str(packed))
    said = re.sub(r"\s", "", capsys.readouterr().out)
    assert f"{packed}isnotcomparedwithitschecksums;`runtimeverify{packed}`doesthat" in said
