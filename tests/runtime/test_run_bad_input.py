"""Whatever is wrong with what a run is given ends as one line that names it, before or in the middle, and leaves nothing behind."""

from __future__ import annotations

import ast
import errno
import inspect
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import rules
from planner.decisions import CachePolicy, ExpertSlots
from planner.schema import ForceConfig
from runtime import memory
from runtime import run as running
from runtime.progress import PhaseBar
from runtime.store import reader as reader_module
from runtime.store.manifest import MANIFEST, WEIGHTS, read_manifest
from runtime.store.pack import pack_checkpoint
from runtime.verbs import run_verb
from tests.runtime.running import Desk, desk, leaves_nothing_behind
from tests.support import decisions, plan_for, save_tiny, workload

SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("saved") / "sharded", shard="150kB")


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return shutil.copytree(saved, tmp_path / "a model=1")


@pytest.fixture
def here(checkpoint: Path, tmp_path: Path) -> Desk:
    (tmp_path / "desk").mkdir()
    return desk(tmp_path / "desk", plan_for(checkpoint, decisions()))


def damage(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


# The checkpoint


def test_a_missing_checkpoint_is_refused(here: Desk, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    assert str(checkpoint) in here.refusal() and "no such directory" in here.refusal()
    assert "elsewhere" in here.refusal(checkpoint=str(checkpoint.with_name("elsewhere")))


def test_a_missing_weights_file_is_refused(here: Desk, checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    assert SHARD in here.refusal()


def test_truncated_weights_are_refused(here: Desk, checkpoint: Path) -> None:
    os.truncate(checkpoint / SHARD, (checkpoint / SHARD).stat().st_size - 1)
    assert str(checkpoint / SHARD) in here.refusal() and "truncated" in here.refusal()


@pytest.mark.parametrize("junk", [b"\xff" * 8, b"\x00" * 8, b"\x40\x00\x00\x00\x00\x00\x00\x00}}}}"])
def test_a_corrupt_header_is_refused(here: Desk, checkpoint: Path, junk: bytes) -> None:
    damage(checkpoint / SHARD, 0, junk)
    assert str(checkpoint / SHARD) in here.refusal()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_corrupt_config_is_refused(here: Desk, checkpoint: Path, text: bytes) -> None:
    (checkpoint / "config.json").write_bytes(text)
    assert str(checkpoint / "config.json") in here.refusal()


def test_a_missing_shard_is_refused(sharded: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(sharded, tmp_path / "sharded")
    here = desk(tmp_path, plan_for(checkpoint, decisions()))
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    shard.unlink()
    assert str(shard) in here.refusal()


def test_a_corrupt_tokenizer_is_refused(here: Desk, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"model": ')
    assert "tokenizer" in here.refusal(prompt="hello")


def test_a_corrupt_generation_config_is_refused(here: Desk, checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text("{")
    assert "generation_config.json" in here.refusal()


def test_a_checkpoint_of_another_model_is_refused(here: Desk, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", layers=5)
    line = here.refusal(checkpoint=str(other))
    assert str(other) in line and "layers is 5, the plan says 6" in line and "model.checkpoint=" in line


def test_a_checkpoint_of_another_kind_is_refused(here: Desk, tmp_path: Path) -> None:
    assert "model_type is qwen3, the plan says llama" in here.refusal(checkpoint=str(save_tiny(tmp_path / "other", "qwen3")))


def test_a_checkpoint_of_the_same_shape_and_other_layout_is_refused(here: Desk, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", shard="150kB")
    assert "digests differ" in here.refusal(checkpoint=str(other))


def test_a_preset_without_weights_asks_for_a_checkpoint(here: Desk) -> None:
    plan = yaml.safe_load(here.plan.read_text())
    plan["model"]["checkpoint"] = plan["model"]["digest"] = None
    here.plan.write_text(yaml.safe_dump(plan))
    assert "checkpoint=DIR" in here.refusal()


# A packed store


@pytest.fixture(scope="module")
def packed_once(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "store"
    pack_checkpoint(saved, out, None, False, lambda done, total: None)
    return out


@pytest.fixture
def packed(packed_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed_once, tmp_path / "a store=1")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"penstock_pack": 2}'])
def test_a_corrupt_manifest_is_refused(here: Desk, packed: Path, text: str) -> None:
    (packed / MANIFEST).write_text(text)
    assert str(packed / MANIFEST) in here.refusal(checkpoint=str(packed))


def test_an_edited_manifest_is_refused(here: Desk, packed: Path) -> None:
    offset = str(read_manifest(packed).units[1].offset)
    (packed / MANIFEST).write_text((packed / MANIFEST).read_text().replace(offset, "8192", 1))
    assert "checksum" in here.refusal(checkpoint=str(packed))


def test_a_missing_manifest_or_weights_file_is_refused(here: Desk, packed: Path) -> None:
    (packed / WEIGHTS).rename(packed / "moved")
    assert str(packed / WEIGHTS) in here.refusal(checkpoint=str(packed))
    (packed / MANIFEST).unlink()
    assert str(packed) in here.refusal(checkpoint=str(packed))


def test_truncated_packed_weights_are_refused(here: Desk, packed: Path) -> None:
    os.truncate(packed / WEIGHTS, (packed / WEIGHTS).stat().st_size - 4096)
    assert "truncated" in here.refusal(checkpoint=str(packed))


# The plan


BREAK: list[tuple[dict[str, Any], str]] = [
    ({"weights.dram.prefetch_distance": 5}, "cap <= prefetch_distance <= hwm"),
    ({"weights.dram.hwm_layers": 3}, "hwm = cap + k, 3 <= k <= 10"),
    (dict.fromkeys(("weights.dram.cap_layers", "weights.dram.resident_layers", "weights.dram.prefetch_distance"), 7)
     | {"weights.dram.hwm_layers": 10}, "cap <= layers through DRAM"),
    ({"weights.dram.cap_layers": -1}, "weights.dram.cap_layers range"),
    ({"weights.dram.resident_layers": 3}, "resident_layers = cap under pinned, 0 under rolling"),
    ({"weights.vram.slots": 1}, "no VRAM ring without a GPU"),
    ({"weights.vram.resident_units.attn": 1}, "weights.vram.resident_units.attn range"),
    ({"weights.vram.resident_units.ffn": 1}, "weights.vram.resident_units.ffn range"),
    ({"weights.vram.resident_units.head": 1}, "weights.vram.resident_units.head range"),
    ({"weights.embedding": "vram"}, "embedding tier"),
    ({"weights.head_blocks": 2}, "weights.head_blocks range"),
    ({"weights.ssd.block_bytes": 4097}, "block multiple of 4096"),
    ({"weights.ssd.queue_depth": 0}, "weights.ssd.queue_depth range"),
    ({"weights.ssd.staging_bytes": 4096}, "staging >= block x queue depth"),
    ({"weights.h2d.chunk_bytes": 0}, "weights.h2d.chunk_bytes range"),
    ({"weights.h2d.in_flight": 0}, "weights.h2d.in_flight range"),
    ({"kv.page_tokens": 48}, "KV page size"),
    ({"kv.dram_pages": 1}, "KV pages for the workload"),
    ({"kv.dram_pages": -1}, "kv.dram_pages range"),
    ({"kv.vram_pages": 1}, "KV tier"),
    ({"kv.ssd_pages": 1}, "KV page size on SSD"),
    ({"batch": 0}, "batch range"),
    ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens range"),
    ({"experts": {"vram_slots": 0, "dram_slots": 8}}, "experts section"),
    ({"hardware.dram_bytes": 1 << 20}, "DRAM capacity"),
    ({"hardware.ssd_bytes": 1 << 10}, "SSD capacity"),
]
"""Edits, by dotted place in the plan's file, and the first rule that they break."""
BREAK_GPU: list[tuple[dict[str, Any], str]] = [
    ({"weights.vram.slots": 3}, "vram_slots >= vram_prefetch_distance + 2"),
    ({"weights.vram.prefetch_distance": -1}, "weights.vram.prefetch_distance range"),
    ({"weights.head_blocks": 1, "model.head_bytes": 1 << 20}, "head block <= FFN unit"),
    ({"hardware.vram_bytes": 1 << 20}, "VRAM capacity"),
]
"""The same of a plan with a GPU."""
BREAK_MOE: list[tuple[dict[str, Any], str]] = [({"experts.dram_slots": 3}, "expert slots")]


def set_in(plan: dict[str, Any], place: str, value: Any) -> None:
    *path, name = place.split(".")
    for key in path:
        plan = plan[key]
    plan[name] = value


def assert_refused_by_rule(here: Desk, edits: dict[str, Any], rule: str) -> None:
    plan = yaml.safe_load(here.plan.read_text())
    for place, value in edits.items():
        set_in(plan, place, value)
    here.plan.write_text(yaml.safe_dump(plan))
    line = here.refusal()
    assert f"breaks a rule ({rule})" in line and "allowed" in line


@pytest.mark.parametrize(("edits", "rule"), BREAK, ids=[rule for _, rule in BREAK])
def test_a_plan_edited_to_break_a_rule_is_refused_by_its_name(here: Desk, edits: dict[str, Any], rule: str) -> None:
    assert_refused_by_rule(here, edits, rule)


@pytest.mark.parametrize(("edits", "rule"), BREAK_GPU, ids=[rule for _, rule in BREAK_GPU])
def test_a_gpu_plan_edited_to_break_a_rule_is_refused_by_its_name(saved: Path, tmp_path: Path, edits: dict[str, Any], rule: str) -> None:
    assert_refused_by_rule(desk(tmp_path, plan_for(saved, decisions(gpu=True, head_blocks=2), gpu=True)), edits, rule)


@pytest.mark.parametrize(("edits", "rule"), BREAK_MOE, ids=[rule for _, rule in BREAK_MOE])
def test_a_moe_plan_edited_to_break_a_rule_is_refused_by_its_name(tmp_path: Path, edits: dict[str, Any], rule: str) -> None:
    made = replace(decisions(), experts=ExpertSlots(0, 16))
    here = desk(tmp_path, plan_for(save_tiny(tmp_path / "moe", "mixtral"), made))
    assert_refused_by_rule(here, edits, rule)


def test_no_rule_was_forgotten_above() -> None:
    """Every rule's name in the source is broken by one of the edits."""
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(rules))) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    named = {c.args[0] for c in calls if c.func.id == "BrokenRule"}
    literal = {n.value for n in named if isinstance(n, ast.Constant)}
    ranges = {c.args[0] for c in calls if c.func.id == "_range"}
    literal |= {f"{n.value} range" for n in ranges if isinstance(n, ast.Constant)}
    assert literal <= {rule for _, rule in (*BREAK, *BREAK_GPU, *BREAK_MOE)}


def test_a_plan_that_is_no_plan_is_refused(here: Desk) -> None:
    assert "planner solve" in here.refusal(plan=str(here.plan.with_name("missing.yaml")))
    assert str(here.plan.parent) in here.refusal(plan=str(here.plan.parent))
    here.plan.write_bytes(b"\x80\x81")
    assert str(here.plan) in here.refusal()


def test_a_forced_decision_that_breaks_a_rule_is_refused(here: Desk) -> None:
    assert "hwm = cap + k" in here.refusal(force=ForceConfig(hwm_layers=20))


def test_kv_that_spills_is_refused(here: Desk) -> None:
    plan = yaml.safe_load(here.plan.read_text())
    plan["workload"]["kv_spill"], plan["kv"] = True, {"page_tokens": 64, "vram_pages": 0, "dram_pages": 4, "ssd_pages": 4}
    here.plan.write_text(yaml.safe_dump(plan))
    assert "workload.kv_spill=false" in here.refusal()


def test_a_plan_for_a_gpu_is_refused_where_there_is_none(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "hardware=cpu" in desk(tmp_path, plan_for(saved, decisions(gpu=True, head_blocks=2), gpu=True)).refusal()


def test_a_plan_for_more_memory_than_is_free_is_refused(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory.memory_facts()
    monkeypatch.setattr(memory, "memory_facts", lambda: replace(real, mem_available=real.margin_bytes + 1_000_000, virtual=False))
    line = here.refusal()
    assert "of DRAM and 1 MB is free" in line and "hardware.dram_bytes=1000000" in line


# What is asked of a run


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"batch": 2}, "batch=2.*for 1 to 1.*workload.batch=2"),
        ({"batch": 0}, "batch=0.*1 to 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0.*1 to 1023 are allowed"),
        ({"max_new_tokens": 1024}, "max_new_tokens=1024.*1 to 1023 are allowed"),
        ({"prompt_tokens": 0}, "prompt_tokens=0.*1 or more"),
        ({"temperature": -1.0}, "temperature=-1.0.*0 .greedy. or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0.*above 0"),
        ({"top_p": 1.1}, "top_p=1.1.*at most 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=.*below"),
        ({"stop": ["a", ""]}, "stop.*empty"),
        ({"prompt": "a", "prompts": "b"}, "both given; choose one"),
        ({"prompt": "a"}, "no tokenizer.*random tokens"),
        ({"prompts": "nowhere=at all.txt"}, "prompts=nowhere=at all.txt.*one prompt a line"),
        ({"prompts": "."}, r"prompts=\.: cannot read it"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(here: Desk, keys: dict[str, Any], complaint: str) -> None:
    assert re.search(complaint, here.refusal(**keys))


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xff\xfe\x00"])
def test_a_prompts_file_without_prompts_is_refused(here: Desk, content: bytes) -> None:
    path = here.plan.with_name("prompts.txt")
    path.write_bytes(content)
    assert f"prompts={path}" in here.refusal(prompts=str(path))


def test_a_prompt_without_tokens_is_refused(shared_models: Path, tmp_path: Path) -> None:
    here = desk(tmp_path, plan_for(shared_models / "tiny-llama", decisions()))
    assert "has no tokens" in here.refusal(prompt="")


def test_a_place_that_cannot_be_written_is_refused_before_the_run(here: Desk) -> None:
    (here.plan.parent / "file").write_text("precious")
    assert "a directory" in here.refusal(out=str(here.plan.parent))
    assert "not a directory" in here.refusal(out=str(here.plan.parent / "file" / "run.json"))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write anywhere")
def test_no_permission_is_refused(here: Desk, checkpoint: Path) -> None:
    (checkpoint / SHARD).chmod(0)
    assert "Permission denied" in here.refusal()
    here.plan.chmod(0)
    assert "Permission denied" in here.refusal()


@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_a_directory_in_place_of_a_file_is_refused(here: Desk, checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    assert str(checkpoint / name) in here.refusal()


# In the middle of a run


class Wire:
    """``os.preadv`` of every pool, which goes wrong as a test says once the run generates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.broken: Callable[[int, Sequence[memoryview], int], int] | None = None
        self.failed_at: list[int] = []
        real_pool, real_preadv = reader_module.ReadPool.__init__, os.preadv

        def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
            if self.broken is None:
                return real_preadv(fd, views, offset)
            return self.broken(fd, views, offset)

        def pool(this: Any, *args: Any, **keys: Any) -> None:
            real_pool(this, *args, **keys, preadv=preadv)

        monkeypatch.setattr(reader_module.ReadPool, "__init__", pool)
        monkeypatch.setattr(reader_module, "BACK_OFF_S", (0.0, 0.0, 0.0))
        real_generate = running.generate

        def generate(*args: Any, **keys: Any) -> Any:
            self.broken = self._break
            return real_generate(*args, **keys)

        monkeypatch.setattr(running, "generate", generate)
        self.action: Callable[[int, Sequence[memoryview], int], int] = real_preadv

    def _break(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.failed_at.append(offset)
        return self.action(fd, views, offset)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def io_error(fd: int, views: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, "Input/output error")


def gone(fd: int, views: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.ENXIO, "No such device or address")


def ends(fd: int, views: Sequence[memoryview], offset: int) -> int:
    return 0


@pytest.mark.parametrize("policy", CachePolicy)
@pytest.mark.parametrize(("action", "tries", "problem"), [(io_error, 4, "Input/output error"), (ends, 4, "the file ends there")])
def test_a_read_that_keeps_failing_is_retried_then_ends_the_run_with_file_and_offset(
    saved: Path, tmp_path: Path, wire: Wire, action: Any, tries: int, problem: str, policy: CachePolicy
) -> None:
    wire.action = action
    here = desk(tmp_path, plan_for(saved, decisions(policy=policy)))
    line = here.refusal(max_new_tokens=8)
    assert str(saved / SHARD) in line and f"failed {tries} times ({problem})" in line
    offsets = [o for o in set(wire.failed_at) if f"at offset {o} " in line]
    assert offsets and wire.failed_at.count(offsets[0]) >= tries


def test_a_read_error_that_does_not_pass_ends_the_run_at_once(here: Desk, checkpoint: Path, wire: Wire) -> None:
    wire.action = gone
    line = here.refusal()
    assert str(checkpoint / SHARD) in line and "No such device" in line and "offset" in line


def test_reads_that_fail_once_are_retried_and_change_nothing(here: Desk, wire: Wire) -> None:
    real, calls = os.preadv, itertools.count()
    want = here.run()["tokens"]

    def flaky(fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Of every five reads one fails and one falls short."""
        turn = next(calls) % 5
        if turn == 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, [views[0][:4096]] if turn == 1 else views, offset)

    wire.action = flaky
    report = here.run()
    assert report["tokens"] == want and report["ssd"]["retries"] >= next(calls) // 5 > 0


def test_a_file_that_is_cut_during_the_run_ends_it_naming_the_file(here: Desk, checkpoint: Path, wire: Wire) -> None:
    real = os.preadv

    def cut(fd: int, views: Sequence[memoryview], offset: int) -> int:
        os.truncate(checkpoint / SHARD, 100_000)
        return real(fd, views, offset)

    wire.action = cut
    assert str(checkpoint / SHARD) in here.refusal()


def test_an_older_report_survives_a_run_that_fails(here: Desk, wire: Wire) -> None:
    here.out.write_text(json.dumps({"of": "yesterday"}))
    wire.action = io_error
    here.refusal()
    assert json.loads(here.out.read_text()) == {"of": "yesterday"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a bug"), MemoryError()])
def test_whatever_ends_a_run_in_the_middle_leaves_nothing_behind(
    here: Desk, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]
) -> None:
    def tell(self: Any, phase: str, done: int, total: int) -> None:
        if phase == "decode" and done == 2:
            raise error

    monkeypatch.setattr(PhaseBar, "__call__", tell)
    with leaves_nothing_behind(here.plan.parent), pytest.raises(error if isinstance(error, type) else type(error)):
        run_verb(here.config())


def test_a_run_that_succeeds_leaves_its_report_alone(here: Desk) -> None:
    with leaves_nothing_behind(here.plan.parent):
        here.run()
        here.out.unlink()


def test_spaces_and_equals_signs_in_every_path(shared_models: Path, tmp_path: Path) -> None:
    place = tmp_path / "a = b" / "c=d e"
    place.mkdir(parents=True)
    checkpoint = shutil.copytree(shared_models / "tiny-llama", place / "my model=x")
    (place / "the prompts=1.txt").write_text("def main():\n")
    here = desk(place, plan_for(checkpoint, decisions(), work=workload(new_tokens=4)))
    report = here.run(prompts=str(place / "the prompts=1.txt"), checkpoint=str(checkpoint), out=str(here.out))
    assert len(report["texts"]) == 1
