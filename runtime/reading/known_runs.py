"""Extents as readers.c takes them, and the files that they are of."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.runtime.reading.blocks import check_fits, runs
from penstock.runtime.reading.files import FileTable
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native.readers_library import CFile
from penstock.runtime.reading.store_errors import StoreError

MOST_KEPT = 1 << 17
"""Extents that are kept as runs, at most: 48 bytes each."""


class Runs(NamedTuple):
    """Of ``extents`` in a buffer of ``nbytes``, wherever that lies, if it is as ``aligned``."""

    extents: Sequence[Extent]
    nbytes: int
    aligned: bool
    words: array[int]
    address: int


class KnownRuns:
    """Runs of ``files``, read in blocks of ``block_bytes``, or of ``staged_bytes`` where all is copied."""

    def __init__(self, files: FileTable, block_bytes: int, staged_bytes: int):
        self._files = files
        self._block_bytes, self._staged_bytes = block_bytes, staged_bytes
        self._opened: dict[Path, CFile] = {}
        self._paths: dict[int, Path] = {}
        self._known: dict[int, Runs] = {}
        self._kept = 0

    def of(self, extents: Sequence[Extent], nbytes: int, aligned: bool) -> Runs:
        """Those of a tuple are kept: units and experts are read again and again."""
        found = self._known.get(id(extents))
        if found is not None and found.extents is extents and found.nbytes == nbytes and found.aligned == aligned:
            return found
        check_fits(extents, nbytes)
        words = array("q")
        for run in runs(extents, self._block_bytes, self._staged_bytes, nbytes, aligned):
            words.append(ctypes.addressof(self._opened.get(run.file) or self.open(run.file)))
            words.extend(run[1:])
        made = Runs(extents, nbytes, aligned, words, words.buffer_info()[0])
        if isinstance(extents, tuple):
            if self._kept > MOST_KEPT:
                self._known.clear()
                self._kept = 0
            self._known[id(extents)] = made
            self._kept += len(extents)
        return made

    def open(self, path: Path) -> CFile:
        """How ``path`` is to be read from now on. One that cannot be opened comes back as odd, and is told of there."""
        file, state = self._files.get(path), -1
        try:
            fd, direct = file.fd()
            state = 4 * fd + 2 * file.forget + direct
        except StoreError:
            pass
        found = self._opened.setdefault(path, CFile(state))
        found.state = state
        self._paths[ctypes.addressof(found)] = path
        return found

    def path(self, file: int) -> Path:
        """Of the file whose ``CFile`` lies there."""
        return self._paths[file]
