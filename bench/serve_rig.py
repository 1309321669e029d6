"""A server in a process of its own, its figures, and its end: as the cases of bench/serve.py and bench/serve_faults.py use it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.sse import Address, fetch

ROOT = Path(__file__).resolve().parent.parent
VERB = "import sys; sys.argv[0] = 'runtime'; from penstock.runtime.cli import main; main()"
LISTENING = re.compile(r"listening on http://(?:\[)?([\w.:]+?)\]?:(\d+)")
SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Died(Exception):
    """The server ended by itself; the message is its last words."""


class Server:
    """``runtime serve`` with ``keys``; what it says goes to the file ``log``. Ends with the ``with`` block."""

    def __init__(self, log: Path, *keys: str, env: Mapping[str, str] | None = None, ready_s: float = 300.0, command: tuple[str, ...] = ()):
        self.log = log
        self._ready_s = ready_s
        self._command = command or (sys.executable, "-c", VERB, "serve", "port=0", *keys)
        self._env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.report: dict[str, Any] | None = None
        """What it said at its end, on standard output."""
        self.load_s = 0.0

    def __enter__(self) -> Server:
        begun = time.perf_counter()
        with self.log.open("wb") as log:
            out = self.log.with_suffix(".out").open("wb")
            with out:
                self._process = subprocess.Popen(self._command, env=self._env, stdout=out, stderr=log, start_new_session=True)
        try:
            self.address = self._listening()
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        self.load_s = time.perf_counter() - begun
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.stop()

    @property
    def pid(self) -> int:
        """Of the front."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def words(self) -> str:
        """The last that it said."""
        return self.log.read_text(errors="replace")[-1500:]

    def children(self) -> list[int]:
        """Processes that the front started: the engine."""
        return children_of(self.pid)

    def _listening(self) -> Address:
        return self._until(lambda: (m := LISTENING.search(self.log.read_text(errors="replace"))) and Address(m[1], int(m[2])))

    def wait_ready(self, within_s: float | None = None) -> None:
        """Until it takes requests. Died where it ended; TimeoutError where it took too long."""

        def is_ready() -> bool | None:
            try:
                return asyncio.run(fetch(self.address, "/ready"))[0] == 200 or None
            except (OSError, EOFError):
                return None

        self._until(is_ready, within_s)

    def _until(self, found: Any, within_s: float | None = None) -> Any:
        end = time.perf_counter() + (within_s or self._ready_s)
        while (value := found()) is None:
            if not self.running:
                raise Died(self.words)
            if time.perf_counter() > end:
                raise TimeoutError(f"not ready after {within_s or self._ready_s:g} s: {self.words}")
            time.sleep(0.05)
        return value

    def metrics(self) -> dict[str, float]:
        """The figures of /metrics, each under its name, labels behind it as they stand."""
        return parse_metrics(asyncio.run(fetch(self.address, "/metrics"))[1].decode())

    def machine(self) -> dict[str, Any]:
        """What the page polls."""
        return json.loads(asyncio.run(fetch(self.address, "/machine"))[1])

    def stop(self, within_s: float = 60.0) -> int:
        """Drain it -> its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        lines = self.log.with_suffix(".out").read_text(errors="replace").strip().splitlines()
        self.report = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        return status

    def kill(self) -> None:
        """End it on the spot."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def children_of(pid: int) -> list[int]:
    """Processes that live, which process ``pid`` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parts[1]) == pid and parts[0] != "Z":
            found.append(int(path.parent.name))
    return found


def parse_metrics(page: str) -> dict[str, float]:
    """Prometheus' text format: name and labels -> value."""
    return {name + (labels or ""): float(value) for name, labels, value in SAMPLE.findall(page)}


def grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    """By how much a counter grew, over all its labels."""
    return sum(value - before.get(key, 0.0) for key, value in after.items() if key.partition("{")[0] == name)


def histogram_share(before: Mapping[str, float], after: Mapping[str, float], name: str, share: float) -> float | None:
    """The value that ``share`` of a histogram's samples did not exceed, evenly spread within its bucket. None where nothing was counted,
    infinite beyond the last bound."""
    counts = []
    for key, value in after.items():
        if key.startswith(f"{name}_bucket{{"):
            counts.append((float(dict(LABEL.findall(key))["le"]), value - before.get(key, 0.0)))
    counts.sort()
    if not counts or not counts[-1][1]:
        return None
    wanted, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return low + (bound - low) * (wanted - below) / (count - below) if count > below and bound < float("inf") else bound
        low, below = bound, count
    return None
