"""The probe's time: how much is left, what each measurement may take, and the bar that shows it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from penstock.planner.common.bars import make_bar


@dataclass(frozen=True)
class Shares:
    """Seconds that each measurement may take. SSD reading gets what the others leave, and ``read_least_s`` at least."""

    total_s: float
    """From the call to the profile: the promised limit less ``START_UP_S`` and ``OVERRUN_S``."""
    dram_s: float
    """Copying within DRAM; as much again for the bus, and once more beside a GPU's copies."""
    cpu_s: float
    """Each of the processor's figures."""
    gpu_s: float
    """Each of the GPU's figures."""
    write_s: float
    read_least_s: float
    """SSD reading, even when loading torch took the time that was meant for it."""
    sample_s: float
    """One SSD read sample."""
    arena_bytes: int
    """The DRAM mapping that is page-locked, copied, read and sent to the GPU."""
    scratch_bytes: int
    """The scratch file, as far as room and ``write_s`` allow: as large as a store that a run would read, whose pages no cache holds."""
    buffered_bytes: int
    """The same where writes pass through the page cache: the flush comes on top of ``write_s``."""
    ssd_blocks: tuple[int, ...]
    ssd_depths: tuple[int, ...]
    long_s: float = 0.0
    """One long read, of the time for SSD reading; 0: none."""
    decode_s: float = 0.0
    """Timing the decoders of each device and its products with coded weights, in a process that imports torch once more."""
    decode_rows: int = 0
    """Of a matrix that the CPU decodes meanwhile."""
    products_s: float = 0.0
    """Timing the CPU's products beside a GPU, in another such process; 0: none, and with a GPU no decoders either: plans derive them."""
    links_s: float = 0.0
    """Each figure of several GPUs' links, in a process for each GPU; 0: none, so that plans take each to be as fast as alone."""

    def holding(self, nbytes: int) -> Shares:
        """The same with a DRAM mapping of ``nbytes`` at least, which no cache holds."""
        return replace(self, arena_bytes=max(self.arena_bytes, nbytes))


START_UP_S = 3.0
"""Python, the configuration and the table: what the promised limit must hold beside the probe itself."""
OVERRUN_S = {"full": 6.0, "quick": 3.0}
"""How far measurements may pass their shares together, on a busy machine (6 s were seen at 5 runnable tasks a core)."""

_MIB = 2**20
FULL = Shares(
    60 - START_UP_S - OVERRUN_S["full"],
    0.8,
    1.5,
    0.5,
    5.0,
    10.0,
    0.4,
    2048 * _MIB,
    16384 * _MIB,
    4096 * _MIB,
    tuple(b * _MIB for b in (1, 4, 8, 16)),
    (1, 2, 4, 8, 16),
    12.0,
    2.0,
    2048,
    4.0,
    0.5,
)
QUICK = Shares(
    15 - START_UP_S - OVERRUN_S["quick"],
    0.2,
    0.4,
    0.1,
    1.2,
    2.0,
    0.15,
    1024 * _MIB,
    4096 * _MIB,
    1024 * _MIB,
    tuple(b * _MIB for b in (1, 4, 16)),
    (1, 4, 16),
    decode_s=0.3,
    decode_rows=512,
)


class Meter:
    """A progress bar over elapsed time, and the seconds left. Used as a context manager."""

    def __init__(self, total_s: float) -> None:
        self._start = time.monotonic()
        self._total_s = total_s
        self._progress = make_bar(TextColumn("[bold]probe[/bold]"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._task = self._progress.add_task("", total=total_s)

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        return max(0.0, self._total_s - self.elapsed_s)

    def say(self, doing: str) -> None:
        """Name what is being measured now."""
        self._progress.update(self._task, description=doing, completed=self.elapsed_s)

    def tick(self) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=self.elapsed_s)


def median_seconds(work: Callable[[], object], seconds: float, least: int = 3) -> float:
    """Median duration of ``work()`` after one warm-up call: ``least`` calls or as many as fit in ``seconds``."""
    work()
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < least or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)
