"""Reads without the interpreter: the same bytes, errors and facts as its own threads give, and nothing left behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.checkpoint.checkpoint_files import TensorEntry
from penstock.runtime.moving.arriving_scales import ArrivingScales, UrgentSoundReads
from penstock.runtime.reading import block_reader, known_runs, reader
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native import readers_library
from penstock.runtime.reading.native_readers import NativeReaders
from penstock.runtime.reading.python_readers import PythonReaders
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.reading.reads_inbox import Ticket
from penstock.runtime.reading.store_errors import StoreError
from penstock.runtime.store.scales import Scale
from tests.cli import HANGS_S, ROOT

pytestmark = pytest.mark.skipif(not readers_library.readers_file().exists(), reason="no compiler made the readers")
SIZE = 300_007
REGION = 32 * ALIGN
"""Of the buffer, for one extent."""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    data, path = random.Random(3).randbytes(SIZE), tmp_path_factory.mktemp("read") / "weights.bin"
    path.write_bytes(data)
    return path, data


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "BACK_OFF_S", (0.0, 0.0, 0.0))


def in_python(fd: int, views: Sequence[memoryview], offset: int) -> int:
    return os.preadv(fd, views, offset)


def buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def handed_back(pool: ReadPool, path: Path) -> None:
    """The next blocks of ``path`` come back to Python, until one was read there."""
    pool._readers._known.open(path).state = -1  # type: ignore[union-attr]


@st.composite
def asked(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """(offset, bytes, where in its region, whether it owns its pages) of some extents."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, SIZE - 1))
        nbytes = draw(st.one_of(st.integers(1, 3 * ALIGN), st.integers(1, 20 * ALIGN), st.just(5 * ALIGN)))
        if draw(st.booleans()):
            offset -= offset % ALIGN
        kept = draw(st.booleans())
        found.append((offset, min(nbytes, SIZE - offset), offset % ALIGN if kept else draw(st.integers(0, ALIGN)), draw(st.booleans())))
    return found


@settings(deadline=None, max_examples=120)
@given(
    asked=asked(), block_pages=st.integers(1, 8), staged_pages=st.integers(1, 4), threads=st.integers(1, 4), direct=st.booleans(),
    shift=st.sampled_from([0, 0, 1, 512]),
)  # fmt: skip
def test_all_alignments_give_the_bytes_and_the_blocks_that_python_gives(
    content: tuple[Path, bytes], asked: list[tuple[int, int, int, bool]], block_pages: int, staged_pages: int, threads: int,
    direct: bool, shift: int,
) -> None:  # fmt: skip
    path, data = content
    extents = tuple(Extent(path, offset, nbytes, i * REGION + at, owns) for i, (offset, nbytes, at, owns) in enumerate(asked))
    got, facts = [], []
    for preadv in (in_python, os.preadv):
        whole, blocks = buffer((len(extents) + 1) * REGION), []
        into = whole[shift:]
        into[:] = b"\xff" * len(into)
        staging = buffer(threads * staged_pages * ALIGN)
        keep = lambda *fact, blocks=blocks: blocks.append((fact[1], fact[2], fact[5]))  # noqa: E731
        with ReadPool(threads, block_pages * ALIGN, staging, direct, preadv, keep) as pool:
            assert isinstance(pool._readers, PythonReaders if preadv is in_python else NativeReaders)
            for _ in range(2):
                pool.read_now(extents, into)
            meter = pool.meter
            assert meter.busy_seconds > 0 and meter.retries == 0
            facts.append((meter.bytes, meter.reads, pool.direct_files, pool.buffered_files))
        got.append(bytes(into))
        facts.append(sorted(blocks))
    assert got[0] == got[1] and facts[:2] == facts[2:]
    for e in extents:
        assert got[1][e.dest : e.dest + e.nbytes] == data[e.offset : e.offset + e.nbytes]


def test_a_file_that_is_too_short_is_named_as_python_names_it(content: tuple[Path, bytes]) -> None:
    path, data = content
    into, lines = buffer(100 * ALIGN), []
    for preadv in (in_python, os.preadv):
        with ReadPool(2, 16 * ALIGN, preadv=preadv) as pool:
            with pytest.raises(StoreError) as caught:
                pool.read_now([Extent(path, 0, SIZE + 1, 0, True)], into)
            lines.append((str(caught.value), pool.meter.retries))
            pool.read_now([Extent(path, 0, 5 * ALIGN, 0, True)], into)
            assert into[: 5 * ALIGN] == data[: 5 * ALIGN]
    assert lines[0] == lines[1] and f"offset {SIZE // ALIGN * ALIGN} failed 4 times (the file ends there)" in lines[0][0]


def test_a_missing_file_is_one_line_and_is_read_once_it_is_there(tmp_path: Path) -> None:
    late = tmp_path / "late"
    with ReadPool(2, ALIGN) as pool:
        extents = (Extent(late, 0, 10, 0),)
        with pytest.raises(StoreError, match="late: cannot be opened"):
            pool.read_now(extents, buffer(ALIGN))
        late.write_bytes(b"0123456789")
        into = buffer(ALIGN)
        pool.read_now(extents, into)
        assert into[:10] == b"0123456789"


def test_a_file_system_that_refuses_o_direct_is_read_through_the_page_cache_from_then_on(content: tuple[Path, bytes]) -> None:
    path, data = content
    refused, forgotten = [], 0

    def refusing(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.preadv(fd, views, offset)

    into = buffer(64 * ALIGN)
    with ReadPool(1, 4 * ALIGN) as pool:
        pool._blocks.preadv = refusing
        handed_back(pool, path)
        pool.read_now([Extent(path, 77, 30 * ALIGN, 77, True), Extent(path, 200_000, 999, 50 * ALIGN + 3)], into)
        assert pool.buffered_files == (path,) and pool.direct_files == () and len(refused) == 1
        forgotten = pool._readers._known.open(path).state & 3  # type: ignore[union-attr]
    assert forgotten == 2, "not direct; the page cache is asked to forget"
    assert into[77 : 77 + 30 * ALIGN] == data[77 : 77 + 30 * ALIGN]
    assert into[50 * ALIGN + 3 : 50 * ALIGN + 1002] == data[200_000:200_999]


class Held:
    """A pool's way to read in Python, which holds blocks back."""

    def __init__(self, pool: ReadPool, path: Path):
        self.begun, self.go = threading.Event(), threading.Event()
        pool._blocks.preadv = self._preadv
        handed_back(pool, path)

    def _preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.begun.set()
        assert self.go.wait(HANGS_S)
        return os.preadv(fd, views, offset)


def test_urgent_reads_go_before_those_that_have_not_begun(content: tuple[Path, bytes]) -> None:
    path, _ = content
    read, last = list[str](), threading.Event()
    with ReadPool(1, ALIGN, on_block=lambda reader, name, *_: read.append(name)) as pool:
        held = Held(pool, path)
        pool.read([Extent(path, 0, 3 * ALIGN, 0, True)], buffer(3 * ALIGN), lambda error: None, "usual")
        assert held.begun.wait(HANGS_S)
        pool.read([Extent(path, 5 * ALIGN, ALIGN, 0, True)], buffer(ALIGN), lambda error: last.set(), "late")
        parts = [(Extent(path, 8 * ALIGN, 2 * ALIGN, 0, True),), (Extent(path, 3 * ALIGN, ALIGN, 2 * ALIGN, True),)]
        pool.read_each(parts, buffer(3 * ALIGN), [lambda error: None] * 2, "urgent", urgent=True)
        held.go.set()
        assert last.wait(HANGS_S)
    assert read == ["usual", *["urgent"] * 3, *["usual"] * 2, "late"]


def test_whoever_waits_for_several_reads_is_woken_when_all_have_come_or_by_a_word(content: tuple[Path, bytes]) -> None:
    path, _ = content
    with ReadPool(1, ALIGN) as pool:
        inbox, woken = pool.inbox(), list[list[object]]()
        for i in range(2):
            pool.read([Extent(path, i * ALIGN, ALIGN, 0, True)], buffer(ALIGN), Ticket(inbox, i))
        heard: list[object] = []
        while len(heard) < 2:  # may come back early, as for a signal
            heard += inbox.take(HANGS_S, 2 - len(heard))
        assert heard == [(0, None), (1, None)]
        waiter = threading.Thread(target=lambda: woken.append(inbox.take(HANGS_S, 3)))
        begun = time.monotonic()
        waiter.start()
        inbox.put("a word")
        waiter.join()
        assert woken == [[("a word", None)]] and time.monotonic() - begun < HANGS_S


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu]),
    block=st.sampled_from([0, 18, 34, 84, 210]), places=st.sets(st.integers(0, 14), min_size=1, max_size=2),
    nbytes=st.integers(1, 5000), cut=st.integers(0, 300), odd=st.booleans(), seed=st.integers(0, 10**6), bad=st.booleans(),
)  # fmt: skip
def test_readers_refuse_the_numbers_that_python_refuses(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, block: int, places: set[int], nbytes: int, cut: int, odd: bool, seed: int,
    bad: bool,
) -> None:  # fmt: skip
    """Of any kind, cut anywhere, at any place of a buffer."""
    draw = random.Random(seed)
    path = tmp_path_factory.mktemp("scales") / "weights"
    stored = bytearray(draw.choice(b"\x01\x22\x38\x3c\x40") for _ in range(nbytes + cut + 100))
    if bad:
        at = draw.randrange(len(stored) - 4)
        stored[at : at + 4] = b"\xff" * 4
    path.write_bytes(stored)
    entry = TensorEntry(path, 50, len(stored) - 50, "U8", (1, 1))
    scale = Scale("scales", entry, True, dtype, block, tuple(sorted(places)) if block else (0,))
    extents = (Extent(path, 50 + cut, nbytes, 7 * odd + 3),)
    into, heard = buffer(4 * ALIGN), list[tuple[object, BaseException | None]]()
    with ReadPool(1, ALIGN) as pool:
        reads, inbox = UrgentSoundReads(pool, ArrivingScales([scale])), pool.inbox()
        reads.read_each([extents], into, [Ticket(inbox, "read")], "read", True)
        while not heard:
            heard += inbox.take(HANGS_S)
    ((_, error),) = heard
    at = extents[0].dest
    assert (error is None) == scale.is_sound(into[at : at + nbytes], cut), error
    assert error is None or "holds scales that are no numbers" in str(error)


def test_what_is_expected_is_cut_beforehand(content: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = content
    extents, into = (Extent(path, 77, 3 * ALIGN, 77),), buffer(4 * ALIGN)
    with ReadPool(1, ALIGN) as pool:
        UrgentSoundReads(pool, ArrivingScales([])).expect([extents], len(into))
        monkeypatch.setattr(known_runs, "runs", lambda *_: pytest.fail("cut again"))
        pool.read_now(extents, into)
    assert bytes(into[77 : 77 + 3 * ALIGN]) == data[77 : 77 + 3 * ALIGN]


def test_closing_fails_what_waits_and_waits_for_what_runs(content: tuple[Path, bytes]) -> None:
    path, _ = content
    outcomes = list[tuple[int, BaseException | None]]()
    pool = ReadPool(1, ALIGN)
    held, inbox = Held(pool, path), pool.inbox()
    pool.read([Extent(path, 0, ALIGN, 0, True)], buffer(ALIGN), lambda error: outcomes.append((0, error)))
    pool.read([Extent(path, ALIGN, 2 * ALIGN, 0, True)], buffer(2 * ALIGN), lambda error: outcomes.append((1, error)))
    pool.read([Extent(path, 7 * ALIGN, 2 * ALIGN, 0, True)], buffer(2 * ALIGN), Ticket(inbox, 2))
    assert held.begun.wait(HANGS_S)
    closer = threading.Thread(target=pool.close)
    closer.start()
    while not pool._readers.closed:
        pass
    held.go.set()
    closer.join(HANGS_S)
    ((two, cancelled),) = inbox.take(0.0)
    assert [number for number, _ in outcomes] == [0, 1] and outcomes[0][1] is None and two == 2
    assert str(outcomes[1][1]) == f"{path}: read at offset {ALIGN} was cancelled"
    assert str(cancelled) == f"{path}: read at offset {7 * ALIGN} was cancelled"
    with pytest.raises(StoreError, match="the reader is closed"):
        pool.read([Extent(path, 0, ALIGN, 0, True)], buffer(ALIGN), lambda error: None)
    pool.close()


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.02])
def test_every_read_is_told_of_once_whenever_the_pool_is_closed(content: tuple[Path, bytes], delay: float) -> None:
    path, _ = content
    told, into = list[int](), buffer(64 * ALIGN)
    pool = ReadPool(3, ALIGN)
    inbox = pool.inbox()
    for i in range(300):
        done: Any = Ticket(inbox, i) if i % 2 else lambda error, i=i: told.append(i)
        pool.read((Extent(path, i * 100, 9 * ALIGN, 0),), into, done, urgent=i % 3 == 0)
    threading.Event().wait(delay)
    pool.close()
    while came := inbox.take(0.0):
        told += [key for key, _ in came]
    assert sorted(told) == [*range(300)]


def test_many_threads_ask_at_once(content: tuple[Path, bytes]) -> None:
    path, data = content
    wrong = list[str]()

    def ask(seed: int, pool: ReadPool) -> None:
        draw, inbox = random.Random(seed), pool.inbox()
        into, open_ = buffer(40 * REGION), {}
        for i in range(40):
            nbytes = draw.randint(1, 12 * ALIGN)
            e = open_[i] = Extent(path, draw.randint(0, SIZE - nbytes), nbytes, i * REGION + draw.randint(0, ALIGN))
            pool.read((e,), into, Ticket(inbox, i), urgent=draw.random() < 0.5)
        while open_:
            for key, error in inbox.take(HANGS_S):
                e = open_.pop(key)
                if error is not None or into[e.dest : e.dest + e.nbytes] != data[e.offset : e.offset + e.nbytes]:
                    wrong.append(f"{seed}: {e} {error}")

    with ReadPool(4, 2 * ALIGN) as pool:
        threads = [threading.Thread(target=ask, args=(seed, pool)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_S)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_read_of_nothing_is_over(content: tuple[Path, bytes]) -> None:
    path, _ = content
    with ReadPool(1, ALIGN) as pool:
        pool.read_now([], buffer(ALIGN))
        pool.read_now([Extent(path, 0, 0, 0)], buffer(ALIGN))


def test_all_is_booked_however_seldom_somebody_asks(content: tuple[Path, bytes]) -> None:
    """More blocks than are noted at once."""
    path, _ = content
    into, times = buffer(SIZE // ALIGN * ALIGN), 80
    with ReadPool(3, ALIGN) as pool:
        for _ in range(times):
            pool.read_now((Extent(path, 0, SIZE // ALIGN * ALIGN, 0, True),), into)
        assert (pool.meter.reads, pool.meter.bytes) == (times * (SIZE // ALIGN), times * len(into))
        assert pool.stalls.facts()["median_s"] > 0


def test_a_ticket_brings_the_error_and_the_pool_goes_on(content: tuple[Path, bytes], tmp_path: Path) -> None:
    path, _ = content
    with ReadPool(2, ALIGN) as pool:
        inbox = pool.inbox()
        pool.read((Extent(tmp_path / "gone", 0, 10, 0),), buffer(ALIGN), Ticket(inbox, "gone"))
        pool.read((Extent(path, 0, 10, 0),), buffer(ALIGN), Ticket(inbox, "there"))
        heard = dict[object, BaseException | None]()
        while len(heard) < 2:
            heard |= dict(inbox.take(HANGS_S))
        assert heard["there"] is None and "gone: cannot be opened" in str(heard["gone"])
        inbox.put("own", ValueError("x"))
        ((key, error),) = inbox.take(0.0)
        assert key == "own" and isinstance(error, ValueError) and inbox.take(0.0) == []


def test_a_callback_that_raises_is_told_to_whoever_reads_next(content: tuple[Path, bytes]) -> None:
    path, _ = content
    with ReadPool(1, ALIGN) as pool:
        pool.read([Extent(path, 0, 10, 0)], buffer(ALIGN), lambda error: 1 / 0)
        until_broken = threading.Event()
        while pool._readers.broken is None:
            until_broken.wait(0.001)
        with pytest.raises(ZeroDivisionError):
            pool.read([Extent(path, 0, 10, 0)], buffer(ALIGN), lambda error: None)


class Rang(Exception):
    pass


def test_whoever_waits_hears_signals() -> None:
    def ring(*_: object) -> None:
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with ReadPool(1, ALIGN) as pool:
            inbox = pool.inbox()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Rang):
                inbox.take(HANGS_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def left_open() -> tuple[int, int]:
    """Descriptors and threads of this process, once those that have ended are gone."""
    seen = []
    for _ in range(20):
        time.sleep(0.005)
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return min(seen)


def test_nothing_is_left_behind(content: tuple[Path, bytes]) -> None:
    path, _ = content

    def once() -> None:
        with ReadPool(4, ALIGN) as pool:
            inbox = pool.inbox()
            pool.read((Extent(path, 5, 9 * ALIGN, 0),), buffer(10 * ALIGN), Ticket(inbox, 0))
            pool.read_now([Extent(path, 5, 9 * ALIGN, 0)], buffer(10 * ALIGN))

    once()
    before = left_open()
    for _ in range(20):
        once()
    assert left_open() == before


ENDING = """
import mmap, os, sys
from pathlib import Path
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native_readers import NativeReaders
from penstock.runtime.reading.reader import ReadPool

for how in ("fork", "fork and close", "exit"):
    pool = ReadPool(4, 4096)
    assert isinstance(pool._readers, NativeReaders)
    into = memoryview(mmap.mmap(-1, 1 << 18))
    for k in range(400):
        pool.read((Extent(Path(sys.argv[1]), k, 100_000, 0),), into, lambda error: None)
    if how != "exit":
        child = os.fork()
        if not child:
            if how == "fork and close":
                pool.close()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, how
        pool.close()
print("ended")
"""


def test_a_process_with_reads_under_way_ends(content: tuple[Path, bytes]) -> None:
    """Without closing; and its forks, which have no threads, closing and not."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDING, str(content[0])]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=HANGS_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ended\n", "")


@pytest.fixture
def library() -> Iterator[None]:
    """Anew, and as it was before."""
    readers_library.readers_library.cache_clear()
    yield
    readers_library.readers_library.cache_clear()


def test_where_nothing_is_compiled_pythons_threads_read(
    content: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch, library: None, tmp_path: Path
) -> None:
    path, data = content
    monkeypatch.setattr(readers_library, "readers_file", lambda: tmp_path / "none.so")
    with ReadPool(2, ALIGN) as pool:
        assert isinstance(pool._readers, PythonReaders)
        inbox, into = pool.inbox(), buffer(3 * ALIGN)
        pool.read((Extent(path, 5, 2 * ALIGN, 0),), into, Ticket(inbox, "all"))
        assert inbox.take(HANGS_S) == [("all", None)] and into[: 2 * ALIGN] == data[5 : 5 + 2 * ALIGN]


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, library: None, tmp_path: Path) -> None:
    monkeypatch.setattr(readers_library, "VERSION", readers_library.VERSION + 1)
    with pytest.raises(UserError, match="was built from other sources: run `pip install -e .`"):
        reader.readers_library()
    readers_library.readers_library.cache_clear()
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(readers_library, "readers_file", lambda: broken)
    with pytest.raises(UserError, match="cannot be loaded"):
        reader.readers_library()


def test_what_c_and_python_say_of_sizes_is_the_same() -> None:
    assert ctypes.sizeof(readers_library.CFact) == 56 and ctypes.sizeof(readers_library.CFile) == 4
