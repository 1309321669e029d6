"""On a real card: a decode step recorded as one graph with its copies, says what its kernels say one after the other."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=24, chunk_tokens=1 << 20, limits=[24, 9, 17])
STAYS = {"cap": 6, "hwm": 9, "distance": 6}
"""All that is not resident lies in DRAM for good."""
PLACES = {
    "resident": {"resident": (6, 6, 1), "embedding": Tier.vram, "cap": 0, "hwm": 3, "distance": 0},
    "half streams": {"resident": (3, 3, 1), **STAYS},
    "all streams": {"resident": (0, 0, 0), "head_blocks": 3, **STAYS},
    "one streams": {"resident": (6, 5, 1), **STAYS},
    "many slots": {"resident": (1, 1, 0), "slots": 8, "vram_distance": 6, **STAYS},
    "one slot for FFN": {"resident": (2, 1, 0), "head_blocks": 3, "ffn_slots": 1, **STAYS},
    "some on the CPU": {"resident": (3, 1, 1), **STAYS},
    "one slot for FFN, and some on the CPU": {"resident": (3, 1, 0), "head_blocks": 3, "ffn_slots": 1, **STAYS},
    "some of the head on the CPU": {"resident": (3, 3, 1), "head_blocks": 4, **STAYS},
    "all of the head on the CPU": {"resident": (3, 3, 0), "head_blocks": 3, **STAYS},
}
NONE = HostUnits()
ON_CPU = {
    "some on the CPU": HostUnits(ffn=3, rows=4),
    "one slot for FFN, and some on the CPU": HostUnits(ffn=3, rows=4),
    "some of the head on the CPU": HostUnits(ffn=1, rows=4, head=2),
    "all of the head on the CPU": HostUnits(ffn=0, rows=4, head=3),
}
RATES = HostRates(2, {"BF16": Curve(((1, 50.0), (16, 40.0)))}, 1e-5, 0.8, 0.8)


def generate(checkpoint: Path, graphs: bool, host: HostUnits = NONE, **made: object) -> tuple[list[Generation], dict]:
    taken = decisions(gpu=True, **made)
    plan = plan_for(checkpoint, taken, gpu=True)
    taken = replace(plan.decisions, weights=replace(plan.decisions.weights, host=host))
    plan = replace(plan, hardware=replace(plan.hardware, host=RATES), decisions=taken)
    with opened(plan, checkpoint, CudaDevice(0), CARD, graphs=graphs) as session:
        session.load(BATCH)
        batches = BATCH, replace(BATCH, prompts=[[7, 8], [9] * 33, [1, 2, 3]]), BATCH
        found = [session.generate(batch, Sampler(Sampling(), CARD), keep_logits=True) for batch in batches]
        assert found[0].tokens == found[2].tokens
        session.engine.stop()
        assert min(session.engine.rehearse(BATCH)) > 0
        copied = plan.placement.step_units if host.count and graphs else plan.placement.streamed_units
        facts = {**session.engine.facts(), "stages": session.engine.stage_totals(), "bytes": sum(map(plan.placement.unit_bytes, copied))}
        return found, facts


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
def test_a_recorded_step_says_what_its_kernels_say(tmp_path: Path, model_type: str, where: str) -> None:
    if where != "resident" and model_type != "llama":
        pytest.skip("what streams is not the family's")
    checkpoint = save_tiny(tmp_path, model_type)
    wanted, without = generate(checkpoint, graphs=False, **PLACES[where])
    host = ON_CPU.get(where, NONE)
    found, facts = generate(checkpoint, graphs=True, host=host, **PLACES[where])
    assert {"rows": 3, "refused": None, "steps": 69}.items() <= facts["graphs"].items() and without["graphs"] is None
    if facts["bytes"]:
        assert facts["stages"]["h2d"][0] >= 69 * facts["bytes"] and facts["stages"]["h2d"][1] > 0
    assert ("cpu" in facts["stages"]) == bool(host.count)
    for got, want in zip(found, wanted, strict=True):
        assert got.tokens == want.tokens
        for a, b in zip(got.logits, want.logits, strict=True):
            assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)


def test_steps_that_try_a_unit_more_and_fewer_on_the_cpu_say_the_same(tmp_path: Path) -> None:
    checkpoint, where = save_tiny(tmp_path, "llama"), PLACES["some on the CPU"]
    wanted, _ = generate(checkpoint, graphs=False, **where)
    found, facts = generate(checkpoint, graphs=True, host=HostUnits(ffn=2, rows=4, near=1), **where)
    followed = facts["graphs"]["schedules"]["steps"]
    assert {"the plan's", "1 ffn on the CPU", "3 ffn on the CPU"} <= set(followed) and sum(followed.values()) <= 69
    for got, want in zip(found, wanted, strict=True):
        assert got.tokens == want.tokens
        for a, b in zip(got.logits, want.logits, strict=True):
            assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)


FULL = """
import sys

import torch

from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.recorded.card_pass import CardPass
from penstock.runtime.recorded.card_pieces import CardPieces

card, held = CudaDevice(0), []
graph, pieces = CardPass(card), CardPieces(card.device)
whole = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + (32 << 20)) / whole)
try:
    while True:
        held.append(torch.empty(1 << 20, dtype=torch.uint8, device=card.device))
except torch.OutOfMemoryError:
    pass
for record in (lambda: graph.recording().__enter__(), lambda: pieces.record(lambda: held[0] + 1)):
    try:
        record()
        sys.exit("recorded")
    except torch.OutOfMemoryError:
        print("refused")
graph.close()
pieces.close()
held.clear()
print(float(pieces.record(lambda: torch.ones(1, device=card.device)).numel()))
"""


def test_a_step_that_finds_no_room_to_be_recorded_is_refused_and_the_process_goes_on() -> None:
    """torch 2.11 ends the process when a graph is dropped that found no room for its seeds."""
    found = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["refused", "refused", "1.0"]


def test_a_plan_whose_link_binds_by_far_has_its_steps_launched_unless_the_user_records_them(tmp_path: Path) -> None:
    checkpoint, made = save_tiny(tmp_path, "llama"), {}
    plan = plan_for(checkpoint, decisions(gpu=True, **PLACES["half streams"]), gpu=True)
    assert plan.hardware.gpu is not None
    card = replace(plan.hardware.gpu, layer_kernels_s=1e-5)
    plan = replace(plan, hardware=replace(plan.hardware, gpu=card, layer_launch_s=1e-12))
    for graphs in (None, True):
        with opened(plan, checkpoint, CudaDevice(0), CARD, graphs=graphs) as session:
            session.load(BATCH)
            tokens = session.generate(BATCH, Sampler(Sampling(), CARD)).tokens
            made[graphs] = tokens, session.engine.facts()["graphs"], session.launched
    assert made[None][1:] == (None, None), "launched, and nobody need be told"
    assert made[True][1]["steps"] == 23 and made[True][2] is None
    assert made[None][0] == made[True][0]


@pytest.mark.parametrize("where", ["resident", "half streams", "some on the CPU", "some of the head on the CPU"])
def test_recorded_chains_say_what_their_kernels_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Of any lengths, alone and together, with passes of one token between them: recorded passes of both shapes go on from each other."""
    checkpoint, found = save_tiny(tmp_path, "llama"), []
    for graphs in (False, True):
        draw = random.Random(3)
        monkeypatch.setattr(ChainLength, "choose", lambda length, draw=draw: draw.choice([0, 1, length.most]))
        taken = decisions(gpu=True, batch=3, **PLACES[where])
        plan = plan_for(checkpoint, taken, gpu=True)
        assert plan.hardware.gpu is not None
        host, drafts = ON_CPU.get(where, NONE), Speculation(Drafter.lookup, 7, 0.3)
        taken = replace(plan.decisions, weights=replace(plan.decisions.weights, host=host), speculation=drafts)
        card = replace(plan.hardware.gpu, layer_kernels_s=1e-5)
        plan = replace(plan, hardware=replace(plan.hardware, gpu=card, host=RATES), decisions=taken)
        with opened(plan, checkpoint, CudaDevice(0), CARD, graphs=graphs) as session:
            session.load(BATCH)
            found.append([session.generate(batch, Sampler(Sampling(), CARD), keep_logits=True) for batch in (BATCH, BATCH)])
            facts = session.engine.facts()["graphs"]
    assert facts["verify"]["shapes"] == [[3, 8]] and facts["verify"]["refused"] is None and facts["verify"]["steps"] > 0 < facts["steps"]
    for want, got in zip(*found, strict=True):
        assert got.tokens == want.tokens
        for a, b in zip(got.logits, want.logits, strict=True):
            assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)


def test_steps_that_read_the_ssd_are_launched_one_kernel_after_the_other(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path, "llama")
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    assert plan.placement.ssd_layers
    with opened(plan, checkpoint, CudaDevice(0), CARD) as session:
        session.load(BATCH)
        assert session.engine.facts()["graphs"] is None
