"""Prompts whose beginnings are restored are continued as if they had been computed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.passes.generate import Batch, Generation, generate
from penstock.runtime.engine.passes.rehearsal import rehearse
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.kv.disk.page_keys import page_keys
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.disk.page_writer import DiskWriter
from penstock.runtime.kv.disk.upkeep import verify
from penstock.runtime.kv.pages.dram_pages import DramPages
from penstock.runtime.kv.pages.prefix import Prefix
from penstock.runtime.model.rows import RowKind, Step
from tests.runtime.kv.batches import page_memory
from tests.support import GPU, HostCopier, decisions, machine, plan_for, save_tiny

CPU = torch.device("cpu")
PAGE = 16
STEM = [(7 * i) % 251 + 1 for i in range(70)]
ALIKE = [STEM, STEM[:40] + [3, 1, 4], STEM[:5]]
"""Full pages to restore: 4, 2 and none."""


@dataclass(frozen=True)
class Case:
    """On the CPU, or with ``slots`` pages of VRAM on a card that is the CPU."""

    model: nn.Module
    plan: Plan
    directory: Path | None
    slots: int | None = None
    namespace: bytes = bytes(16)
    begin_pass: Callable[[Step], None] = lambda step: None

    def run(self, *batches: Sequence[Sequence[int]], use: bool = True, chunk: int = 1 << 20) -> tuple[list[Generation], dict[str, Any]]:
        """What is generated for each batch, and the reuse's own facts."""
        with ExitStack() as stack:
            kept = self.keeping(stack)
            made = [kept.generate(prompts, chunk, use) for prompts in batches]
            return made, kept.prefix.facts()

    def keeping(self, stack: ExitStack) -> Keeping:
        shape = PageShape(self.namespace, PAGE, 3, PAGE * 2 * 2 * 16 * 4)
        device = None if self.slots is None else HostCopier()
        pool = KvPool(self.slots or 3 * 6, PAGE, kinds(self.model.config), CPU)
        stepper = Stepper(self.model, CPU, pool, self.begin_pass)
        rehearse(stepper, Batch([[0]], 1, 1 << 20), 3)  # takes the pool's memory
        for buffer in pool.buffers().values():
            buffer.view(torch.float32).fill_(math.nan)
        memory = page_memory(shape, pool.pages.slots, 32, device, 3)
        memory = replace(memory, pool=pool.pages, buffers=pool.buffers())
        disk = stack.enter_context(DiskWriter(self.directory, shape, 64 << 20, 1 << 20, 32)) if self.directory else None
        prefix = stack.enter_context(closing(Prefix(shape, self.plan, memory, disk, read_gbps=1e9, readers=3)))
        return Keeping(stepper, prefix)


class Keeping(NamedTuple):
    """A model and the prefixes that it keeps."""

    stepper: Stepper
    prefix: Prefix

    def generate(self, prompts: Sequence[Sequence[int]], chunk: int = 1 << 20, use: bool = True) -> Generation:
        """Logits of each prompt's last token and of each step."""
        batch = Batch(prompts, 6, chunk_tokens=chunk)
        return generate(self.stepper, batch, Sampler(Sampling(), CPU), self.prefix if use else None, keep_logits=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Plan]:
    """In float32: passes of other shapes then differ by rounding alone, far below the gaps between logits."""
    checkpoint = save_tiny(tmp_path_factory.mktemp("prefix"), layers=3)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval(), plan_for(checkpoint, decisions(batch=3))


@pytest.fixture(params=[None, 18, 24], ids=["cpu", "card", "card with room"])
def case(tiny: tuple[nn.Module, Plan], tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    model, plan = tiny
    return Case(model, plan if request.param is None else on_card(plan), tmp_path / "kv", request.param)


def on_card(plan: Plan) -> Plan:
    """``plan`` for a card so slow that every page is worth its way."""
    slow = replace(GPU, dense_tflops=1e-6)
    made = replace(plan.decisions, kv=KvPages(PAGE, 54, 0, 0))
    return replace(plan, hardware=replace(machine(True), gpu=slow), decisions=made)


def same(got: Generation, want: Generation) -> None:
    """Passes over fewer tokens than those of ``want`` come to the same last logits of each sequence."""
    assert got.tokens == want.tokens
    for a, b in zip(last_logits(got), last_logits(want), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def last_logits(made: Generation) -> list[torch.Tensor]:
    """Of all prompts, then of each decode step, [sequences, vocab]."""
    prompts: dict[int, torch.Tensor] = {}
    steps = []
    for one in made.passes:
        if any(row.kind is RowKind.prompt for row in one.step.rows):
            logits = iter(one.logits)
            prompts |= {row.sequence: next(logits) for row in one.step.rows if row.wanted}
        else:
            steps.append(one.logits)
    return [torch.stack([prompts[number] for number in sorted(prompts)]), *steps]


def of(facts: dict[str, Any]) -> list[int]:
    """Tokens that each request restored."""
    return [sum(r["restored_tokens"].values()) for r in facts["requests"]]


@pytest.mark.parametrize("prompts", [ALIKE[:1], ALIKE[:2], ALIKE], ids=["one", "two", "three"])
def test_a_cold_and_a_warm_run_say_the_same(case: Case, prompts: list[list[int]]) -> None:
    (want,), _ = case.run(prompts, use=False)
    (cold, warm), first = case.run(prompts, prompts)
    (later,), second = case.run(prompts)
    for got in (cold, warm, later):
        same(got, want)
    assert first["pages_written"] > 0 == first["pages_skipped"] == first["restored_tokens"]["ssd"]
    assert second["restored_tokens"]["ssd"] > 0 and second["pages_written"] == 0 == second["failures"]
    assert of(first)[len(prompts) :] == of(second) and not any(of(first)[: len(prompts)])


def test_without_a_directory_the_process_restores_what_it_computed(case: Case) -> None:
    (want,), _ = case.run(ALIKE, use=False)
    (cold, warm), facts = replace(case, directory=None).run(ALIKE, ALIKE)
    same(cold, want)
    same(warm, want)
    assert of(facts) == [0, 0, 0, 64, 32, 0] and facts["disk"] is None


def test_each_sequence_begins_where_its_own_pages_end(case: Case) -> None:
    case.run(ALIKE)
    _, facts = case.run(ALIKE)
    assert [r["found_tokens"] for r in facts["requests"]] == [64, 32, 0]
    assert of(facts) == [64, 32, 0]
    assert [r["computed_tokens"] for r in facts["requests"]] == [6, 11, 5]
    assert facts["restored_tokens"] == {"vram": 0, "dram": 0, "ssd": 96} and facts["computed_tokens"] == 22
    assert facts["hit_rate"] == 96 / 118
    assert facts["restored_bytes"]["ssd"] == 4 * 3 * 4096, "a page that two sequences begin with is read once"
    assert [r["restored_bytes"]["ssd"] for r in facts["requests"]] == [4 * 3 * 4096, 2 * 3 * 4096, 0]


def test_the_last_token_is_always_computed(case: Case) -> None:
    prompts = [STEM[: 3 * PAGE]]
    (want,), _ = case.run(prompts, use=False)
    case.run(prompts)
    (warm,), facts = case.run(prompts)
    same(warm, want)
    assert of(facts) == [2 * PAGE] and facts["pages_written"] == 0


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_what_was_restored_is_continued_in_chunks(case: Case, chunk: int) -> None:
    (want,), _ = case.run(ALIKE, use=False)
    (_, warm), facts = case.run(ALIKE, ALIKE, chunk=chunk)
    same(warm, want)
    assert sum(of(facts)) == 96


def test_a_longer_prompt_goes_on_from_a_shorter_ones_pages(case: Case) -> None:
    case.run([STEM[:40]])
    (want,), _ = case.run([STEM], use=False)
    (got,), facts = case.run([STEM])
    same(got, want)
    assert of(facts) == [2 * PAGE] and facts["pages_written"] == 2


def test_another_namespace_never_hits(case: Case) -> None:
    case.run(ALIKE)
    _, facts = replace(case, namespace=bytes([1] * 16)).run(ALIKE)
    assert not any(of(facts)) and all(r["found_tokens"] == 0 for r in facts["requests"])


class LateChecks:
    """Checks of pages in DRAM, which are not over before a pass over the model has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun = threading.Event()
        is_sound = DramPages.is_sound

        def late(pages: DramPages, slot: int) -> bool:
            assert self.begun.wait(30), "nothing was computed before the checks were over"
            return is_sound(pages, slot)

        monkeypatch.setattr(DramPages, "is_sound", late)


def kept_bytes(prefix: Prefix, prompt: Sequence[int]) -> dict[str, bytes]:
    """What L1 and L2 would give for the pages of ``prompt``."""
    tiers, found = prefix._tiers, {}
    for i, key in enumerate(page_keys(bytes(16), prompt, PAGE)):
        slot, place = tiers.kept.find(key), tiers.dram.slots.find(key)
        if slot is not None:
            record = torch.zeros(tiers.shape.payload_bytes, dtype=torch.uint8)
            tiers.slots.pack(slot, record)
            found[f"L1 {i}"] = record.numpy().tobytes()
        if place is not None:
            found[f"L2 {i}"] = tiers.dram.tensor(place).numpy().tobytes()
    return found


@pytest.mark.parametrize(("bad", "sound"), [(0, 0), (2, 32), (3, 48)])
@pytest.mark.parametrize("others", [[], ALIKE[1:]], ids=["one", "unequal"])
def test_a_page_that_proves_bad_while_the_tail_is_computed_changes_nothing_that_is_said_or_kept(
    tiny: tuple[nn.Module, Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    others: list[list[int]],
    bad: int,
    sound: int,
) -> None:
    """Chunks are pages, so that passes from a page's border on have the shapes of those of a run without reuse."""
    model, plan = tiny
    checks = LateChecks(monkeypatch)
    case = Case(model, on_card(plan), None, 24, begin_pass=lambda step: checks.begun.set())
    first, longer = [STEM, *others], [[*STEM, *range(2, 22)], *others]
    (_, want), _ = case.run(first, longer, use=False, chunk=PAGE)
    honest: dict[str, bytes] = {}
    for flipped in (False, True):
        own = replace(case, directory=tmp_path / f"kv {flipped}")
        with ExitStack() as stack:
            kept = own.keeping(stack)
            prefix = kept.prefix
            kept.generate(first, PAGE)
            assert prefix.facts()["pages_written"] == 4
            prefix.forget()
            if flipped:
                key = page_keys(bytes(16), STEM, PAGE)[bad]
                prefix._tiers.dram.view(prefix._tiers.dram.slots.find(key))[77] ^= 4
            checks.begun.clear()
            got = kept.generate(longer, PAGE)
            facts = prefix.facts()
            assert got.tokens == want.tokens and facts["failures"] == flipped
            assert sum(facts["requests"][len(first)]["restored_tokens"].values()) == (sound if flipped else 64)
            there = kept_bytes(prefix, longer[0])
            if flipped and not others:  # else KV that was computed beside other rows goes before
                pairs = zip(last_logits(got), last_logits(want), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), "not the very same logits"
                assert all(data == honest.get(name, data) for name, data in there.items()), "something bad was kept"
            same(got, want)
            assert {f"L1 {i}" for i in range(5)} | {f"L2 {i}" for i in range(5)} <= set(there)
            honest = honest or there
            same(kept.generate(longer, PAGE), want)
            prefix.forget()
            same(kept.generate(longer, PAGE), want)
            assert prefix.facts()["failures"] == flipped
        assert verify(own.directory).exit_status == 0
        (later,), facts = own.run(longer, chunk=PAGE)
        same(later, want)
        assert facts["failures"] == 0 and facts["requests"][0]["restored_tokens"]["ssd"] == 80
    assert capfd.readouterr().err.count("checksum") == 1


def test_a_sequence_beside_one_whose_page_proves_bad_loses_nothing(tiny: tuple[nn.Module, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny
    checks, steps = LateChecks(monkeypatch), []
    case = Case(model, on_card(plan), None, 24, begin_pass=lambda step: checks.begun.set() or steps.append(step))
    prompts = [STEM, [8, 9, *STEM[:40]]]
    with ExitStack() as stack:
        kept = case.keeping(stack)
        want = kept.generate(prompts)
        kept.prefix.forget()
        dram = kept.prefix._tiers.dram
        dram.view(dram.slots.find(page_keys(bytes(16), STEM, PAGE)[1]))[3] ^= 1
        steps.clear()
        same(kept.generate(prompts), want)
        assert of(kept.prefix.facts())[2:] == [16, 32]
        assert [[(row.sequence, row.start) for row in step.rows] for step in steps[:2]] == [[(0, 64), (1, 32)], [(0, 16)]]


def test_a_batch_that_breaks_off_before_its_pages_are_confirmed_leaves_nothing_unsure(tiny: tuple[nn.Module, Plan]) -> None:
    model, plan = tiny
    breaks = [False]

    def begin_pass(step: Step) -> None:
        if breaks[0]:
            raise KeyboardInterrupt

    with ExitStack() as stack:
        kept = Case(model, on_card(plan), None, 24, begin_pass=begin_pass).keeping(stack)
        want = kept.generate([STEM], PAGE)
        kept.prefix.forget()
        dram = kept.prefix._tiers.dram
        dram.view(dram.slots.find(page_keys(bytes(16), STEM, PAGE)[1]))[9] ^= 1
        breaks[0] = True
        with pytest.raises(KeyboardInterrupt):
            kept.generate([STEM], PAGE)
        breaks[0] = False
        same(kept.generate([STEM], PAGE), want)
        assert kept.prefix.facts()["failures"] == 1 and of(kept.prefix.facts()) == [0, 16]


def test_what_the_pool_keeps_is_shared_by_sequences_that_go_on_differently(tiny: tuple[nn.Module, Plan]) -> None:
    """Each writes to pages of its own, where its own tokens begin."""
    model, plan = tiny
    prompts = [[*STEM[:64], i, i + 1] for i in range(3)]
    with ExitStack() as stack:
        kept = Case(model, on_card(plan), None, 24).keeping(stack)
        want = kept.generate(prompts, use=False)
        kept.generate([STEM])
        before = kept_bytes(kept.prefix, STEM)
        same(kept.generate(prompts), want)
        facts = kept.prefix.facts()
        assert of(facts)[1:] == [64] * 3 and facts["restored_tokens"]["vram"] == 3 * 64 and not any(facts["restored_bytes"].values())
        assert kept_bytes(kept.prefix, STEM) == before, "a page that is shared was written to"
