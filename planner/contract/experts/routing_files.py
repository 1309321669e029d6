"""Routings as files: JSON lines, plain, gz or xz, of one of two forms.

A line a token: ``{"prompt", "phase", "pos", "experts": [layers][top_k], "probs"}``. It may hold ``ahead`` and ``centroids``, [layers -
1][experts]: how each layer but the last scored the experts of the next one.

A line a token and layer: ``{"problem_id", "token_idx", "layer", "experts", "gating_probs"}``. All of these are decode steps.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import open_plain
from penstock.planner.contract.experts.policies.base import AheadScores
from penstock.planner.contract.experts.routing import Phase, Routings
from penstock.planner.contract.experts.routing_lines import SCORES, BadLine, LayerLines, TokenLines

LONGEST_LINE = 64 << 20
MOST_CHARACTERS = 8 << 30
MOST_BLANK = 10_000
_DIGITS = 4
"""After the point, of probabilities and scores."""


def routing_line(
    prompt: int,
    phase: Phase,
    pos: int,
    experts: Sequence[Sequence[int]],
    probs: Sequence[Sequence[float]],
    ahead: Sequence[Sequence[float]] | None = None,
    centroids: Sequence[Sequence[float]] | None = None,
) -> str:
    """One token as a line without its end: ``experts`` and ``probs`` [layers][top_k], the scores [layers - 1][experts]."""
    line: dict[str, Any] = {"prompt": prompt, "phase": phase.value, "pos": pos}
    line["experts"] = [[int(e) for e in layer] for layer in experts]
    for name, rows in (("probs", probs), (SCORES[AheadScores.router], ahead), (SCORES[AheadScores.centroids], centroids)):
        if rows is not None:
            line[name] = [[round(float(x), _DIGITS) for x in row] for row in rows]
    return json.dumps(line, separators=(",", ":"))


def read_routings(path: Path, count: int | None = None, advance: Callable[[float], None] = lambda share: None) -> Routings:
    """Read the file, plain, gz or xz, of either form. ``count`` experts a layer, or as many as it names. ``advance`` gets the share
    that was read. Raises UserError that names the line."""
    reader: TokenLines | LayerLines | None = None
    number = 0
    with _opened(path) as (raw, text, size):
        for number, line in enumerate(_lines(path, text), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise BadLine("is no JSON object")
                if reader is None:
                    reader = (LayerLines if "problem_id" in row else TokenLines)(count)
                reader.add(row)
            except (BadLine, json.JSONDecodeError, RecursionError) as error:
                what = str(error) if isinstance(error, BadLine) else "is no JSON"
                raise UserError(f"routings={path}: line {number} {what}; mend or remove it") from error
            if number % 1000 == 0:
                advance(raw.tell() / max(1, size))
    if reader is None:
        raise UserError(f"routings={path}: holds no line; record one with `runtime run moe.record=FILE`")
    try:
        return reader.finish()
    except BadLine as error:
        raise UserError(f"routings={path}: {error}; mend the file") from error


def _lines(path: Path, text: io.TextIOBase) -> Iterator[str]:
    """Lines of at most ``LONGEST_LINE`` characters, ``MOST_CHARACTERS`` in all, of which ``MOST_BLANK`` in a row may be empty: what a
    small file unpacks to is bounded, in memory and in time."""
    read, blank = 0, 0
    while line := text.readline(LONGEST_LINE + 1):
        read += len(line)
        blank = 0 if line.strip() else blank + 1
        if len(line) > LONGEST_LINE:
            raise UserError(f"routings={path}: has a line of more than {LONGEST_LINE >> 20} MiB; name a file of routings")
        if read > MOST_CHARACTERS or blank > MOST_BLANK:
            what = f"unpacks to more than {MOST_CHARACTERS >> 30} GiB" if read > MOST_CHARACTERS else f"has {blank} empty lines in a row"
            raise UserError(f"routings={path}: {what}; cut it, or name a file of routings")
        yield line


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, io.TextIOBase, int]]:
    """The file as stored, its text, and its stored size in bytes. UserError where it cannot be read."""
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(open_plain(path))
            magic, size = raw.read(6), raw.seek(0, io.SEEK_END)
            raw.seek(0)
            plain: Any = raw
            if magic == b"\xfd7zXZ\0":
                plain = stack.enter_context(lzma.LZMAFile(raw))
            elif magic[:2] == b"\x1f\x8b":
                plain = stack.enter_context(gzip.GzipFile(fileobj=raw))
            yield raw, io.TextIOWrapper(plain, encoding="utf-8"), size
    except OSError as error:
        raise UserError(f"routings={path}: cannot be read ({error.strerror or error}); name a file of routings") from error
    except (EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"routings={path}: is damaged or of another kind ({error}); name a file of JSON lines, plain, gz or xz") from error
