"""What a run takes before it knows its model: as much as it will need, in threads that end with it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import arena_bytes
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.memory import free_memory as memory
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.memory.free_memory import Free, PeakDram, refuse_if_short
from penstock.runtime.memory.ground import OpenCard
from penstock.runtime.memory.groundwork import Groundwork
from penstock.runtime.tools.pack import pack_checkpoint
from tests.cli import HANGS_S, ROOT
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import put_in
from tests.runtime.running import Desk
from tests.support import decisions, plan_for, save_tiny

CPU = torch.device("cpu")
MIB = 1 << 20
BATCH = Batch(prompts=[[5, 9, 200]], max_new_tokens=3, chunk_tokens=1 << 20)

GEOMETRIES = [*itertools.product(("llama", "qwen3", "mixtral", "qwen3_moe"), (False,)), ("llama", True), ("gemma3_text", True)]
TWO_TIERS = [
    decisions(),
    decisions(cap=6, hwm=9, distance=6),
    decisions(cap=0, hwm=3, distance=2),
    decisions(policy=CachePolicy.rolling),
]
THREE_TIERS = [
    decisions(gpu=True),
    decisions(gpu=True, resident=(1, 4, 1), head_blocks=3, slots=6, vram_distance=3),
    decisions(gpu=True, resident=(3, 2, 0), embedding=Tier.vram, head_blocks=2),
    decisions(gpu=True, resident=(6, 6, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0),
]


class Enough(Exception):
    """A session has asked for its arena."""


class Asked(OpenCard):
    """Gives no arena: what is asked for is all that matters."""

    def arena(self, nbytes: int) -> Arena:
        raise Enough(nbytes)


def need(plan: Plan, checkpoint: Path) -> int:
    """Bytes of the arena that a session asks for."""
    with pytest.raises(Enough) as asked, open_session(plan, checkpoint, Asked(None, CPU)):
        pass
    return asked.value.args[0]


@pytest.mark.parametrize(("model_type", "tied"), GEOMETRIES)
@pytest.mark.parametrize("form", ["one file", "shards", "packed"])
def test_the_plan_tells_the_arena_that_any_checkpoint_of_its_geometry_needs(tmp_path: Path, model_type: str, tied: bool, form: str) -> None:
    path = save_tiny(tmp_path / "model", model_type, tied, shard="70KB" if form == "shards" else "50GB")
    assert form != "shards" or len(list(path.glob("*.safetensors"))) > 6, "no layer lies in several files"
    if form == "packed":
        pack_checkpoint(path, tmp_path / "packed", None, False, lambda done, total: None)
        path = tmp_path / "packed"
    for gpu, made in [*((False, d) for d in TWO_TIERS), *((True, d) for d in THREE_TIERS)]:
        plan = plan_for(path, made, gpu)
        told, needed = arena_bytes(plan.hardware, plan.model, plan.decisions), need(plan, path)
        assert needed <= told <= needed + slack(plan), (gpu, made)


def slack(plan: Plan) -> int:
    """Pages that the plan allows for beside bytes: some for each slot of a layer or an expert, table, head block and norm."""
    slots = plan.placement.dram_slots + (plan.decisions.experts.dram_slots if plan.decisions.experts else 0)
    return (8 * slots + 4 * (plan.model.layers + 1) * 2 + 4 * plan.decisions.weights.head_blocks + 16) * 4096


def test_a_checkpoint_that_needs_more_than_its_plan_tells_is_run_all_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, on_a_card: Desk
) -> None:
    usual = on_a_card.run(max_new_tokens=3)
    copier = LockingCopier()
    put_in(monkeypatch, copier)
    monkeypatch.setattr("penstock.runtime.memory.groundwork.arena_bytes", lambda *_: MIB)
    report = on_a_card.run(max_new_tokens=3)
    assert report["tokens"] == usual["tokens"] and report["arena"]["bytes"] > MIB
    assert report["arena"]["page_locked_bytes"] == report["arena"]["bytes"] and not copier.held


def test_memory_that_is_not_free_is_refused_before_any_is_taken(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = memory.memory_facts()
    little = replace(facts, mem_available=facts.margin_bytes + MIB, mem_total=facts.mem_total, virtual=False)
    monkeypatch.setattr(memory, "memory_facts", lambda: little)
    monkeypatch.setattr("penstock.runtime.memory.groundwork.Arena", lambda nbytes: pytest.fail("DRAM was taken"))
    with pytest.raises(UserError, match="of DRAM and 1.05 MB is free"), Groundwork.of(plan_for(checkpoint, decisions())):
        pass


def test_dram_is_taken_without_torch_and_given_back(checkpoint: Path, tmp_path: Path) -> None:
    from penstock.planner.contract.plan.planfile import write_plan

    write_plan(plan_for(checkpoint, decisions(gpu=True), gpu=True), tmp_path / "plan.yaml")
    code = (
        "import sys; from pathlib import Path; from penstock.planner.contract.plan.planfile import read_plan\n"
        "from penstock.runtime.memory.groundwork import Groundwork\n"
        "from penstock.runtime.memory.free_memory import _status; import threading\n"
        f"plan = read_plan(Path({str(tmp_path / 'plan.yaml')!r})); before = _status()['RssAnon']\n"
        "with Groundwork.of(plan) as ground:\n"
        "    arena = ground.arena(0); held = _status()['RssAnon'] - before; print(arena.nbytes <= held + (8 << 20))\n"
        "print(_status()['RssAnon'] - before < arena.nbytes // 2, threading.active_count())\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stdout.splitlines() == ["True", "True 1", "set()"]


def test_an_error_of_the_card_is_raised_where_the_card_is_waited_for(on_a_card: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Plan, device: torch.device) -> None:
        raise UserError("the card is broken; replace it")

    monkeypatch.setattr("penstock.runtime.memory.cuda.open_cuda", broken)
    assert on_a_card.refusal() == "the card is broken; replace it"


def test_a_start_begins_with_its_process() -> None:
    code = "from penstock.runtime.told.startup import Startup; print(Startup().so_far_s)"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) <= time.monotonic() - begun + 0.02, "ticks are of 10 ms"


def test_the_report_says_what_the_start_took_and_what_went_on_beside_it(on_a_card: Desk) -> None:
    report = on_a_card.run(max_new_tokens=3)
    phases = ["imports", "skeleton", "arena", "cuda", "engine", "rehearsal", "load", "room", "prefill"]
    assert list(report["start_s"]) == phases and all(s >= 0 for s in report["start_s"].values())
    beside, nbytes = report["start_beside_s"], report["start_beside_bytes"]
    assert set(beside) == {"fault_in", "page_lock", "cuda", "page_cache", "ssd", "h2d"}
    assert nbytes["fault_in"] == nbytes["page_lock"] == report["arena"]["bytes"]
    assert nbytes["h2d"] > 0 and nbytes.get("page_cache", 0) + nbytes.get("ssd", 0) >= nbytes["h2d"]


def test_dram_that_was_held_before_counts_at_its_peak() -> None:
    arena = Arena(64 * MIB)
    arena.occupy()
    try:
        assert 64 * MIB <= PeakDram(arena.nbytes).peak_bytes() < 96 * MIB
    finally:
        arena.close()


def test_an_arena_is_resident_only_between_its_beginning_and_its_end() -> None:
    arena = Arena(200 * MIB)
    before = memory._status()["RssAnon"]
    arena.begin()
    arena.wait()
    assert memory._status()["RssAnon"] - before > 190 * MIB and arena.fault_s > 0
    arena.close()
    assert memory._status()["RssAnon"] - before < 10 * MIB
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock-dram")]


def test_free_vram_is_asked_of_a_card_alone(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    refuse_if_short(Budget.of(plan), Free(1 << 40))
    with pytest.raises(UserError, match="end the other process"):
        refuse_if_short(Budget.of(plan), Free(1 << 40, 1, 1 << 40))


@pytest.mark.parametrize("gpu", [False, True])
def test_reading_may_begin_before_there_is_a_card(checkpoint: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, order = HostSide.begin_reading, []

    def begin_and_end(host: HostSide) -> None:
        begin(host)
        for arrival, _ in host.reads:
            arrival.wait()
        order.append("read")

    class Card(OpenCard):
        def copier(self) -> CopyDevice | None:
            order.append("card")
            return super().copier()

    monkeypatch.setattr(HostSide, "begin_reading", begin_and_end)
    made: Decisions = decisions(gpu=gpu, resident=(1, 1, 0) if gpu else (0, 0, 0))
    plan = plan_for(checkpoint, made, gpu)
    copier, results = LockingCopier() if gpu else None, []
    for early in (True, False):
        order.clear()
        with open_session(plan, checkpoint, Card(copier, CPU), read_at_once=early) as session:
            assert order == (["read", "card"] if early else ["card"])
            session.load(BATCH)
            results.append(session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True))
    assert not gpu or not copier.held
    assert all(torch.equal(a, b) for a, b in zip(results[0].logits, results[1].logits, strict=True))
