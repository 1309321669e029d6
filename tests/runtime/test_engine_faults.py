"""An engine that fails while it is made gives everything back."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

import penstock.runtime.engine.engine
import penstock.runtime.engine.sides.bound_fixtures
import penstock.runtime.engine.sides.card_side
import penstock.runtime.engine.sides.host_side
from penstock.planner.common.errors import UserError
from penstock.runtime.memory.arena import Arena
from tests.runtime.fakes import LockingCopier
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for

CPU = torch.device("cpu")


HOST = ["ReadPool", "CachedReads", "make_policy"]
CARD = ["VramPool", "VramRing", "RingStream", "Rehearsal"]
BOUND = ["parameters", "move_buffers"]
SIDES = penstock.runtime.engine.sides
MADE_IN = (
    (SIDES.host_side, HOST),
    (SIDES.card_side, CARD),
    (SIDES.bound_fixtures, BOUND),
    (penstock.runtime.engine.engine, ["Binder"]),
)
STAGES = [(owner, name) for owner, names in MADE_IN for name in names]


@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[name for _, name in STAGES])
def test_an_engine_that_fails_while_it_is_made_gives_everything_back(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, owner: ModuleType, stage: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError(stage)

    copier, threads = LockingCopier(), set(threading.enumerate())
    monkeypatch.setattr(owner, stage, fail)
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    with pytest.raises(MemoryError, match=stage), opened(plan, checkpoint, copier):
        pass
    assert not copier.held and set(threading.enumerate()) <= threads


def test_an_arena_that_cannot_be_had_names_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"lower hardware\.dram_bytes"):
        Arena(1 << 62)
