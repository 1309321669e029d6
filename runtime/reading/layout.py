"""How parameters lie in a buffer, and where their bytes come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.planner.common.measures import ALIGN, align_down, align_up

PARAMETER_ALIGN = 256
"""Alignment in bytes of a parameter that the store may place freely: what CUDA's allocator gives and its kernels like best."""
MOST_RUNS = 2
"""Runs of a file that a unit is read from straight into its buffer, the smaller others apart: each is padded to pages of its own, and is a
copy of its own to a card."""
SMALL_PART = 16
"""A run is small that is less than one part in so many of its unit."""
READ_ALONG_BYTES = 64 * 1024
"""Gaps of a file up to this size are read rather than skipped: shorter than one seek costs on any drive."""


@dataclass(frozen=True)
class Piece:
    """``nbytes`` bytes at ``offset`` of checkpoint tensor ``tensor`` that belong at ``dest`` of a parameter."""

    tensor: str
    offset: int
    nbytes: int
    dest: int


@dataclass(frozen=True)
class Extent:
    """One contiguous run of a file that lands at ``dest`` in a buffer."""

    file: Path
    offset: int
    nbytes: int
    dest: int
    owns_pages: bool = False
    """Whether the 4096-byte pages around [dest, dest + nbytes) belong to this extent alone. If also ``dest`` equals ``offset`` modulo 4096,
    O_DIRECT may read the aligned superset straight into the buffer."""


@dataclass(frozen=True)
class TensorLayout:
    """A parameter inside a buffer: ``nbytes`` contiguous bytes at ``offset``, row-major."""

    name: str
    """Relative to its layer for units (``self_attn.q_proj.weight``), the full module name for others (``model.norm.weight``)."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True)
class UnitLayout:
    """How a unit lies in its 4096-aligned buffer of ``nbytes`` bytes (a multiple of 4096, padding included)."""

    nbytes: int
    tensors: tuple[TensorLayout, ...]
    extents: Sequence[Extent]
    payload_bytes: int
    """Bytes of the parameters alone."""


@dataclass(frozen=True)
class Parameter:
    """A module's parameter with the checkpoint pieces that fill it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Source:
    """Where a checkpoint tensor lies."""

    file: Path
    offset: int


def lay_in_place(parameters: Iterable[Parameter], sources: Mapping[str, Source]) -> UnitLayout:
    """Lay parameters out so that a file's bytes land with as few copies as they can.

    A parameter that is one run of a file keeps its alignment, beside its neighbours in the file. A parameter of several pieces is laid
    where most of its bytes keep their alignment. Then only the 4096-byte pages at a piece's edges are copied; the rest is read straight
    into the buffer. Beyond ``MOST_RUNS`` the small runs lie behind one another, and are copied. They lie behind the last large one as in
    VRAM, whose parameters are 256-byte aligned, so that they are copied to a card together; if their types can be read at such places.
    """
    parameters = list(parameters)
    total = sum(p.nbytes for p in parameters)
    direct: list[tuple[Path, int, Parameter]] = []
    assembled: list[Parameter] = []
    for p in parameters:
        start = sources[p.pieces[0].tensor].offset + p.pieces[0].offset
        if len(p.pieces) == 1 and start % p.dtype.itemsize == 0:
            direct.append((sources[p.pieces[0].tensor].file, start, p))
        else:
            assembled.append(p)
    offsets: dict[str, int] = {}
    extents: list[Extent] = []
    end = 0
    clusters = _clusters(sorted(direct, key=lambda d: (str(d[0]), d[1])))
    packed = [cluster for cluster in sorted(clusters, key=_bytes_of)[:-MOST_RUNS] if SMALL_PART * _bytes_of(cluster) < total]
    for cluster in clusters:
        if cluster in packed:
            continue
        file, first, _ = cluster[0]
        stop = max(start + p.nbytes for _, start, p in cluster)
        dest = end + first % ALIGN
        offsets |= {p.name: dest + start - first for _, start, p in cluster}
        extents.append(Extent(file, first, stop - first, dest, owns_pages=True))
        end = align_up(dest + stop - first)
    for p in assembled:
        offsets[p.name] = end + (_place_in_page(p, sources) - end) % ALIGN
        end = offsets[p.name] + p.nbytes
    small, begin = [p for cluster in packed for _, _, p in cluster], 0
    if small and not assembled:
        last = next(cluster for cluster in reversed(clusters) if cluster not in packed)
        at = offsets[last[-1][2].name]
        if all(at % p.dtype.itemsize == 0 for p in small):
            extents[-1] = replace(extents[-1], owns_pages=False)
            begin, end = at, extents[-1].dest + extents[-1].nbytes
    for p in small:
        offsets[p.name] = begin + align_up(end - begin, PARAMETER_ALIGN)
        end = offsets[p.name] + p.nbytes
    extents += _staged(((p, offsets[p.name]) for p in (*assembled, *small)), sources)
    return _layout(parameters, offsets, extents, end)


def lay_packed(parameters: Iterable[Parameter], sources: Mapping[str, Source]) -> UnitLayout:
    """Lay parameters out one after the other, each 256-byte aligned: a packed store's order. All extents go through staging."""
    parameters = list(parameters)
    offsets: dict[str, int] = {}
    end = 0
    for p in parameters:
        offsets[p.name] = align_up(end, PARAMETER_ALIGN)
        end = offsets[p.name] + p.nbytes
    return _layout(parameters, offsets, _staged(((p, offsets[p.name]) for p in parameters), sources), end)


def _layout(parameters: list[Parameter], offsets: Mapping[str, int], extents: Iterable[Extent], end: int) -> UnitLayout:
    tensors = tuple(TensorLayout(p.name, p.shape, p.dtype, offsets[p.name], p.nbytes) for p in parameters)
    return UnitLayout(align_up(end), tensors, tuple(extents), sum(p.nbytes for p in parameters))


def _clusters(runs: list[tuple[Path, int, Parameter]]) -> list[list[tuple[Path, int, Parameter]]]:
    """Group sorted runs whose gaps are read along. Two parameters on the same bytes share a cluster."""
    clusters: list[list[tuple[Path, int, Parameter]]] = []
    stop = 0
    for run in runs:
        file, start, p = run
        if clusters and clusters[-1][0][0] == file and align_down(start) <= align_up(stop) + READ_ALONG_BYTES:
            clusters[-1].append(run)
            stop = max(stop, start + p.nbytes)
        else:
            clusters.append([run])
            stop = start + p.nbytes
    return clusters


def _bytes_of(cluster: Sequence[tuple[Path, int, Parameter]]) -> int:
    return sum(p.nbytes for _, _, p in cluster)


def _place_in_page(p: Parameter, sources: Mapping[str, Source]) -> int:
    """The offset modulo 4096 that lets most bytes of ``p`` keep their file's place within the page."""
    bytes_of: dict[int, int] = {}
    for piece in p.pieces:
        place = (sources[piece.tensor].offset + piece.offset - piece.dest) % ALIGN
        bytes_of[place] = bytes_of.get(place, 0) + piece.nbytes
    best = max(bytes_of, key=lambda place: bytes_of[place])
    return best if best % p.dtype.itemsize == 0 else 0


def _staged(placed: Iterable[tuple[Parameter, int]], sources: Mapping[str, Source]) -> list[Extent]:
    """Extents of every piece in file order, merged where both file and buffer go on without a gap."""
    runs = []
    for p, base in placed:
        for piece in p.pieces:
            source = sources[piece.tensor]
            runs.append((str(source.file), source.offset + piece.offset, piece.nbytes, base + piece.dest, source.file))
    merged: list[Extent] = []
    for _, offset, nbytes, dest, file in sorted(runs):
        last = merged[-1] if merged else None
        if last and last.file == file and last.offset + last.nbytes == offset and last.dest + last.nbytes == dest:
            merged[-1] = Extent(file, last.offset, last.nbytes + nbytes, last.dest)
        else:
            merged.append(Extent(file, offset, nbytes, dest))
    return merged
