"""What many runs share: a tiny checkpoint and a desk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import put_in
from tests.runtime.running import Desk, desk
from tests.support import decisions, plan_for, save_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of six layers, without a tokenizer. Nobody writes to it."""
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def on_a_card(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk whose runs take the CPU for a card that locks every page."""
    put_in(monkeypatch, LockingCopier())
    return desk(tmp_path, plan_for(checkpoint, decisions(gpu=True, pages=8), gpu=True))


@pytest.fixture
def own_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return shutil.copytree(checkpoint, tmp_path / "a model=1")


@pytest.fixture
def here(own_checkpoint: Path, tmp_path: Path) -> Desk:
    """A desk with a plan for ``own_checkpoint``, without a GPU."""
    (tmp_path / "desk").mkdir()
    return desk(tmp_path / "desk", plan_for(own_checkpoint, decisions()))
