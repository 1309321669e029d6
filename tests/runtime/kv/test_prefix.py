"""Prompts whose beginnings are restored are continued as if they had been computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from planner.decisions import KvPages
from planner.plan import Plan
from runtime.generate import Batch, Generation, Sampler, Sampling, Sequences, generate
from runtime.kv.contiguous import KvBuffers
from runtime.kv.prefix import Prefix
from runtime.kv.record import PageShape
from runtime.kv.writer import DiskWriter
from tests.runtime.kv.batches import page_memory
from tests.support import GPU, HostCopier, decisions, machine, plan_for, save_tiny

CPU = torch.device("cpu")
PAGE = 16
STEM = [(7 * i) % 251 + 1 for i in range(70)]
ALIKE = [STEM, STEM[:40] + [3, 1, 4], STEM[:5]]
"""Full pages to restore: 4, 2 and none."""


@dataclass(frozen=True)
class Case:
    """On the CPU, or with ``kept`` pages of VRAM on a card that is the CPU."""

    model: nn.Module
    plan: Plan
    directory: Path | None
    kept: int | None = None
    namespace: bytes = bytes(16)

    def run(self, *batches: Sequence[Sequence[int]], use: bool = True, chunk: int = 1 << 20) -> tuple[list[Generation], dict[str, Any]]:
        """What is generated for each batch by fresh objects, in buffers that are full of NaN before it, and the reuse's own facts."""
        with ExitStack() as stack:
            prefix = stack.enter_context(closing(self._prefix(stack))) if use else None
            made = [self._generate(prompts, chunk, prefix) for prompts in batches]
            return made, prefix.facts() if prefix else {}

    def _prefix(self, stack: ExitStack) -> Prefix:
        shape = PageShape(self.namespace, PAGE, 3, PAGE * 2 * 2 * 16 * 4)
        device = None if self.kept is None else HostCopier()
        memory = page_memory(shape.payload_bytes, 32, device, 3, self.kept or 0)
        disk = stack.enter_context(DiskWriter(self.directory, shape, 64 << 20, 1 << 20, 32)) if self.directory else None
        return Prefix(shape, self.plan, memory, disk, read_gbps=1e9, readers=3)

    def _generate(self, prompts: Sequence[Sequence[int]], chunk: int, prefix: Prefix | None) -> Generation:
        batch = Batch(prompts, 6, capacity=96, chunk_tokens=chunk)
        buffers = KvBuffers(self.model.config, batch.capacity)
        with torch.inference_mode():
            Sequences(self.model, CPU, batch, lambda: None, buffers).prefill()
            for held in (held for pair in buffers.pairs(len(prompts)) for held in pair):
                held.fill_(math.nan)
        sequences = Sequences(self.model, CPU, batch, lambda: None, buffers, prefix)
        return generate(sequences, batch, Sampler(Sampling(), CPU), keep_logits=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Plan]:
    """In float32: passes of other shapes then differ by rounding alone, far below the gaps between logits."""
    checkpoint = save_tiny(tmp_path_factory.mktemp("prefix"), layers=3)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval(), plan_for(checkpoint, decisions(batch=3))


@pytest.fixture(params=[None, 0, 3], ids=["cpu", "card", "card with L1"])
def case(tiny: tuple[nn.Module, Plan], tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    model, plan = tiny
    if request.param is not None:
        slow = replace(GPU, dense_tflops=1e-6)
        made = replace(plan.decisions, kv=KvPages(PAGE, 54, 0, 0))
        plan = replace(plan, hardware=replace(machine(True), gpu=slow), decisions=made)
    return Case(model, plan, tmp_path / "kv", request.param)


def same(got: Generation, want: Generation) -> None:
    assert got.tokens == want.tokens
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


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
    assert of(facts) == [0, 0, 0, 59, 32, 0] and facts["disk"] is None


def test_a_batch_begins_where_the_first_sequence_must_be_computed(case: Case) -> None:
    """Rows 64, 27 + 32 and 65 + 0 of 70 are the first that each must compute."""
    case.run(ALIKE)
    _, facts = case.run(ALIKE)
    assert [r["found_tokens"] for r in facts["requests"]] == [64, 32, 0]
    assert of(facts) == [59, 32, 0]
    assert [r["computed_tokens"] for r in facts["requests"]] == [11, 11, 5]
    assert facts["restored_tokens"] == {"vram": 0, "dram": 0, "ssd": 91} and facts["computed_tokens"] == 27
    assert facts["hit_rate"] == 91 / 118
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
    assert sum(of(facts)) == 91


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
