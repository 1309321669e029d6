"""A recorded step whose LM head the CPU computes in part says what the card alone says; a card is played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import Dtype
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.plan.schedules import OWN
from penstock.planner.contract.rules.broken import broken_rules
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.engine import open_session
from penstock.runtime.engine.passes import recorded_side, step_recording
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.model.binding import views
from penstock.runtime.model.fixtures import rows_of
from penstock.runtime.model.head import HeadInBlocks, head_rows
from penstock.runtime.model.skeleton import open_skeleton
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.host_steps import HostSteps, host_block
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.store.base import UnitLayout
from tests.runtime.formats.gguf_made import COMMITTED, WIDE, as_gguf
from tests.runtime.formats.test_whole_checkpoints import made
from tests.runtime.ranks.played_graphs import Card, Graph, Kernel
from tests.runtime.ranks.test_handed_steps import CLOSE, HALVES
from tests.runtime.sessions import CPU, opened
from tests.runtime.test_attention import alone
from tests.runtime.test_host_steps import PlayedWords
from tests.support import decisions, plan_for, save_tiny, workload

pytestmark = pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=9, chunk_tokens=1 << 20, limits=[9, 4, 7])
TIMED = Curve(((1, 50.0), (16, 40.0)))
RATES = HostRates(2, {"BF16": TIMED}, 1e-5, 0.8, 0.8, f16_products={"F16": TIMED})
CASES = {
    "all of the head": ((2, 2, 0), HostUnits(0, 3, 4)),
    "some beside resident and streamed blocks": ((2, 2, 1), HostUnits(0, 3, 2)),
    "some beside FFNs": ((2, 1, 1), HostUnits(3, 3, 2)),
    "nothing else moves": ((6, 6, 1), HostUnits(0, 3, 3)),
    "more rows than the CPU is to compute": ((2, 2, 0), HostUnits(1, 2, 4)),
}
"""What VRAM keeps of each kind, and what the CPU computes."""


@contextmanager
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card that records, without one."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **more: zeros(*a, **more))
    for module in (recorded_side, step_recording):
        monkeypatch.setattr(module, "CudaDevice", Card)
    monkeypatch.setattr(recorded_side, "CardPass", Graph)
    monkeypatch.setattr(open_session, "open_kernel", lambda *_: Kernel())
    yield Card()


def plan_with(checkpoint: Path, resident: tuple[int, int, int], host: HostUnits) -> Plan:
    cap = 6 - min(resident[:2])
    taken = decisions(gpu=True, batch=3, resident=resident, head_blocks=4, cap=cap, hwm=cap + 3, distance=cap, pages=16)
    plan = plan_for(checkpoint, taken, gpu=True, work=workload(batch=3, requests=3))
    assert plan.hardware.gpu is not None
    card = replace(plan.hardware.gpu, layer_kernels_s=1e-5)
    made = replace(plan.decisions, weights=replace(plan.decisions.weights, host=host))
    plan = replace(plan, hardware=replace(plan.hardware, gpu=card, host=RATES), decisions=made)
    assert broken_rules(plan.hardware, plan.model, plan.workload, plan.decisions) == []
    return plan


def generated(plan: Plan, checkpoint: Path, card: Card) -> tuple[Generation, dict]:
    with opened(plan, checkpoint, card, CPU) as session:
        session.load(BATCH)
        found = [session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True) for _ in range(2)]
        assert found[0].tokens == found[1].tokens
        return found[0], {**session.engine.facts(), "stages": session.engine.stage_totals()}


@pytest.mark.parametrize(("case", "family"), [*((case, "llama") for case in CASES), ("some beside FFNs", "gemma2")])
def test_a_step_with_blocks_of_the_cpu_says_what_the_card_alone_says(
    case: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, host = CASES[case]
    checkpoint = save_tiny(tmp_path / "model", family)
    plan = plan_with(checkpoint, resident, host)
    write_plan(plan, tmp_path / "plan.yaml")
    with played(monkeypatch) as card:
        want, without = generated(plan_with(checkpoint, resident, HostUnits()), checkpoint, card)
        got, facts = generated(replace(read_plan(tmp_path / "plan.yaml"), hardware=plan.hardware), checkpoint, card)
    assert facts["graphs"]["refused"] is None and facts["graphs"]["steps"] == without["graphs"]["steps"] > 0
    steps = facts["graphs"].get("schedules", {}).get("steps", {}).get(OWN, 0)
    nbytes = sum(map(plan.placement.unit_bytes, plan.placement.host_units))
    assert facts["stages"].get("cpu", (0, 0.0))[0] == ((steps + 1) * nbytes if host.compute(3) else 0)
    alike(got, want)


def alike(got: Generation, want: Generation) -> None:
    assert got.tokens == want.tokens
    for one, other in zip(got.logits, want.logits, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.02 * other.abs().max().item(), rtol=0)


@pytest.mark.parametrize(
    ("case", "tied"),
    [
        pytest.param("all of the head", True, id="all of the tied head"),
        pytest.param("some beside resident and streamed blocks", False, id="some beside resident and streamed blocks"),
        pytest.param("some beside FFNs", True, id="some of the tied head beside FFNs"),
        pytest.param("some beside FFNs", False, id="some beside FFNs"),
    ],
)
def test_what_the_cpu_computes_of_an_f16_models_head_is_what_transformers_says(
    case: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in fewer bits have such heads, too, but a played card records no products of C."""
    resident, host = CASES[case]
    checkpoint = made(tmp_path, HALVES["F16"], {"tie_word_embeddings": tied}, 6)
    plan = plan_with(checkpoint, resident, host)
    assert plan.model.compute_dtype is Dtype.float16 and plan.model.lm_head.format.name == "F16" and plan.model.tied is tied
    with played(monkeypatch) as card:
        got, facts = generated(plan, checkpoint, card)
    steps = facts["graphs"]["schedules"]["steps"][OWN]
    assert facts["graphs"]["refused"] is None and steps > 1
    assert facts["stages"]["cpu"][0] == (steps + 1) * sum(map(plan.placement.unit_bytes, plan.placement.host_units)) > 0
    for said, want in zip(got.logits, alone(tmp_path / "decoded", got, torch.float16), strict=True):
        assert torch.allclose(said.float(), want.float(), atol=CLOSE[torch.float16] * want.abs().max().item(), rtol=0)


STORED: dict[str, Callable[[Path], Path]] = {
    "BF16": lambda at: save_tiny(at / "hf"),
    "Q8_0": lambda at: as_gguf(save_tiny(at / "hf", **WIDE), at / "m.gguf", "Q8_0"),
    "Q4_0": lambda at: as_gguf(save_tiny(at / "hf", **WIDE), at / "m.gguf", "Q4_0"),
    "Q8_0, tied": lambda at: as_gguf(save_tiny(at / "hf", "qwen2", tied=True, **WIDE), at / "m.gguf", "Q8_0"),
    "Q6_K": lambda _: COMMITTED / "Q4_K_M.gguf",
}
"""A head's format -> the checkpoint that has it, made at a path."""


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_head_is_multiplied_as_it_is_stored(form: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By blocks of its rows, whatever these begin at."""
    checkpoint = STORED[form](tmp_path)
    skeleton, spec = open_skeleton(checkpoint), spec_from_checkpoint(checkpoint)
    assert spec.lm_head.format.name == form.partition(",")[0]
    HeadInBlocks(spec.vocab, 7).convert(skeleton.model)
    head = skeleton.model.get_output_embeddings()
    others = skeleton.store.others()
    table = others.get("lm_head.weight", others["model.embed_tokens.weight"])
    blocks = [read(rows_of(table, *span)) for span in head_rows(spec.vocab, 7)]
    head.feed({j: block["weight"] for j, block in enumerate(blocks)}, Unfed())
    x = torch.randn(1, rows, spec.hidden).bfloat16()
    ledger, words = Ledger(), PlayedWords()
    with played(monkeypatch) as card, HostPool(2) as pool, torch.inference_mode():
        want = head(x)
        units = [host_block(Unit("head", j), head, blocks[j]) for j in (5, 6)]
        steps = HostSteps(pool, units, rows, card, ledger)
        for _ in range(2):
            steps.begin_step()
            with steps.computing(words, RecordedStream((), {}, words, ledger)):
                got = head(x)
            steps.settle()
        steps.close()
        assert torch.equal(head(x), want), "it is the card's again"
    begins = head_rows(spec.vocab, 7)[5][0]
    assert torch.equal(got[..., :begins], want[..., :begins])
    assert torch.allclose(got.float(), want.float(), atol=0.02 * want.abs().max().item(), rtol=0)
    assert ledger.totals()["cpu"].bytes == 2 * sum(unit.ffn.bytes for unit in units)


class Unfed:
    """Nothing streams."""


def read(block: UnitLayout) -> dict[str, torch.Tensor]:
    """What lies in its file."""
    buffer = torch.zeros(block.nbytes, dtype=torch.uint8)
    for extent in block.extents:
        with open(extent.file, "rb") as file:
            file.seek(extent.offset)
            buffer[extent.dest : extent.dest + extent.nbytes] = torch.frombuffer(bytearray(file.read(extent.nbytes)), dtype=torch.uint8)
    return views(block.tensors, buffer)


def test_the_card_adds_biases_of_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_tiny(tmp_path / "phi", "phi")
    plan = plan_with(checkpoint, (2, 2, 1), HostUnits(0, 3, 2))
    with played(monkeypatch) as card:
        want, _ = generated(plan_with(checkpoint, (2, 2, 1), HostUnits()), checkpoint, card)
        got, facts = generated(plan, checkpoint, card)
    assert facts["stages"]["cpu"][0] > 0
    alike(got, want)


@pytest.mark.parametrize("host", [HostUnits(3, 3, 2), HostUnits()])
def test_steps_that_are_launched_as_asked_say_what_becomes_of_the_cpus_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: HostUnits
) -> None:
    checkpoint = save_tiny(tmp_path)
    with played(monkeypatch) as card, opened(plan_with(checkpoint, (2, 1, 1), host), checkpoint, card, graphs=False) as session:
        session.load(BATCH)
        said = "a decode step is launched kernel by kernel, not recorded: engine.graphs=false"
        assert session.launched == said + ("; what the plan leaves to the CPU is copied to the card" if host.ffn else "")
        assert not session.plan.placement.host_units, "what is promised knows of it"
