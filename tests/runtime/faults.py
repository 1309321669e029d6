"""Faults put into a run at a moment of choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import penstock.runtime.engine.engine
import penstock.runtime.engine.open_session
import penstock.runtime.engine.passes.generate
import penstock.runtime.engine.sides.host_side
import penstock.runtime.engine.sides.loading
import penstock.runtime.memory.cuda
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.memory import arena as arena_module
from tests.support import HostCopier

CPU = torch.device("cpu")


def put_in(monkeypatch: pytest.MonkeyPatch, copier: HostCopier) -> None:
    monkeypatch.setattr("penstock.runtime.memory.cuda.find_device", lambda plan, number=0: CPU)
    monkeypatch.setattr("penstock.runtime.memory.cuda.open_cuda", lambda plan, device: copier)


def fails_at(monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException) -> None:
    """``error`` comes at that moment of a run: while the first pass is rehearsed, while VRAM is filled, at the third token."""
    before(monkeypatch, moment, lambda: raise_(error))


def raise_(error: BaseException) -> None:
    raise error


def before(monkeypatch: pytest.MonkeyPatch, moment: str, act: Callable[[], None]) -> None:
    """``act`` is called at ``moment`` of a run, on whichever thread comes there."""
    owner, name, count = {
        "arena": (arena_module.Arena, "begin", 1),
        "card": (penstock.runtime.memory.cuda, "open_cuda", 1),
        "page-locking": (arena_module.Arena, "lock_pages", 1),
        "skeleton": (penstock.runtime.engine.open_session, "open_skeleton", 1),
        "reading": (penstock.runtime.engine.sides.host_side.HostSide, "begin_reading", 1),
        "binding": (penstock.runtime.engine.engine, "bind_fixtures", 1),
        "rehearsal": (Stepper, "run", 1),
        "load": (penstock.runtime.engine.sides.loading.Filler, "run", 1),
        "prefill": (penstock.runtime.engine.passes.generate._Run, "prefill", 1),
        "decode": (penstock.runtime.engine.passes.generate._Run, "step", 1),
        "report": (json, "dumps", 1),
    }[moment]
    real, calls = getattr(owner, name), []

    def wrapped(*args: Any, **keys: Any) -> Any:
        calls.append(None)
        if len(calls) == count:
            act()
        return real(*args, **keys)

    monkeypatch.setattr(owner, name, wrapped)
