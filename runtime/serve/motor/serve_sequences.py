"""The sequences that a server has taken on: their tokens, their pages, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from penstock.planner.contract.serving.serve_step import Share
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.rows import Row, RowKind
from penstock.runtime.speculate.chains import Chains


class SharedPrefix(Protocol):
    """Where the pages of prompts' beginnings come from: ``Prefix``, or ``PoolPrefix``."""

    @property
    def pending(self) -> int: ...
    def fetch(self, sequence: KvSequence) -> list[Future[None]]: ...
    def restore_more(self, sequences: Sequence[KvSequence]) -> None: ...
    def confirm(self) -> None: ...
    def keep(self, sequences: Sequence[KvSequence]) -> None: ...
    def advance(self) -> None: ...
    def fold(self) -> None: ...


class ServeSequences:
    """The scheduler's ``ServePages`` over the pool of ``stepper``. ``prefix`` is None where nothing can be shared: a model whose sequences
    keep a state beside K and V. ``drafts`` hears of each that waits or has gone."""

    def __init__(self, stepper: Stepper, prefix: SharedPrefix | None, drafts: Chains | None = None):
        self._stepper, self._pool, self._prefix, self._drafts = stepper, stepper.pool.pages, prefix, drafts
        self._living: dict[int, KvSequence] = {}
        self._alone: set[int] = set()
        """Sequences that begin with nothing that others computed."""
        self._unsure: set[int] = set()
        """What these were given is not checked yet."""
        self.restored_tokens = 0
        """That were shared or restored, over all sequences."""

    def begin(self, number: int, prompt: Sequence[int], salt: str, alone: bool) -> None:
        """``number`` has come. With ``alone`` all of its prompt is computed."""
        self._living[number] = KvSequence.of(number, prompt, salt)
        if alone:
            self._alone.add(number)

    def end(self, number: int) -> None:
        """It has gone, and holds no pages."""
        self._living.pop(number)
        self._alone.discard(number)
        if self._drafts is not None:
            self._drafts.forget(number)

    def spoil(self, number: int) -> None:
        """What was computed of it is no good: none of its pages is kept."""
        self._living[number].cached = 0

    def said(self, number: int, token: int) -> None:
        """Its reply goes on with ``token``."""
        self._living[number].tokens.append(token)

    def each(self, numbers: Iterable[int]) -> list[KvSequence]:
        """Those of ``numbers``, not to be changed."""
        return [self._living[number] for number in numbers]

    @property
    def page_tokens(self) -> int:
        return self._pool.page_tokens

    @property
    def free(self) -> int:
        """Pages that can be had now. Those that are only kept count as free."""
        return self._pool.available

    @property
    def kept(self) -> int:
        """Of these, pages that are only kept."""
        return self._pool.available - self._pool.free

    @property
    def pending(self) -> int:
        """Pages that are kept and to be copied out of the pool."""
        return 0 if self._prefix is None else self._prefix.pending

    def fetch(self, number: int, done: Callable[[], None]) -> bool:
        """Begin to read what the disk alone has of its prefix. True: ``done`` is called, from another thread, once that is over; a restore
        before it would have all rows wait."""
        if self._prefix is None or number in self._alone:
            return False
        reading = self._prefix.fetch(self._living[number])
        if reading:
            left = iter(range(len(reading) - 1, -1, -1))
            for each in reading:
                each.add_done_callback(lambda _: done() if next(left) == 0 else None)
        return bool(reading)

    def prefix(self, number: int) -> int:
        """Tokens that it has at its admission, shared or restored. On a card copies may be under way, ordered before the next pass."""
        sequence = self._living[number]
        if self._prefix is None or number in self._alone:
            return 0
        self._prefix.restore_more([sequence])
        self._unsure.add(number)
        self.restored_tokens += sequence.cached
        return sequence.cached

    def hold(self, number: int, tokens: int) -> bool:
        """Room for so many tokens of it. False: nothing was taken."""
        try:
            self._living[number].hold(self._pool, tokens)
        except RuntimeError:
            return False
        return True

    def trim(self, number: int, tokens: int) -> None:
        """Its pages beyond so many tokens are given back."""
        self._living[number].trim(self._pool, tokens)

    def release(self, number: int) -> None:
        """Its pages are given back; full ones of what is checked stay while there is room."""
        sequence = self._living[number]
        if self._prefix is not None and number not in self._unsure and sequence.cached:
            self._prefix.keep([sequence])
        self._unsure.discard(number)
        self._stepper.forget(number)
        if self._drafts is not None:
            self._drafts.rest(number)
        sequence.release(self._pool)

    def row(self, share: Share, done: int, count: int, wanted: int, draft: Sequence[int] = ()) -> Row:
        """``count`` tokens of ``share`` behind its first ``done``, with the logits of the last ``wanted``. Where it verifies, its newest
        token and as many of ``draft``."""
        sequence = self._living[share.number]
        if sequence.cached != share.start + done:
            raise RuntimeError(f"sequence {share.number} has {sequence.cached} tokens, the pass begins at {share.start + done}")
        return sequence.drafted(draft[: count - 1]) if share.kind == "verify" else sequence.row(count, RowKind(share.kind), wanted)

    def computed(self, rows: Sequence[Row]) -> None:
        """A pass of ``rows`` is queued or over."""
        for row in rows:
            self._living[row.sequence].cached = row.end

    def verified(self, number: int, cached: int) -> None:
        """What was computed of it beyond ``cached`` tokens is written over: drafts that were not kept."""
        self._living[number].cached = cached

    def confirm(self) -> dict[int, int]:
        """The step is over. What was restored for it is checked now -> number -> tokens that it is left with, of each whose restored pages
        were damaged: what was computed behind them is void."""
        if self._prefix is None:
            return {}
        before = {number: self._living[number].cached for number in self._unsure if number in self._living}
        self._prefix.confirm()
        self._unsure.clear()
        return {number: now for number, was in before.items() if (now := self._living[number].cached) != was}

    def keep(self, number: int) -> None:
        """Its prompt has been computed: others may begin with its full pages from now on."""
        if self._prefix is not None:
            self._prefix.keep([self._living[number]])

    def fold(self) -> None:
        """What is counted by request is summed up."""
        if self._prefix is not None:
            self._prefix.fold()

    def advance(self) -> None:
        """Begin to copy out kept pages, as many as need no waiting."""
        if self._prefix is not None:
            self._prefix.advance()
