"""`runtime run kv.dir=DIR`: what one run computed, the next one reads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import ForceConfig
from penstock.planner.contract.decided.decisions import KvReuse
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.sizes import kept_page_bytes
from penstock.runtime.asked.kv_check import check_reuse
from penstock.runtime.asked.page_room import USUAL_STAGING_BYTES, fitted, left_dram_bytes, page_room
from penstock.runtime.asked.run_schema import ReuseConfig, Validation
from penstock.runtime.kv.disk.origin import pages_namespace, weights_digest
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.disk.page_writer import DiskWriter
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import put_in
from tests.runtime.kv.pages import flip
from tests.runtime.running import Desk, desk, solved
from tests.support import decisions, plan_for, save_tiny, workload

PAGE = 32
WORK = {"prompt_tokens": 100, "max_new_tokens": 4, "force": ForceConfig(page_tokens=PAGE)}
STEM = " ".join(f"def f{i}(x): return x + {i}" for i in range(12))
PROMPTS = [STEM + " def g", "import os", STEM + " class Shape(object): pass", STEM[:130]]


def reuse(directory: Path, **keys: Any) -> ReuseConfig:
    """A directory on a drive that is always fast enough."""
    return ReuseConfig(dir=str(directory), **{"read_gbps": 1e9} | keys)


def restored(report: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens from VRAM, DRAM and disk."""
    return tuple(report["kv_reuse"]["restored_tokens"].values())


@pytest.fixture
def here(own_checkpoint: Path, tmp_path: Path) -> Desk:
    (tmp_path / "desk").mkdir()
    return desk(tmp_path / "desk", plan_for(own_checkpoint, decisions(batch=2, pages=20), work=workload(prompt_tokens=100, requests=2)))


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    return tmp_path / "some pages=1"


def test_random_prompts_are_restored_by_the_next_run(here: Desk, kv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = here.run(**WORK)
    assert want["kv_reuse"] is None
    cold = here.run(**WORK, kv=reuse(kv))
    capsys.readouterr()
    warm = here.run(**WORK, kv=reuse(kv))
    assert cold["tokens"] == want["tokens"] == warm["tokens"]
    assert restored(cold) == (0, 0, 0) and cold["kv_reuse"]["pages_written"] == 6
    assert restored(warm) == (0, 0, 192) and warm["kv_reuse"]["computed_tokens"] == 8
    assert warm["kv_reuse"]["hit_rate"] == 0.96 and warm["kv_reuse"]["failures"] == 0
    assert warm["kv_reuse"]["restored_bytes"] == {"vram": 0, "dram": 0, "ssd": 6 * 6 * 4096}
    said = capsys.readouterr().out
    assert "KV reuse: 192 of 200 prompt tokens restored (96.0%), 8 computed; 192 found" in said and ", 0 declined" in said
    assert "KV kept: 0 tokens (0 pages written, 0 were there)" in said


@pytest.mark.parametrize("batch", [1, 2])
def test_texts_that_begin_alike_are_continued_as_without_reuse(shared_models: Path, tmp_path: Path, kv: Path, batch: int) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    bench = desk(tmp_path, solved(shared_models / "tiny-llama", batch=batch, prompt_tokens=260, new_tokens=12))
    work = {"prompts": str(tmp_path / "prompts.txt"), "force": ForceConfig(page_tokens=16)}
    want = bench.run(**work)
    cold = bench.run(**work, kv=reuse(kv))
    warm = bench.run(**work, kv=reuse(kv), validate=Validation.full)
    assert want["tokens"] == cold["tokens"] == warm["tokens"]
    assert sum(restored(warm)) > 100 and warm["kv_reuse"]["failures"] == 0
    assert warm["logits"]["within_rounding"]


def test_a_flipped_bit_changes_nothing_that_is_said(here: Desk, kv: Path, capfd: pytest.CaptureFixture[str]) -> None:
    want = here.run(**WORK, kv=reuse(kv))
    flip(kv / "segment-00000000.kv", 4096 + 77)
    capfd.readouterr()
    got = here.run(**WORK, kv=reuse(kv))
    assert got["tokens"] == want["tokens"] and got["kv_reuse"]["failures"] == 1
    assert capfd.readouterr().err.count("checksum") == 1


def test_other_weights_of_the_same_form_never_hit(here: Desk, own_checkpoint: Path, kv: Path, tmp_path: Path) -> None:
    """Their tensors have the same names, shapes and places, so the planner's digest is the same."""
    first = here.run(**WORK, kv=reuse(kv))
    other = save_tiny(tmp_path / "other", seed=1)
    shutil.copy(own_checkpoint / "config.json", other)
    want = here.run(**WORK, checkpoint=str(other))
    got = here.run(**WORK, checkpoint=str(other), kv=reuse(kv))
    assert restored(got) == (0, 0, 0) and got["tokens"] == want["tokens"] != first["tokens"]


def test_what_pages_depend_on_gives_them_another_namespace(own_checkpoint: Path, tmp_path: Path) -> None:
    digest, name = weights_digest(own_checkpoint), pages_namespace(own_checkpoint, "torch.bfloat16", PAGE)
    assert weights_digest(own_checkpoint) == digest and pages_namespace(own_checkpoint, "torch.bfloat16", PAGE) == name
    assert pages_namespace(own_checkpoint, "torch.float16", PAGE) != name != pages_namespace(own_checkpoint, "torch.bfloat16", 2 * PAGE)
    pack_checkpoint(own_checkpoint, tmp_path / "packed", None, False, lambda done, total: None)
    flip(own_checkpoint / "model.safetensors", (own_checkpoint / "model.safetensors").stat().st_size // 2)
    assert weights_digest(own_checkpoint) != digest
    packed = weights_digest(tmp_path / "packed")
    pack_checkpoint(own_checkpoint, tmp_path / "packed again", None, False, lambda done, total: None)
    assert weights_digest(tmp_path / "packed again") != packed


def test_pages_are_kept_where_there_is_a_card(checkpoint: Path, tmp_path: Path, kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, LockingCopier())
    work = workload(prompt_tokens=100)
    plan = plan_for(checkpoint, decisions(gpu=True, pages=20, prefill_chunk_tokens=PAGE), gpu=True, work=work)
    card = desk(tmp_path, plan)
    want = card.run(**WORK)
    cold, warm = card.run(**WORK, kv=reuse(kv)), card.run(**WORK, kv=reuse(kv))
    assert cold["tokens"] == want["tokens"] == warm["tokens"] and restored(warm) == (0, 0, 96)


def planned(plan: Plan, **pages: int) -> Plan:
    reuse_ = KvReuse(**{"vram_pages": 0, "dram_pages": 0, "ssd_bytes": 0} | pages)
    return replace(plan, decisions=replace(plan.decisions, kv=replace(plan.decisions.kv, page_tokens=PAGE, reuse=reuse_)))


def test_pages_that_are_planned_in_memory_need_no_directory(own_checkpoint: Path, tmp_path: Path) -> None:
    """The second round finds what the first one computed."""
    plan = plan_for(own_checkpoint, decisions(batch=2, pages=20), work=workload(prompt_tokens=100, requests=2))
    want = desk(tmp_path, plan).run(**WORK, rounds=2)
    got = desk(tmp_path, planned(plan, dram_pages=12)).run(**WORK, rounds=2)
    assert got["tokens"] == want["tokens"] and restored(got) == (0, 192, 0)
    assert got["kv_reuse"]["disk"] is None and got["kv_reuse"]["dram_pages"] == 12
    assert got["measured"]["dram_bytes"] > 12 * 6 * 4096


def test_a_card_keeps_planned_pages_in_vram(checkpoint: Path, tmp_path: Path, kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, LockingCopier())
    plan = plan_for(checkpoint, decisions(gpu=True, pages=20, prefill_chunk_tokens=PAGE), gpu=True, work=workload(prompt_tokens=100))
    want = desk(tmp_path, plan).run(**WORK, rounds=2)
    card = desk(tmp_path, planned(plan, dram_pages=4, vram_pages=2))
    for keys, there in (({}, (96, 0, 0)), ({"kv": reuse(kv)}, (96, 0, 0)), ({"kv": reuse(kv)}, (96, 0, 96))):
        got = card.run(**WORK, rounds=2, **keys)
        assert got["tokens"] == want["tokens"] and restored(got) == there


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"force": ForceConfig()}, "a page of 16 tokens is 2048 bytes a layer, a disk needs multiples of 4096; set force.page_tokens=32"),
        ({"limit_bytes": 1000}, "kv.limit_bytes=1000: two pages take 57344"),
        ({"staging_bytes": -1}, "kv.staging_bytes=-1"),
        ({"staging_bytes": 2 * 10**12}, "kv.dir: pages pass through 2 TB of DRAM, and the plan leaves "),
        ({"flush_s": -1.0}, "kv.flush_s=-1.0"),
        ({"read_gbps": 0.0}, "kv.read_gbps=0.0"),
    ],
)
def test_what_cannot_be_kept_is_refused(here: Desk, kv: Path, keys: dict[str, Any], said: str) -> None:
    force = keys.pop("force", WORK["force"])
    assert said in here.refusal(**WORK | {"force": force}, kv=reuse(kv, **keys))


def test_the_memory_that_pages_pass_through_is_of_the_budget_before_the_run(checkpoint: Path, kv: Path) -> None:
    plan = plan_for(checkpoint, decisions(batch=2, pages=20), work=workload(prompt_tokens=100))
    plan = replace(plan, decisions=replace(plan.decisions, kv=replace(plan.decisions.kv, page_tokens=PAGE)))
    page = kept_page_bytes(plan.model, plan.decisions.kv.page_tokens)
    taken = plan.hardware.dram_bytes - left_dram_bytes(plan)

    def with_left(left: int) -> Plan:
        return replace(plan, hardware=replace(plan.hardware, dram_bytes=taken + left))

    asked = ReuseConfig(dir=str(kv))
    assert page_room(fitted(asked, plan), plan).dram_bytes == USUAL_STAGING_BYTES // page * page
    tight = with_left(3 * page + 5)
    assert page_room(fitted(asked, tight), tight).dram_pages == 3
    with pytest.raises(UserError, match=f"leaves .* set kv.staging_bytes={3 * page + 5}, or solve again with workload.dram_reserve_bytes="):
        check_reuse(replace(asked, staging_bytes=4 * page), tight)
    with pytest.raises(UserError, match=f"; solve again with workload.dram_reserve_bytes={2 * page}$"):
        check_reuse(asked, with_left(page))


def test_a_directory_that_cannot_be_made_is_refused(here: Desk, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file is not a directory" in here.refusal(**WORK, kv=reuse(tmp_path / "file" / "kv"))


def test_a_second_writer_is_told_of_the_first(here: Desk, kv: Path) -> None:
    with DiskWriter(kv, PageShape(bytes(16), PAGE, 6, 4096), 64 << 20, 1 << 20):
        assert "process" in here.refusal(**WORK, kv=reuse(kv))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "dynamic rotary"),
    ],
)
def test_a_model_whose_pages_would_not_do_is_refused(own_checkpoint: Path, tmp_path: Path, kv: Path, change: dict, said: str) -> None:
    path = own_checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (tmp_path / "other desk").mkdir()
    other = desk(tmp_path / "other desk", plan_for(own_checkpoint, decisions(batch=2, pages=20), work=workload(prompt_tokens=100)))
    assert said in other.refusal(**WORK, kv=reuse(kv))


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_layers_with_a_sliding_window_are_restored(tmp_path: Path, kv: Path, model_type: str) -> None:
    checkpoint = save_tiny(tmp_path / "model", model_type, model_type == "gemma2", layers=4, sliding_window=24)
    (tmp_path / "desk").mkdir()
    here = desk(tmp_path / "desk", plan_for(checkpoint, decisions(batch=1, pages=10), work=workload(prompt_tokens=100)))
    work = {"prompt_tokens": 90, "batch": 1, "max_new_tokens": 8, "force": ForceConfig(page_tokens=32)}
    want = here.run(**work)
    here.run(**work, kv=reuse(kv))
    got = here.run(**work, kv=reuse(kv))
    assert got["tokens"] == want["tokens"]
    assert got["requests_total"]["restored_tokens"]["ssd"] == 64
