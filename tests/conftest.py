"""Every test sees an empty user configuration and none of WSM's variables, whatever the machine has."""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

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
    gc.set_threshold(20_000, 20, 20)  # at 700 new objects, as it is at first, a tenth of what Hydra takes is the search for garbage
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


@pytest.fixture(autouse=True, scope="session")
def texts_parsed_once() -> Iterator[None]:
    """The configurations that Hydra composes: hundreds of tests run a verb in this process, and to parse the same presets is a third of
    what that takes. Known by their text; each caller gets objects of its own."""
    from omegaconf import OmegaConf

    parse, parsed = OmegaConf.load, dict[str, bytes]()

    def load(file: IO[str] | str | Path) -> DictConfig | ListConfig:
        if isinstance(file, str | Path):
            return parse(file)
        text = file.read()
        if text not in parsed:
            parsed[text] = pickle.dumps(parse(io.StringIO(text)))
        return pickle.loads(parsed[text])

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(OmegaConf, "load", staticmethod(load))
        yield


@pytest.fixture
def shared_models() -> Path:
    """The trained checkpoints beside the checkout; the test is skipped where they are absent."""
    if not (SHARED / "models").is_dir():
        pytest.skip("no ../shared/models beside this checkout")
    return SHARED / "models"
