"""Files that a reader keeps open, and whether O_DIRECT works on each."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.runtime.reading.store_errors import StoreError


class OpenFile:
    """One file, opened once per mode when first read.

    ``direct`` is False once the file system has refused O_DIRECT; reads then go through the page cache, which is asked
    to forget them.
    """

    def __init__(self, path: Path, want_direct: bool):
        self.path = path
        self.direct = want_direct and hasattr(os, "O_DIRECT")
        self.forget = want_direct
        self._fds: dict[bool, int] = {}
        self._lock = threading.Lock()

    def fd(self) -> tuple[int, bool]:
        """The descriptor to read from and whether it is O_DIRECT. StoreError when the file cannot be opened."""
        with self._lock:
            if self.direct not in self._fds:
                self._fds[self.direct] = self._open()
            return self._fds[self.direct], self.direct

    def refuse_direct(self) -> None:
        """The file system refused an O_DIRECT read: the file is read through the page cache from now on."""
        self.direct = False

    def done_with(self, offset: int, nbytes: int) -> None:
        """Ask the page cache to drop what a buffered read left there."""
        if self.forget and not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fds[False], offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _open(self) -> int:
        try:
            if self.direct:
                try:
                    return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self.direct = False
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be opened ({error.strerror}); check that it is there and readable") from error


class FileTable:
    """Every file that a reader has met."""

    def __init__(self, want_direct: bool):
        self._want_direct = want_direct
        self._files: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> OpenFile:
        found = self._files.get(path)
        if found is None:
            with self._lock:
                found = self._files.setdefault(path, OpenFile(path, self._want_direct))
        return found

    def select(self, keep: Callable[[OpenFile], bool]) -> tuple[Path, ...]:
        with self._lock:
            return tuple(sorted(path for path, file in self._files.items() if keep(file)))

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
