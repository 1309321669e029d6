"""A model that drafts follows the sequences that it drafts for: through pauses, wrong drafts, and other rows' ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

import penstock
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.engine.passes.generate import Batch, generate
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Drafts
from penstock.runtime.speculate.model_drafter import ModelDrafter
from tests.runtime.steppers import CPU, unstreamed
from tests.support import save_tiny

VOCAB = 300


@dataclass
class Anyhow(ChainLength):
    """Chains of any length, none among them."""

    draw: random.Random = field(default_factory=random.Random)

    def choose(self) -> int:
        return self.draw.randint(0, self.most)


class Recorded(Stepper):
    """As on a card, whose graphs compute one token a row, where a pass has no prompts."""

    @property
    def recorded(self) -> bool:
        return True

    def run(self, step: Step) -> torch.Tensor:
        assert all(row.kind is RowKind.prompt or (row.kind is RowKind.decode and len(row.tokens) == 1) for row in step.rows)
        return super().run(step)


class Compared(ModelDrafter):
    """Holds each chain against that of a drafter which reads all anew."""

    anew: nn.Module

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        drafts, other = super().propose(rows, most), ModelDrafter(unstreamed(self.anew), VOCAB, 64)
        other.read(rows)
        assert drafts == other.propose(rows, most)
        return drafts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    """In float64, where passes of other shapes choose the same tokens: one to draft for, itself once more, and a smaller one."""
    where: Path = tmp_path_factory.mktemp("models")
    large, small = save_tiny(where / "large", layers=2), save_tiny(where / "small", layers=1)
    each = {"target": large, "itself": large, "small": small, "itself anew": large, "small anew": small}
    return {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for name, path in each.items()}


def drafter(model: nn.Module, anew: nn.Module, recorded: bool, chunk_tokens: int) -> tuple[ModelDrafter, Stepper]:
    steps = unstreamed(model)
    if recorded:
        steps.__class__ = Recorded
    made = Compared(steps, VOCAB, chunk_tokens)
    made.anew = anew
    return made, steps


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_a_model_drafts_and_the_text_stays(models: dict[str, nn.Module], data: st.DataObject) -> None:
    """Of any prompts, batches, limits and stop tokens, with chains of any length. The model itself is always right."""
    prompts = data.draw(st.lists(st.lists(st.integers(1, 250), min_size=1, max_size=20), min_size=1, max_size=3))
    limits = [data.draw(st.integers(1, 12)) for _ in prompts]
    stop = frozenset(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=20)))
    batch = Batch(prompts, max(limits), 8, stop, limits)
    sampling = data.draw(st.sampled_from([Sampling(), Sampling(temperature=1.0, top_k=50, seed=3)]))
    name, recorded = data.draw(st.sampled_from(["itself", "small"])), data.draw(st.booleans())
    proposer, steps = drafter(models[name], models[f"{name} anew"], recorded, data.draw(st.integers(1, 8)))
    length = Anyhow(5, lambda drafts: 1.0, Acceptance(0.5), draw=random.Random(data.draw(st.integers(0, 99))))
    chains, free = Chains(name, proposer, length), steps.pool.pages.free

    def said(drafts: Chains | None) -> Sequence[Sequence[int]]:
        return generate(unstreamed(models["target"]), batch, Sampler(sampling, CPU), chains=drafts).tokens

    assert said(chains) == said(None)
    assert steps.pool.pages.free == free
    if name == "itself" and sampling == Sampling() and not stop:
        assert chains.counts.kept == chains.counts.drafted


def test_rows_with_tokens_that_the_drafter_does_not_know_get_no_drafts(models: dict[str, nn.Module]) -> None:
    proposer = ModelDrafter(unstreamed(models["small"]), 100, 8)
    rows = [KvSequence.of(0, [5, 120, 7]), KvSequence.of(1, [5, 9, 7])]
    proposer.read(rows)
    none, some = proposer.propose(rows, [3, 3])
    assert not none
    assert len(some) == 3
    assert max(some) < 100


def test_rows_without_pages_get_no_drafts_until_others_end(models: dict[str, nn.Module]) -> None:
    """A server's rows share pages of prompts, which the drafter has once for each row."""
    proposer = ModelDrafter(unstreamed(models["small"], slots=2), VOCAB, 8)
    rows = [KvSequence.of(0, list(range(1, 21))), KvSequence.of(1, [5, 9, 7])]
    proposer.read(rows)
    some, none = proposer.propose(rows, [3, 3])
    assert (len(some), len(none)) == (3, 0)
    proposer.forget(0)
    proposer.read(rows[1:])
    assert len(proposer.propose(rows[1:], [3])[0]) == 3


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_by_a_plan_with_a_drafter_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Both models by plans of their own, the drafter's whole in DRAM; what is drafted is what the model says, so it is kept."""
    monkeypatch.setattr(ChainLength, "choose", lambda length: length.most)
    target, prompts = save_tiny(tmp_path / "target", layers=4), [[5, 9, 200, 31], [7, 7, 8]][:batch]
    keys = {"model.checkpoint": str(target), "workload.prompt_tokens": 8, "workload.new_tokens": 16, "workload.batch": batch}
    drafted = penstock.solve(hardware="cpu", speculate="auto", draft=str(target), **{"force.speculate_tokens": 3}, **keys)
    assert drafted.decisions.speculation.drafter in ("none", "lookup", "self")
    drafted = penstock.solve(hardware="cpu", speculate="self", draft=str(target), **{"force.speculate_tokens": 3}, **keys)
    write_plan(drafted, tmp_path / "plan.yaml")
    said = {}
    for name, plan in {"plain": penstock.solve(hardware="cpu", **keys), "drafted": str(tmp_path / "plan.yaml")}.items():
        with penstock.open(plan) as model:
            said[name] = [reply.tokens for reply in model.generate(prompts, 16, greedy=True)]
            chains = model._session.chains
    assert said["drafted"] == said["plain"]
    assert chains is not None
    assert chains.counts.kept == chains.counts.drafted > 0
    assert chains.counts.draft_s > 0
