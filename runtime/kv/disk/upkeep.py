"""What a command line does with a directory of pages: list, verify, clear."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.disk.model_names import forget_names, recorded_names
from penstock.runtime.kv.disk.page_fetch import Damaged, fetch
from penstock.runtime.kv.disk.page_index import INDEX, Index, Place, Segment, load, save
from penstock.runtime.kv.disk.segments import SegmentFiles, aligned
from penstock.runtime.kv.disk.writer_lock import WriterLock


@dataclass(frozen=True)
class NamespaceUse:
    """What one model keeps on disk."""

    namespace: bytes
    model: str | None
    """Its name, when recorded."""
    page_tokens: int
    layers: int
    layer_bytes: int
    pages: int
    tokens: int
    segments: int
    nbytes: int
    """Bytes of the segment files."""
    used_s: float
    """When a page was last read or written, in seconds since 1970."""


def list_namespaces(directory: Path) -> list[NamespaceUse]:
    """Last used first. Needs no lock; costs what opening does. UserError."""
    groups: dict[bytes, list[Segment]] = defaultdict(list)
    for segment in _load(SegmentFiles(directory))[0].segments.values():
        groups[segment.shape.namespace].append(segment)
    names = recorded_names(directory)
    uses = [_use_of(segments, names.get(namespace)) for namespace, segments in groups.items()]
    return sorted(uses, key=lambda use: -use.used_s)


def _use_of(segments: list[Segment], model: str | None) -> NamespaceUse:
    shape = segments[0].shape
    pages = len({key for segment in segments for key in segment.pages.values()})
    return NamespaceUse(
        namespace=shape.namespace,
        model=model,
        page_tokens=shape.page_tokens,
        layers=shape.layers,
        layer_bytes=shape.layer_bytes,
        pages=pages,
        tokens=pages * shape.page_tokens,
        segments=len(segments),
        nbytes=sum(segment.nbytes for segment in segments),
        used_s=max(segment.used_ns for segment in segments) / 1e9,
    )


@dataclass(frozen=True)
class SegmentReport:
    file: str
    namespace: bytes
    pages: int
    """Pages that are sound."""
    nbytes: int
    damaged: tuple[str, ...]
    """A line for each page that is not."""


@dataclass(frozen=True)
class VerifyReport:
    segments: tuple[SegmentReport, ...]
    index_problem: str | None
    """Why the index file could not be used, if so."""

    @property
    def exit_status(self) -> int:
        """0 when everything is sound, else 1. Damage does no harm to a run: such pages are computed again."""
        return int(self.index_problem is not None or any(s.damaged for s in self.segments))


def verify(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> VerifyReport:
    """Read and check every page of every namespace. Needs no lock; a segment that is evicted meanwhile is left out.

    ``progress`` gets bytes done and in all. DRAM: one page. UserError.
    """
    files = SegmentFiles(directory)
    index, problem = _load(files)
    reports, done, total = [], 0, index.nbytes
    for segment in index.segments.values():
        try:
            reports.append(_verify_segment(files, segment))
        except FileNotFoundError:
            continue
        finally:
            done += segment.nbytes
            progress(done, total)
    return VerifyReport(tuple(reports), problem)


def _verify_segment(files: SegmentFiles, segment: Segment) -> SegmentReport:
    buffer = aligned(segment.shape.payload_bytes)
    damaged = [f"{segment.cut_off} pages are missing, the file is too short"] if segment.cut_off else []
    for slot, key in sorted(segment.pages.items()):
        problem = _problem(files, segment, slot, key, buffer)
        if problem is not None:
            damaged.append(f"page at {slot * segment.shape.record_bytes}: {problem}")
    sound = len(segment.pages) - len(damaged) + bool(segment.cut_off)
    return SegmentReport(Path(files.path(segment.number)).name, segment.shape.namespace, sound, segment.nbytes, tuple(damaged))


def _problem(files: SegmentFiles, segment: Segment, slot: int, key: bytes, buffer: memoryview) -> str | None:
    try:
        fetch(files, Place(segment, slot), key, buffer)
    except FileNotFoundError:
        raise
    except Damaged as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return None


def clear(directory: Path, namespace: bytes | None = None) -> int:
    """Remove every page, or those of ``namespace``, and return the bytes freed. UserError, also while a writer has the directory."""
    files = SegmentFiles(directory)
    _load(files)
    if not files.found() and not (directory / INDEX).exists():  # no writer was ever here: leave nothing of ours behind
        return 0
    lock = WriterLock(directory, "or name another directory")
    try:
        index, _ = _load(files)
        freed = 0
        for number, stat in files.found().items():
            segment = index.segments.get(number)
            if namespace is None or (segment is not None and segment.shape.namespace == namespace):
                files.remove(number)
                freed += stat.st_size
                if segment is not None:
                    index.forget(segment)
        forget_names(directory, namespace)
        save(directory, index.encode())
        return freed
    except OSError as error:
        raise UserError(f"{directory}: cannot be cleared ({error.strerror}); check its permissions") from error
    finally:
        lock.release()


def _load(files: SegmentFiles) -> tuple[Index, str | None]:
    try:
        return load(files)
    except OSError as error:
        raise UserError(f"{files.directory}: cannot be read ({error.strerror}); name a directory of KV pages") from error
