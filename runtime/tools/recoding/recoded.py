"""A checkpoint in another format that lies nowhere: its headers are files, its tensors are made as they are read."""

from __future__ import annotations

import bisect
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import torch

from penstock.planner.contract.checkpoint.checkpoint_files import CONFIG, SINGLE
from penstock.planner.contract.checkpoint.safetensors_header import DTYPE_BITS, TensorEntry, read_header
from penstock.runtime.reading.layout import Extent
from penstock.runtime.tools.recoding.recoder import Recoder
from penstock.runtime.tools.recoding.sources import Sources

_Described = tuple[str, tuple[int, ...]]
"""Dtype as safetensors names it, and shape."""


class Recoded:
    """``sources`` as ``recoder`` writes them. ``directory`` gets the small files ``beside`` the checkpoint, a config.json that says the
    format, and one safetensors file that is all holes behind its header: it takes no disk."""

    def __init__(self, sources: Sources, recoder: Recoder, directory: Path, beside: Iterable[Path]):
        self.directory = directory
        self._sources, self._recoder = sources, recoder
        self._source_of = {leaf: name for name, leaves in recoder.leaves.items() for leaf in leaves}
        for path in beside:
            shutil.copyfile(path, directory / path.name)
        config = dict(sources.checkpoint.whole_config) | {"quantization_config": dict(recoder.said)}
        (directory / CONFIG).write_text(json.dumps(config, indent=2))
        _write_header(directory / SINGLE, self._described())
        self._entries: Mapping[str, TensorEntry] = read_header(directory / SINGLE)
        self._names = list(self._entries)
        self._starts = [entry.offset for entry in self._entries.values()]
        self._encoded = lru_cache(maxsize=1)(self._encode)

    @property
    def plain_units(self) -> list[str]:
        """Units of which no matrix has the format; all routed experts are one."""
        units = self._sources.units
        return sorted({*units.values()} - {units[name] for name in self._recoder.leaves})

    def read(self, extents: Iterable[Extent], view: memoryview) -> None:
        """Make the bytes of ``extents`` of the file, and put them in their places of ``view``. Takes what one matrix does, as it was and as
        it is coded."""
        for extent in extents:
            at = extent.offset
            while at < extent.offset + extent.nbytes:
                name = self._names[bisect.bisect_right(self._starts, at) - 1]
                entry = self._entries[name]
                stop = min(entry.offset + entry.nbytes, extent.offset + extent.nbytes)
                dest = extent.dest + at - extent.offset
                self._fill(name, at - entry.offset, view[dest : dest + stop - at])
                at = stop

    def _fill(self, name: str, start: int, piece: memoryview) -> None:
        """``piece`` with the bytes of the tensor ``name`` from ``start`` on."""
        source, shape = self._source_of.get(name), self._entries[name].shape
        if source is None:
            _copy(self._sources.read(name), start, piece)
        elif len(self._sources.matrices[source]) == 2:
            _copy(self._encoded(source, None)[name], start, piece)
        else:
            each = self._entries[name].nbytes // shape[0]
            for expert in range(start // each, -(-(start + len(piece)) // each)):
                first, last = max(start, expert * each), min(start + len(piece), (expert + 1) * each)
                _copy(self._encoded(source, expert)[name], first - expert * each, piece[first - start : last - start])

    def _encode(self, source: str, expert: int | None) -> Mapping[str, torch.Tensor]:
        return self._recoder.encode(source, self._sources.read(source, expert))

    def _described(self) -> dict[str, _Described]:
        """All tensors, the leaves of a matrix where it was."""
        found: dict[str, _Described] = {}
        leaves = self._recoder.leaves
        for name, entry in self._sources.checkpoint.tensors.items():
            found |= leaves.get(name, {name: (entry.dtype, entry.shape)})
        return found


def _copy(tensor: torch.Tensor, start: int, piece: memoryview) -> None:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)[start : start + len(piece)]
    torch.frombuffer(piece, dtype=torch.uint8).copy_(data)


def _write_header(path: Path, tensors: Mapping[str, _Described]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        os.truncate(file.fileno(), 8 + len(text) + end)
