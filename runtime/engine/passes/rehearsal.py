"""Passes of the shapes that will come, over whatever lies in the buffers: kernels are loaded and activations taken before times are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from penstock.runtime.engine.passes.generate import Batch, shares
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.attention.kernel_shape import telling_tokens
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.rows import RowKind, Step

_PART = 512
"""Tokens of a prompt's part beside rows: with more, products have the same kernels."""


def rehearse(stepper: Stepper, batch: Batch, most_tokens: int) -> tuple[float, float]:
    """A prefill of ``batch`` and two decode steps -> seconds of the prefill and of the second step. That step is the last
    before ``most_tokens`` a sequence."""
    sequences = [KvSequence.of(number, prompt) for number, prompt in enumerate(batch.prompts)]
    pool = stepper.pool.pages
    try:
        for sequence in sequences:
            sequence.hold(pool, most_tokens)
        prefill_s = _timed(lambda: _prefill(stepper, sequences, batch.chunk_tokens))
        _decode(stepper, sequences, [0] * len(sequences))
        return prefill_s, _timed(lambda: _decode(stepper, sequences, [most_tokens - 1] * len(sequences)))
    finally:
        _release(stepper, sequences)


def meet_loose_rows(stepper: Stepper, rows: int, most_tokens: int) -> None:
    """Passes of what rows may become, so that their kernels are loaded: ``rows`` decode rows of unequal lengths, and the tail of a prompt
    whose pages are not adjacent, as where its beginning was kept."""
    sequences, pool = [KvSequence.of(number, [0]) for number in range(rows)], stepper.pool.pages
    try:
        for sequence in sequences:
            sequence.hold(pool, most_tokens)
        for some in {rows, min(rows, 2)}:  # with few rows a kernel cuts their keys into parts
            _decode(stepper, sequences[:some], [(most_tokens - 1) * (number + 1) // some for number in range(some)])
        first, page = sequences[0], pool.page_tokens
        if len(first.pages) > 2:
            first.pages = [*first.pages[1:], first.pages[0]]
            first.tokens, first.cached = [0] * most_tokens, most_tokens - page
            stepper.pretend(first.number, first.cached)
            stepper.run(Step((first.row(page, RowKind.prompt),)))
    finally:
        _release(stepper, sequences)


class AnyRows:
    """Passes of whatever a server's rows may become, so that no kernel is loaded or compiled while a client waits: rows beside a prompt's
    part, and parts of prompts whose pages are not adjacent. ``most_tokens`` of each of ``rows`` have room beside each other,
    ``pass_tokens`` in a pass; the model has so many ``query_heads``. Takes some ten passes."""

    def __init__(self, stepper: Stepper, rows: int, most_tokens: int, pass_tokens: int, query_heads: int):
        self._stepper, self._rows, self._most_tokens = stepper, rows, most_tokens
        self._pass_tokens, self._query_heads = pass_tokens, query_heads

    def warm_up(self, logits: torch.Tensor) -> None:
        """Behind the rehearsal of :func:`meet_loose_rows`; ``logits`` stay as they are."""
        most, page = self._most_tokens, self._stepper.pool.page_tokens
        sequences = [KvSequence.of(number, [0]) for number in range(self._rows)]
        try:
            for sequence in sequences:
                sequence.hold(self._stepper.pool.pages, most)
            first = sequences[0]
            for starts in ([0] * min(self._rows, 2), [most * number // self._rows for number in range(self._rows)]):
                _decode(self._stepper, sequences[: len(starts)], starts)
            part = max(1, min(self._pass_tokens - self._rows + 1, most, _PART))
            for end in {part, most}:
                self._part(first, end, part, sequences[1:])
            first.pages.reverse()
            # compiled for as many tokens of a row, up to a limit of the kernel's own, and for keys as a whole or in parts
            counts = self._counts()
            for end in {min(max([page + 1, *counts]), most), most} if counts and len(first.pages) > 1 else ():
                for tokens in counts:
                    self._part(first, end, min(tokens, end))
        finally:
            _release(self._stepper, sequences)

    def _counts(self) -> list[int]:
        """Tokens of a row, of which no two have the same kernels; none where rows are computed one by one."""
        shapes = {(shape.keys, shape.values) for shape in self._stepper.pool.shapes.values()}
        dims = {(heads, dim, value_dim) for (heads, dim), (_, value_dim) in shapes}
        return sorted({n for heads, dim, wide in dims for n in telling_tokens(max(1, self._query_heads // heads), (dim, wide))})

    def _part(self, sequence: KvSequence, end: int, tokens: int, beside: Sequence[KvSequence] = ()) -> None:
        """The last ``tokens`` before ``end`` of a prompt, behind those ``beside`` it that decode: each as far as it was before."""
        sequence.tokens, sequence.cached = [0] * end, end - tokens
        for each in (*beside, sequence):
            self._stepper.pretend(each.number, each.cached)
        self._stepper.run(Step((*(other.row(1, RowKind.decode) for other in beside), sequence.row(tokens, RowKind.prompt))))


def longest_step(stepper: Stepper, rows: int, most_tokens: int, use: Callable[[Step], None], tokens: int = 1) -> None:
    """Have ``use`` see the last step of ``tokens`` a row before ``most_tokens`` of ``rows`` sequences, whose pages are held meanwhile.
    Where the pool has too few for all to be so long at once, they lie in the same ones: nobody reads what is computed."""
    sequences, pool = [KvSequence.of(number, [0] * most_tokens) for number in range(rows)], stepper.pool.pages
    together = rows * -(-most_tokens // pool.page_tokens) <= pool.free
    try:
        for sequence in sequences:
            if not together and sequence is not sequences[0]:
                pool.share(sequences[0].pages)
                sequence.pages = list(sequences[0].pages)
            sequence.hold(pool, most_tokens)
            sequence.cached = most_tokens - tokens
        kind = RowKind.decode if tokens == 1 else RowKind.verify
        use(Step(tuple(sequence.row(tokens, kind, tokens) for sequence in sequences)))
    finally:
        _release(stepper, sequences)


def prompt_pass(stepper: Stepper, rows: int, most_tokens: int, tokens: int, use: Callable[[Step], None]) -> None:
    """Have ``use`` see a pass over the first ``tokens`` of ``rows`` prompts of at most ``most_tokens`` each, the first ones whole. Their
    pages are held meanwhile."""
    sequences, pool = [KvSequence.of(number, [0] * most_tokens) for number in range(rows)], stepper.pool.pages
    given = [min(most_tokens, max(0, tokens - number * most_tokens)) for number in range(rows)]
    try:
        for sequence, count in zip(sequences, given, strict=True):
            sequence.hold(pool, count)
        use(Step(tuple(sequence.row(count, RowKind.prompt) for sequence, count in zip(sequences, given, strict=True) if count)))
    finally:
        _release(stepper, sequences)


def first_step(stepper: Stepper, tokens: Sequence[int], use: Callable[[Step], None]) -> None:
    """Have ``use`` see a decode step of sequences that begin with ``tokens``, one each: it reads no earlier KV."""
    sequences, pool = [KvSequence.of(number, [token]) for number, token in enumerate(tokens)], stepper.pool.pages
    try:
        for sequence in sequences:
            sequence.hold(pool, 1)
        use(Step(tuple(sequence.row(1, RowKind.decode) for sequence in sequences)))
    finally:
        _release(stepper, sequences)


def _prefill(stepper: Stepper, sequences: Sequence[KvSequence], chunk_tokens: int) -> torch.Tensor:
    logits = torch.empty(0)
    while any(sequence.left for sequence in sequences):
        given = shares([sequence.left for sequence in sequences], len(sequences) * chunk_tokens)
        rows = [s.row(count, RowKind.prompt) for s, count in zip(sequences, given, strict=True) if count]
        logits = stepper.run(Step(tuple(rows)))
        for row in rows:
            sequences[row.sequence].cached = row.end
    return logits


def _decode(stepper: Stepper, sequences: Sequence[KvSequence], starts: Sequence[int]) -> torch.Tensor:
    """One token of each sequence behind ``starts``."""
    for sequence, start in zip(sequences, starts, strict=True):
        sequence.tokens, sequence.cached = [0] * (start + 1), start
        stepper.pretend(sequence.number, start)
    return stepper.run(Step(tuple(sequence.row(1, RowKind.decode) for sequence in sequences)))


def _release(stepper: Stepper, sequences: Sequence[KvSequence]) -> None:
    for sequence in sequences:
        stepper.forget(sequence.number)
        sequence.release(stepper.pool.pages)


def _timed(passes: Callable[[], torch.Tensor]) -> float:
    begun = time.perf_counter()
    passes()[0, 0].item()
    return time.perf_counter() - begun
