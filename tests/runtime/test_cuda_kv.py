"""Prefixes restored from VRAM, page-locked DRAM and disk are continued with the tokens of a run without reuse: on a real card, and the same
code on the CPU taken for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from penstock.planner.contract.decided.decisions import KvReuse
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.pages.slot_bytes import SlotBytes
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import CopyDevice, CudaDevice
from penstock.runtime.memory.ground import OpenCard
from tests.runtime.fakes import LockingCopier
from tests.runtime.kv.test_prefix import LateChecks, last_logits
from tests.runtime.kv.test_slot_bytes import SHAPE, SLOTS, one_block, record_of
from tests.support import GPU, decisions, machine, plan_for, save_tiny, workload

PAGE = 32
STEM = [(7 * i) % 251 + 1 for i in range(200)]
PROMPTS = [STEM, STEM[:120] + [3, 1, 4], [9, 8, *STEM[:90]]]
CARDS = [
    pytest.param((LockingCopier, torch.device("cpu")), id="taken for a card"),
    pytest.param(
        (lambda: CudaDevice(0), torch.device("cuda", 0)),
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    ),
]
Card = tuple[Callable[[], CopyDevice], torch.device]
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


@dataclass(frozen=True)
class Run:
    """A session with its prefix cache; ``said`` is what it generates."""

    session: Session

    def said(self, prompts: list[list[int]], anew: bool = False) -> Generation:
        """With ``anew`` nothing is found in VRAM."""
        if anew:
            self.session.prefix.forget()
        return self.session.generate(batch_of(prompts), Sampler(Sampling(), self.session.device), keep_logits=True)

    def tokens_from(self) -> dict[str, int]:
        """Tokens that the last request restored, by tier."""
        return self.session.prefix.facts()["requests"][-1]["restored_tokens"]


def batch_of(prompts: list[list[int]]) -> Batch:
    return Batch(prompts, max_new_tokens=8, chunk_tokens=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With this seed the best token is ahead by 4 % of the largest logit at every step of these prompts: rounding does not change it."""
    return save_tiny(tmp_path_factory.mktemp("cuda kv"), seed=92)


def plan_of(checkpoint: Path, vram_pages: int, dram_pages: int) -> Plan:
    """Of a card so slow at computing that every page is worth its way."""
    made = decisions(gpu=True, pages=3 * 8, batch=3, resident=(2, 2, 0), prefill_chunk_tokens=64)
    made = replace(made, kv=replace(made.kv, page_tokens=PAGE, reuse=KvReuse(vram_pages, dram_pages, 0)))
    plan = plan_for(checkpoint, made, gpu=True, work=workload(prompt_tokens=240, batch=3))
    return replace(plan, hardware=replace(machine(True), gpu=replace(GPU, dense_tflops=1e-6)))


@contextmanager
def running(card: Card, plan: Plan, checkpoint: Path, directory: Path | None, reuse: bool = True) -> Iterator[Run]:
    open_card, device = card
    cfg = ReuseConfig(dir=str(directory) if directory else None, read_gbps=1e9)
    with open_session(plan, checkpoint, OpenCard(open_card(), device), reuse=cfg if reuse else None) as session:
        session.load(batch_of(PROMPTS))
        yield Run(session)


def close(got: Generation, wanted: Generation) -> None:
    """Logits within what BF16 makes of passes of other shapes, and the same tokens: of each sequence up to a step whose two best tokens are
    so close that this may decide between them."""
    same = [True] * len(wanted.tokens)
    for step, (a, b) in enumerate(zip(last_logits(got), last_logits(wanted), strict=True)):
        for row, (mine, theirs) in enumerate(zip(a.float(), b.float(), strict=True)):
            if not same[row]:
                continue
            rounding = 0.02 * b.abs().max().item()
            assert torch.allclose(mine, theirs, atol=rounding, rtol=0)
            best, second = theirs.topk(2).values.tolist()
            same[row] = got.tokens[row][step : step + 1] == wanted.tokens[row][step : step + 1]
            assert same[row] or best - second <= 2 * rounding


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(
    ("planned", "tier", "prompts"),
    [
        pytest.param((40, 60), "vram", PROMPTS, id="in VRAM, three"),
        pytest.param((0, 60), "vram", PROMPTS[:1], id="in the pool's idle pages, one"),
        pytest.param((0, 60), "dram", PROMPTS, id="in DRAM, three"),
        pytest.param((2, 4), None, PROMPTS, id="little room, three"),
        pytest.param((0, 0), None, PROMPTS[:1], id="not planned, one"),
    ],
)
def test_what_is_restored_goes_on_as_if_it_had_been_computed(
    card: Card, checkpoint: Path, tmp_path: Path, prompts: list[list[int]], planned: tuple[int, int], tier: str | None
) -> None:
    plan, wanted = plan_of(checkpoint, *planned), without(*card, checkpoint)[len(prompts)]
    with running(card, plan, checkpoint, tmp_path / "kv") as run:
        close(run.said(prompts), wanted)
        for _ in range(2):
            close(run.said(prompts, anew=tier == "dram"), wanted)
            assert tier is None or {t for t, n in run.tokens_from().items() if n} == {tier}
        assert run.session.prefix.facts()["failures"] == 0
    with running(card, plan, checkpoint, tmp_path / "kv") as run:
        close(run.said(prompts), wanted)
        assert run.tokens_from()["ssd"] > 0
        close(run.said([STEM[:70]]), without(*card, checkpoint)[0])


@cache
def without(open_card: Callable[[], CopyDevice], device: torch.device, checkpoint: Path) -> dict[int, Generation]:
    """What is said where nothing is kept: to so many of ``PROMPTS``; to a short one at 0. Where pages are kept changes nothing of it."""
    with running((open_card, device), plan_of(checkpoint, 0, 0), checkpoint, None, reuse=False) as run:
        return {count: run.said(PROMPTS[:count] or [STEM[:70]]) for count in (0, 1, 3)}


@pytest.mark.parametrize("card", CARDS)
def test_a_page_that_proves_bad_once_the_tail_is_launched_changes_nothing_that_is_said(
    card: Card, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checks are over only when a pass over the model has begun. Pages go to DRAM in order, the first ones first: in the third
    slot lies the second page that the first two prompts begin with."""
    with running(card, plan_of(checkpoint, 0, 60), checkpoint, None) as run:
        wanted = run.said(PROMPTS)
        checks, begin_pass = LateChecks(monkeypatch), run.session.engine.stream.begin_pass
        monkeypatch.setattr(run.session.engine.stream, "begin_pass", lambda: checks.begun.set() or begin_pass())
        view = run.session.engine.page_memory.view
        view[2 * (len(view) // run.session.prefix.facts()["dram_pages"]) + 77] ^= 4
        close(run.said(PROMPTS, anew=True), wanted)
        facts = run.session.prefix.facts()
        restored = [sum(request["restored_tokens"].values()) for request in facts["requests"]]
        assert facts["failures"] == 1 and restored == [0, 0, 0, PAGE, PAGE, 2 * PAGE]
        close(run.said(PROMPTS, anew=True), wanted)
        assert run.session.prefix.facts()["failures"] == 1
    assert capfd.readouterr().err.count("checksum") == 1


@pytest.mark.parametrize("card", CARDS)
def test_copying_out_never_waits_for_the_card(card: Card, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(checkpoint, 4, 60)
    with running(card, plan, checkpoint, None) as run:
        run.said(PROMPTS)
        prefix, advance = run.session.prefix, run.session.prefix.advance

        def unwaited() -> None:
            with no_synchronize(run.session.device):
                advance()

        monkeypatch.setattr(prefix, "advance", unwaited)
        run.said([[5, *STEM]])
        facts = run.session.prefix.facts()
        assert facts["pages_skipped"] == 0 and facts["pages_captured"] > 6


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("vram_pages", [0, 40], ids=["in DRAM", "in VRAM"])
def test_the_tail_is_launched_without_waiting_for_what_is_restored(card: Card, checkpoint: Path, vram_pages: int) -> None:
    with running(card, plan_of(checkpoint, vram_pages, 60), checkpoint, None) as run, torch.inference_mode():
        run.said(PROMPTS)
        if not vram_pages:
            run.session.prefix.forget()
        sequences = [KvSequence.of(number, prompt) for number, prompt in enumerate(PROMPTS)]
        with no_synchronize(run.session.device):
            run.session.prefix.restore(sequences)
        given = [sequence.cached for sequence in sequences]
        run.session.prefix.confirm()
        assert [sequence.cached for sequence in sequences] == given == [192, 96, 64]
        for sequence in sequences:
            sequence.release(run.session.engine.kv.pages)


@contextmanager
def no_synchronize(device: torch.device) -> Iterator[None]:
    """Inside, torch raises where it would wait for the card."""
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        else:
            stack.enter_context(nullcontext())
        yield


@needs_card
def test_records_reach_their_slots_on_a_card() -> None:
    held = torch.stack(one_block()).cuda()
    slots = SlotBytes(SHAPE, dict(enumerate(held)), lambda tensor: tensor.is_cuda)
    record = record_of(1).cuda()
    slots.fill(3, record)
    paged = held.view(SHAPE.layers, SLOTS, -1)
    assert torch.equal(paged[:, 3].flatten(), record) and not paged[:, [0, 1, 2, 4]].any()
    back = torch.zeros_like(record)
    slots.pack(3, back)
    assert torch.equal(back, record)


@needs_card
@pytest.mark.parametrize("nbytes", [4096, 64 << 20])
def test_a_lane_copies_both_ways_beside_the_compute_stream(nbytes: int) -> None:
    card, arena = CudaDevice(0), Arena(2 * nbytes + 8192)
    arena.occupy()
    try:  # two pieces, so that copies cross a border of locked memory
        first = 4096 * (arena.nbytes // 8192)
        assert card.lock(arena.address, first) is None and card.lock(arena.address + first, arena.nbytes - first) is None
        source, target = arena.slice(4096, nbytes), arena.slice(4096 + nbytes, nbytes)
        source.random_(0, 255)
        there = torch.zeros(nbytes, dtype=torch.uint8, device=card.device)
        inward, outward = card.lane(), card.lane()
        inward.waits(card.compute_event())
        inward.copy([(there, source)])
        card.compute_waits(inward.event())
        card.launch(lambda: there.bitwise_xor_(255))
        outward.waits(card.compute_event())
        outward.copy([(target, there)])
        card.host_waits(outward.event())
        assert torch.equal(target, source.bitwise_xor(255))
    finally:
        card.unlock(arena.address + first)
        card.unlock(arena.address)
        arena.close()
