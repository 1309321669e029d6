"""`runtime kv`: what a directory of KV pages holds, whether it is sound, and clearing it: with all folders of ranks. Imports no torch."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.runtime.asked.kv_place import directory, folders
from penstock.runtime.asked.run_schema import KvAction, KvConfig
from penstock.runtime.kv.disk.page_keys import KEY_BYTES
from penstock.runtime.kv.disk.upkeep import NamespaceUse, SegmentReport, VerifyReport, clear, list_namespaces, verify
from penstock.runtime.tools.runtime_verbs import bar, say


def kv_verb(cfg: KvConfig) -> int:
    """Do ``cfg.action`` and return the exit status: 1 when pages are damaged, else 0. UserError."""
    if not cfg.dir:
        raise UserError("dir=: name a directory of KV pages")
    if cfg.namespace is not None and cfg.action is not KvAction.clear:
        raise UserError(f"namespace={cfg.namespace}: `kv {cfg.action}` takes all namespaces; leave it out, or use `kv clear`")
    return _ACTIONS[cfg.action](directory(cfg.dir), cfg)


def _list(place: Path, cfg: KvConfig) -> int:
    found = [(_folder(each, place), use) for each in folders(place) for use in list_namespaces(each)]
    rows = [("namespace", "model", "pages", "tokens", "bytes", "last use"), *(_row(folder, use) for folder, use in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left, right = row[:2], row[2:]
        cells = [cell.ljust(width) for cell, width in zip(left, widths, strict=False)]
        print("  ".join([*cells, *(cell.rjust(width) for cell, width in zip(right, widths[2:], strict=True))]))
    pages, nbytes = sum(use.pages for _, use in found), sum(use.nbytes for _, use in found)
    documents = [{**vars(use), "namespace": use.namespace.hex(), "folder": folder} for folder, use in found]
    say(
        f"{place}: {pages} pages, {show_bytes(nbytes)}", {"dir": str(place), "pages": pages, "nbytes": nbytes, "namespaces": documents}, cfg
    )
    return 0


def _folder(each: Path, place: Path) -> str:
    """The name of ``each`` in ``place``; empty for ``place`` itself."""
    return "" if each == place else each.name


def _row(folder: str, use: NamespaceUse) -> tuple[str, ...]:
    used = datetime.datetime.fromtimestamp(use.used_s).isoformat(" ", "seconds")
    model = ", ".join(filter(None, [use.model or "-", folder]))
    return use.namespace.hex(), model, str(use.pages), str(use.tokens), show_bytes(use.nbytes), used


def _verify(place: Path, cfg: KvConfig) -> int:
    reports = dict[Path, VerifyReport]()
    for each in folders(place):
        with bar("verifying") as progress:
            reports[each] = verify(each, progress)
    problems = [(_folder(each, place), report.index_problem) for each, report in reports.items() if report.index_problem is not None]
    for folder, problem in problems:
        print(f"{f'{folder}: ' if folder else ''}the index cannot be used, {problem}; the next writer makes it anew")
    segments = [replace(one, file=str(Path(_folder(each, place), one.file))) for each, report in reports.items() for one in report.segments]
    damaged = [segment for segment in segments if segment.damaged]
    for segment in damaged:
        print(f"{segment.file}: namespace {segment.namespace.hex()}, {segment.pages} pages are sound")
        for line in segment.damaged:
            print(f"  {line}")
    pages = sum(segment.pages for segment in segments)
    verdict = f"{len(damaged)} damaged; what is damaged is computed again when it is needed" if damaged else "none damaged"
    document = {
        "dir": str(place),
        "pages": pages,
        "nbytes": sum(segment.nbytes for segment in segments),
        "segments": len(segments),
        "damaged": [_document(segment) for segment in damaged],
        "index_problem": problems[0][1] if problems else None,
    }
    say(f"{place}: sound pages {pages}, segments {len(segments)}, {verdict}", document, cfg)
    return max(report.exit_status for report in reports.values())


def _document(segment: SegmentReport) -> dict[str, object]:
    return {**vars(segment), "namespace": segment.namespace.hex()}


def _clear(place: Path, cfg: KvConfig) -> int:
    namespace, cleared = None if cfg.namespace is None else _parse(cfg.namespace), folders(place)
    if namespace is not None:
        there = {each: [use.namespace for use in list_namespaces(each)] for each in cleared}
        cleared = [each for each in cleared if namespace in there[each]]
        if not cleared:
            have = ", ".join(name.hex() for names in there.values() for name in names) or "none"
            raise UserError(f"namespace={cfg.namespace}: not in {place}, which has {have}")
    freed = sum(clear(each, namespace) for each in cleared)
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
