"""Every test sees an empty user configuration and none of WSM's variables, whatever the machine has."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
"""Tiny matrices gain nothing from two threads, and on a busy machine the threads wait for each other. Said before torch is imported, here
and in the processes that tests start."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""Workers and the processes that tests start share what is compiled once. Without it each compiles the whole house."""

gc.disable()
"""Until all tests are collected: modules live to the end, and to search half a million objects for garbage over and over is a third of
what importing them takes."""

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


class EmptyFolders:
    """Folders in which nothing lies: the same one as long as nobody has put anything there. To make one for each test takes seconds."""

    def __init__(self, factory: pytest.TempPathFactory):
        self._factory, self._last = factory, factory.mktemp("config")

    def one(self) -> Path:
        if not self._last.is_dir() or any(self._last.iterdir()):
            self._last = self._factory.mktemp("config")
        return self._last


@pytest.fixture(scope="session")
def empty_folders(tmp_path_factory: pytest.TempPathFactory) -> EmptyFolders:
    return EmptyFolders(tmp_path_factory)


@pytest.fixture(autouse=True)
def clean_environment(empty_folders: EmptyFolders, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's config directory of this test: an empty one."""
    directory = empty_folders.one()
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(directory))
    for name in [name for name in os.environ if name.startswith("WSM_")]:
        monkeypatch.delenv(name)
    return directory


def threads_of_torch() -> int:
    return sys.modules["torch"].get_num_threads() if "torch" in sys.modules else int(os.environ["OMP_NUM_THREADS"])


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """A test that leaves torch more threads slows all that follow it, by a factor of ten beside busy processes."""
    before = threads_of_torch()
    yield
    if (left := threads_of_torch()) != before:
        sys.modules["torch"].set_num_threads(before)
        pytest.fail(f"torch is left with {left} threads, was {before}")


@pytest.fixture(autouse=True, scope="session")
def heard_interrupts() -> None:
    """A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shared_models() -> Path:
    """The trained checkpoints beside the checkout; the test is skipped where they are absent."""
    if not (SHARED / "models").is_dir():
        pytest.skip("no ../shared/models beside this checkout")
    return SHARED / "models"
