"""A process without torch that forks writers, so that hundreds can be killed in seconds. Started by ``Nursery``."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Nursery:
    """Starts children that run a function of this file, given by name, with JSON arguments."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, function: str, **arguments: object) -> int:
        """The child's pid."""
        return self._ask([function, arguments])

    def hold(self, directory: Path) -> int:
        """A child that has opened ``directory`` for writing and stopped, all its threads with it: it holds the lock and changes nothing."""
        pid = self.start("hold", directory=str(directory))
        assert self._ask(["stopped", {"pid": pid}])
        return pid

    def kill(self, pid: int) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL

    def wait(self, pid: int) -> int:
        return self._ask(["wait", {"pid": pid}])

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, message: list) -> int:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def write_forever(directory: str, start: int, universe: int, pages: int, segment_pages: int) -> None:
    """Put the pages 0..universe-1 in turn, over and over, as fast as the queue takes them."""
    from penstock.runtime.kv.disk.page_record import checksum_of
    from tests.runtime.kv.pages import key_of, open_writer

    buffers = _buffers(universe)
    sums = [checksum_of(buffer) for buffer in buffers]
    writer = open_writer(Path(directory), pages=pages, segment_pages=segment_pages, warn=lambda line: None)
    i = start
    while True:
        i += writer.put(key_of(i % universe), bytes(16), buffers[i % universe], sums[i % universe], lambda stored: None)


@functools.cache
def _buffers(universe: int) -> list[memoryview]:
    """Made once, before the first fork."""
    from tests.runtime.kv.pages import buffer_of, key_of

    return [buffer_of(key_of(i)) for i in range(universe)]


def write_under_limit(directory: str, file_bytes: int, report: str) -> None:
    """Put twelve pages while no file may grow beyond ``file_bytes``."""
    import resource

    from tests.runtime.kv.pages import open_writer, put

    lines = []
    writer = open_writer(Path(directory), segment_pages=8, warn=lines.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    stored = put(writer, *range(12))
    writer.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path(report).write_text(json.dumps({"stored": stored, "counters": writer.counters(), "lines": lines}))


def hold(directory: str) -> None:
    """Keep the writer's lock."""
    from tests.runtime.kv.pages import open_writer

    writer = open_writer(Path(directory))
    os.kill(os.getpid(), signal.SIGSTOP)
    writer.close()


def clear(directory: str) -> None:
    """Remove every page."""
    from penstock.runtime.kv.disk import upkeep

    upkeep.clear(Path(directory))


def _serve() -> None:
    sys.path[0] = str(ROOT)  # not this directory
    importlib.import_module("tests.runtime.kv.pages")
    importlib.import_module("penstock.runtime.kv.disk.upkeep")
    importlib.import_module("penstock.runtime.kv.disk.kept_rate")
    assert "torch" not in sys.modules, "the disk tier imports torch"
    for line in sys.stdin:
        function, arguments = json.loads(line)
        if function == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(arguments["pid"], 0)[1])
        elif function == "stopped":
            answer = os.WIFSTOPPED(os.waitpid(arguments["pid"], os.WUNTRACED)[1])
        else:
            if "universe" in arguments:
                _buffers(arguments["universe"])
            answer = os.fork()
            if not answer:
                os.close(0)
                os.close(1)
                globals()[function](**arguments)
                os._exit(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
