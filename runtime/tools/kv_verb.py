"""`runtime kv`: what a directory of KV pages holds, whether it is sound, and clearing it. Imports no torch."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.runtime.asked.kv_place import directory
from penstock.runtime.asked.run_schema import KvAction, KvConfig
from penstock.runtime.kv.disk.page_keys import KEY_BYTES
from penstock.runtime.kv.disk.upkeep import NamespaceUse, SegmentReport, clear, list_namespaces, verify
from penstock.runtime.tools.runtime_verbs import bar, say


def kv_verb(cfg: KvConfig) -> int:
    """Do ``cfg.action`` and return the exit status: 1 when pages are damaged, else 0. UserError."""
    if not cfg.dir:
        raise UserError("dir=: name a directory of KV pages")
    if cfg.namespace is not None and cfg.action is not KvAction.clear:
        raise UserError(f"namespace={cfg.namespace}: `kv {cfg.action}` takes all namespaces; leave it out, or use `kv clear`")
    return _ACTIONS[cfg.action](directory(cfg.dir), cfg)


def _list(place: Path, cfg: KvConfig) -> int:
    uses = list_namespaces(place)
    rows = [("namespace", "model", "pages", "tokens", "bytes", "last use"), *map(_row, uses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left, right = row[:2], row[2:]
        cells = [cell.ljust(width) for cell, width in zip(left, widths, strict=False)]
        print("  ".join([*cells, *(cell.rjust(width) for cell, width in zip(right, widths[2:], strict=True))]))
    pages, nbytes = sum(use.pages for use in uses), sum(use.nbytes for use in uses)
    documents = [{**vars(use), "namespace": use.namespace.hex()} for use in uses]
    say(
        f"{place}: {pages} pages, {show_bytes(nbytes)}", {"dir": str(place), "pages": pages, "nbytes": nbytes, "namespaces": documents}, cfg
    )
    return 0


def _row(use: NamespaceUse) -> tuple[str, ...]:
    used = datetime.datetime.fromtimestamp(use.used_s).isoformat(" ", "seconds")
    return use.namespace.hex(), use.model or "-", str(use.pages), str(use.tokens), show_bytes(use.nbytes), used


def _verify(place: Path, cfg: KvConfig) -> int:
    with bar("verifying") as progress:
        report = verify(place, progress)
    if report.index_problem is not None:
        print(f"the index cannot be used, {report.index_problem}; the next writer makes it anew")
    damaged = [segment for segment in report.segments if segment.damaged]
    for segment in damaged:
        print(f"{segment.file}: namespace {segment.namespace.hex()}, {segment.pages} pages are sound")
        for line in segment.damaged:
            print(f"  {line}")
    pages = sum(segment.pages for segment in report.segments)
    verdict = f"{len(damaged)} damaged; what is damaged is computed again when it is needed" if damaged else "none damaged"
    document = {
        "dir": str(place),
        "pages": pages,
        "nbytes": sum(segment.nbytes for segment in report.segments),
        "segments": len(report.segments),
        "damaged": [_document(segment) for segment in damaged],
        "index_problem": report.index_problem,
    }
    say(f"{place}: sound pages {pages}, segments {len(report.segments)}, {verdict}", document, cfg)
    return report.exit_status


def _document(segment: SegmentReport) -> dict[str, object]:
    return {**vars(segment), "namespace": segment.namespace.hex()}


def _clear(place: Path, cfg: KvConfig) -> int:
    namespace = None if cfg.namespace is None else _parse(cfg.namespace)
    if namespace is not None:
        there = [use.namespace for use in list_namespaces(place)]
        if namespace not in there:
            have = ", ".join(name.hex() for name in there) or "none"
            raise UserError(f"namespace={cfg.namespace}: not in {place}, which has {have}")
    freed = clear(place, namespace)
    say(f"{place}: {show_bytes(freed)} freed", {"dir": str(place), "namespace": cfg.namespace, "freed_bytes": freed}, cfg)
    return 0


def _parse(text: str) -> bytes:
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        namespace = b""
    if len(namespace) != KEY_BYTES:
        raise UserError(f"namespace={text}: must be {2 * KEY_BYTES} hexadecimal digits, as `runtime kv list` shows them")
    return namespace


_ACTIONS: dict[KvAction, Callable[[Path, KvConfig], int]] = {
    KvAction.list: _list,
    KvAction.verify: _verify,
    KvAction.clear: _clear,
}
