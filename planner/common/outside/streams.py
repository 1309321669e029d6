"""The three standard streams as they may be: closed, on a full disk, of another encoding than the text."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from penstock.planner.common.errors import UserError

LONGEST = 3000
"""Characters of a line for people."""


class _Output(io.FileIO):
    """Standard output that says in one line that it cannot be written, once; what comes afterwards is dropped."""

    def __init__(self, fd: int):
        super().__init__(fd, "w", closefd=False)
        self._lost = False

    def write(self, data: Any) -> int:
        if self._lost:
            return memoryview(data).nbytes
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            self._lost = True
            raise UserError(f"standard output cannot be written ({error.strerror}); send it elsewhere") from error


def open_streams() -> None:
    """Put /dev/null where a standard stream is closed, so that no file of ours gets its number, and let text of any kind be printed."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stderr = sys.stderr or io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace")
    given = sys.stdout
    encoding = "utf-8" if given is None else given.encoding
    errors = "backslashreplace" if encoding.lower().replace("-", "") == "utf8" else "replace"
    unbuffered = isinstance(given, io.TextIOWrapper) and given.write_through
    writer = io.BufferedWriter(_Output(1))
    sys.stdout = io.TextIOWrapper(writer, encoding, errors, line_buffering=os.isatty(1), write_through=unbuffered)


def shortened(line: str) -> str:
    """``line`` without its middle where it is beyond reading, as when it names a value of megabytes."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST * 2 // 3]} ... {line[-LONGEST // 3 :]}"


def tell(line: str) -> None:
    """``line`` on standard error; nothing where that is gone, as with a closed terminal."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
