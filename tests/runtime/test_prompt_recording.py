"""An engine's prompts are recorded as its plan says, or launched and told why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.passes import prompt_recording
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.session import Session
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.recorded.agreement import bf16_rounding
from tests.runtime.ranks.played_graphs import Card, Pieces
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

TOKENS, LAYERS = 16, 6


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prompt_recording, "CudaDevice", Card)
    monkeypatch.setattr(prompt_recording, "CardPieces", Pieces)
    return save_tiny(tmp_path, "llama")


def resident(checkpoint: Path, tokens: int) -> Plan:
    made = decisions(gpu=True, resident=(LAYERS, LAYERS, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0)
    return plan_for(checkpoint, replace(made, recorded_prompt_tokens=tokens), gpu=True)


@contextmanager
def loaded(plan: Plan, checkpoint: Path, **options: bool) -> Iterator[Session]:
    with opened(plan, checkpoint, Card(), **options) as session:
        session.load(Batch([[5] * TOKENS], 4, 1 << 20))
        yield session


def prompt(session: Session, tokens: int) -> torch.Tensor:
    sequence = KvSequence.of(0, [1 + n % 200 for n in range(tokens)])
    sequence.hold(session.engine.kv.pages, tokens)
    said = session.step(Step((sequence.row(tokens, RowKind.prompt),))).clone()
    sequence.release(session.engine.kv.pages)
    return said


def test_prompts_of_a_plan_that_has_them_so_are_launched_as_recorded(checkpoint: Path) -> None:
    with loaded(resident(checkpoint, 0), checkpoint) as session:
        wanted = prompt(session, TOKENS)
        assert session.engine.facts()["prompts"] is None and session.prompts_launched is None
    with loaded(resident(checkpoint, TOKENS), checkpoint) as session:
        assert torch.equal(prompt(session, TOKENS), wanted)
        assert session.prompts_launched is None
        assert session.engine.facts()["prompts"] == {"tokens": TOKENS, "refused": None, "layers": LAYERS}
        prompt(session, TOKENS // 2)
        assert session.engine.facts()["prompts"]["layers"] == LAYERS, "more than half of its tokens are not there"


class Forgetful(Pieces):
    """Its last piece does nothing."""

    def launch(self, number: int) -> None:
        if number < 2 * LAYERS - 1:
            super().launch(number)


def test_what_was_recorded_and_says_something_else_is_not_launched(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_recording, "CardPieces", Forgetful)
    with loaded(resident(checkpoint, TOKENS), checkpoint) as session:
        said = prompt(session, TOKENS)
        assert session.prompts_launched is not None
        explained = f"{bf16_rounding(LAYERS):.3g}"
        assert re.search(rf"what was recorded is [\d.]+ off, where rounding explains {explained}$", session.prompts_launched)
        assert session.engine.facts()["prompts"]["tokens"] == 0
    with loaded(resident(checkpoint, 0), checkpoint) as session:
        assert torch.equal(said, prompt(session, TOKENS))


@pytest.mark.parametrize("why, options", [("engine.graphs=false", {"graphs": False}), ("CUDA error: operation not permitted", {})])
def test_prompts_that_are_not_recorded_are_launched_and_said_to_be(
    checkpoint: Path, why: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "0.0")
    with loaded(resident(checkpoint, TOKENS), checkpoint, **options) as session:
        said = prompt(session, TOKENS)
        assert session.prompts_launched is not None and why in session.prompts_launched
        assert session.plan.decisions.recorded_prompt_tokens == 0
        facts = session.engine.facts()["prompts"]
        assert facts["tokens"] == facts["layers"] == 0 and why in facts["refused"]
    with loaded(resident(checkpoint, 0), checkpoint) as session:
        assert torch.equal(said, prompt(session, TOKENS))
