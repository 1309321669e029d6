"""Passes of the shapes that will come, over whatever lies in the buffers: kernels are loaded and activations taken before times are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from penstock.runtime.engine.generate import Batch, shares
from penstock.runtime.engine.stepper import Stepper
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.rows import RowKind, Step


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
