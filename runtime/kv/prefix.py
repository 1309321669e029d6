"""Prompts that begin alike are computed once: their KV pages are kept on disk, and read instead of computed."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from planner.plan import Plan
from runtime.kv.contiguous import Pair
from runtime.kv.keys import ROOT, page_keys
from runtime.kv.staging import Staging
from runtime.kv.worth import restore_s, saved_s
from runtime.kv.writer import DiskWriter

Prompts = Sequence[Sequence[int]]


class _Page(NamedTuple):
    key: bytes
    parent: bytes
    number: int
    """Of the pages of its sequence."""
    sequences: tuple[int, ...]
    """Those that begin with it."""


@dataclass
class Reused:
    """Tokens of one request's prompt."""

    found_tokens: int
    """Leading tokens whose pages were found, the last token of a prompt apart."""
    restored_tokens: int
    """Read from disk. A batch computes in step, so it begins where the sequence that needs it earliest does."""
    computed_tokens: int
    declined: bool
    """The pages were not read, since computing is predicted to be faster."""


class Prefix:
    """Restores the beginnings of a batch's prompts into KV buffers, and keeps what was computed.

    ``pairs`` in every method are K and V of all layers, [batch, heads, capacity, dim], where sequence b's token i lies at row
    ``longest - len(prompt b) + i``. DRAM: ``staging_bytes`` of pages, two at least and no more than could be used: up to ``readers`` to
    read into (a thread each), the rest to write from. One batch at a time; ``pages`` stays its giver's to close, after this.
    """

    def __init__(self, pages: DiskWriter, plan: Plan, read_gbps: float, staging_bytes: int, readers: int, pairs: Sequence[Pair]):
        self._pages, self._plan, self._read_gbps = pages, plan, read_gbps
        self._tokens = pages.shape.page_tokens
        batch, _, capacity, _ = pairs[0][0].shape
        useful = 2 * batch * (capacity // self._tokens)
        buffers = max(2, min(useful, staging_bytes // pages.shape.payload_bytes))
        self._reading = [Staging(pages.shape, pairs) for _ in range(min(readers, buffers // 2))]
        self._writing: queue.SimpleQueue[Staging] = queue.SimpleQueue()
        for _ in range(buffers - len(self._reading)):
            self._writing.put(Staging(pages.shape, pairs))
        self._staging_bytes = buffers * pages.shape.payload_bytes
        self._threads = ThreadPoolExecutor(len(self._reading), "kv-restore")
        self._requests: list[Reused] = []
        self._todo: deque[_Page] = deque()
        self._remembered: set[bytes] = set()
        self._skipped = self._restored_bytes = 0
        self._restore_s = self._capture_s = 0.0

    def restore(self, prompts: Prompts, pairs: Sequence[Pair]) -> int:
        """Fill the rows before the returned one, the first that must be computed; padding there becomes zeros."""
        begun, read_before = time.perf_counter(), self._pages.counters()["read_bytes"]
        self._give_up()
        pads = _pads(prompts)
        keys = [page_keys(self._pages.shape.namespace, p, self._tokens) for p in prompts]
        found = [self._pages.lookup(k[: (len(p) - 1) // self._tokens]) * self._tokens for k, p in zip(keys, prompts, strict=True)]
        start = min(pad + tokens for pad, tokens in zip(pads, found, strict=True))
        wanted = [page for page in _distinct(keys) if self._first_row(page, pads) < start]
        declined = bool(start) and not self._is_worth(len(prompts), max(map(len, prompts)), start, len(wanted))
        start = 0 if declined else self._read(wanted, pads, start, pairs)
        for b, pad in enumerate(pads):
            for pair in pairs if start else ():
                for held in pair:
                    held[b, :, : min(pad, start)] = 0
        for prompt, pad, tokens in zip(prompts, pads, found, strict=True):
            restored = max(0, start - pad)
            self._requests.append(Reused(tokens, restored, len(prompt) - restored, declined and tokens > 0))
        self._restored_bytes += self._pages.counters()["read_bytes"] - read_before
        self._restore_s += time.perf_counter() - begun
        return start

    def keep(self, sequences: Prompts) -> None:
        """Remember the full pages of ``sequences``, the batch's prompts with what was computed behind them so far, that are neither on disk
        nor remembered already; ``advance`` writes them."""
        keys = [page_keys(self._pages.shape.namespace, s, self._tokens) for s in sequences]
        new = [page for page in _distinct(keys) if page.key not in self._remembered and not self._pages.lookup([page.key])]
        self._remembered.update(page.key for page in new)
        self._todo.extend(new)

    def advance(self, prompts: Prompts, pairs: Sequence[Pair]) -> None:
        """Copy out as many pages as there is staging for, and return; the disk is written meanwhile. Costs the copies alone."""
        begun = time.perf_counter()
        pads = _pads(prompts)
        with contextlib.suppress(queue.Empty):
            while self._todo:
                staging = self._writing.get_nowait()
                page, sequence = self._todo[0], self._todo[0].sequences[0]
                staging.load(pairs, sequence, pads[sequence] + page.number * self._tokens)
                if not self._pages.put(page.key, page.parent, staging.view, lambda stored, staging=staging: self._writing.put(staging)):
                    self._writing.put(staging)
                    break
                self._todo.popleft()
        self._capture_s += time.perf_counter() - begun

    def close(self) -> None:
        """End the reading threads; what was not written by now is skipped."""
        self._give_up()
        self._threads.shutdown()

    def facts(self) -> dict[str, Any]:
        """For the report; all pages written so far are counted once the disk has them."""
        self._give_up()
        self._pages.flush()
        counters = self._pages.counters()
        prompt = sum(r.restored_tokens + r.computed_tokens for r in self._requests)
        restored = sum(r.restored_tokens for r in self._requests)
        return {
            "restored_tokens": restored,
            "computed_tokens": prompt - restored,
            "hit_rate": restored / prompt if prompt else None,
            "restored_bytes": self._restored_bytes,
            "restore_s": self._restore_s,
            "capture_s": self._capture_s,
            "declined_requests": sum(r.declined for r in self._requests),
            "pages_written": counters["written"],
            "pages_skipped": self._skipped + sum(n for name, n in counters.items() if name.startswith("skipped")),
            "failures": sum(n for name, n in counters.items() if name.startswith("failed")),
            "read_gbps": self._read_gbps,
            "staging_bytes": self._staging_bytes,
            "requests": [asdict(r) | {"restored_tokens": {"vram": 0, "dram": 0, "ssd": r.restored_tokens}} for r in self._requests],
            "disk": counters,
        }

    def _give_up(self) -> None:
        """The buffers are about to be overwritten: what was not copied out is lost."""
        self._skipped += len(self._todo)
        self._todo.clear()
        self._remembered.clear()

    def _is_worth(self, batch: int, length: int, start: int, pages: int) -> bool:
        nbytes = pages * self._pages.shape.payload_bytes
        return restore_s(self._plan, nbytes, self._read_gbps) < saved_s(self._plan, batch, length, start)

    def _first_row(self, page: _Page, pads: Sequence[int]) -> int:
        return min(pads[b] for b in page.sequences) + page.number * self._tokens

    def _read(self, wanted: Sequence[_Page], pads: Sequence[int], start: int, pairs: Sequence[Pair]) -> int:
        """Read what lies before ``start``; where a page is not to be had, computing begins there at the latest."""
        idle = list(self._reading)
        under_way: deque[tuple[_Page, Staging, Future]] = deque()

        def land() -> None:
            nonlocal start
            page, staging, result = under_way.popleft()
            if result.result():
                for b in page.sequences:
                    staging.store(pairs, b, pads[b] + page.number * self._tokens)
            else:
                start = min(start, self._first_row(page, pads))
            idle.append(staging)

        for page in wanted:
            if not idle:
                land()
            if self._first_row(page, pads) < start:
                staging = idle.pop()
                under_way.append((page, staging, self._threads.submit(self._pages.read, page.key, staging.view)))
        while under_way:
            land()
        return start


def told(facts: dict[str, Any]) -> str:
    """``facts`` in one line."""
    line = (
        "KV reuse: {restored_tokens} of {prompt} prompt tokens restored ({hit_rate:.1%}), {computed_tokens} computed;"
        " {restored_bytes} bytes read in {restore_s:.3g} s; {pages_written} pages written, {pages_skipped} skipped, {failures} failed"
    )
    text = line.format(**facts | {"hit_rate": facts["hit_rate"] or 0.0}, prompt=facts["restored_tokens"] + facts["computed_tokens"])
    declined = facts["declined_requests"]
    return f"{text}; {declined} requests were computed although pages were there: predicted to be faster" if declined else text


def _pads(prompts: Prompts) -> list[int]:
    longest = max(map(len, prompts))
    return [longest - len(p) for p in prompts]


def _distinct(keys: Sequence[Sequence[bytes]]) -> list[_Page]:
    """Each page once, those nearest to a prompt's beginning first."""
    holders: dict[bytes, list[int]] = {}
    places: dict[bytes, tuple[int, bytes]] = {}
    for b, own in enumerate(keys):
        for i, key in enumerate(own):
            holders.setdefault(key, []).append(b)
            places[key] = i, own[i - 1] if i else ROOT
    return sorted((_Page(key, parent, i, tuple(holders[key])) for key, (i, parent) in places.items()), key=lambda page: page.number)
