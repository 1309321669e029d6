"""Prompts and decode steps of one batch: the loop that a run times."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.engine.passes.sampling import Sampler, refuse_none
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_sequence import KvSequence, PrefixCache
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Drafts

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""
Finished = Callable[[list[list[int]]], list[bool]]
"""Which sequences are over, by all tokens of each."""


@dataclass(frozen=True)
class Batch:
    """Prompts (token ids, any lengths) that are decoded together."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    chunk_tokens: int
    """Prompt tokens in one pass, for each prompt: what long ones need and short ones do not goes to the long ones."""
    stop_ids: frozenset[int] = frozenset()
    limits: Sequence[int] | None = None
    """New tokens of each sequence where not all have ``max_new_tokens``, which none exceeds."""
    keep_replies: Sequence[bool] | None = None
    """Sequences that a later prompt may go on from, so that the KV of their replies are kept; None: no one's."""

    @property
    def new_tokens(self) -> Sequence[int]:
        """Of each sequence at most."""
        return self.limits or [self.max_new_tokens] * len(self.prompts)


@dataclass(frozen=True)
class Pass:
    """What one pass computed, and its logits [step.wanted, vocab] on the CPU."""

    step: Step
    logits: torch.Tensor


@dataclass
class Generation:
    """What one batch produced, with host times in seconds. ``tokens`` end before the stop token."""

    tokens: list[list[int]]
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    stepped: int = 0
    """Tokens that these steps chose, over all sequences: one a step and sequence, and the drafts that were kept."""
    passes: list[Pass] = field(default_factory=list)
    """Kept only when asked for."""

    @property
    def logits(self) -> list[torch.Tensor]:
        """Of each pass that was kept."""
        return [made.logits for made in self.passes]

    @property
    def decode_s(self) -> float:
        return sum(self.step_s)


def shares(left: Sequence[int], tokens: int) -> list[int]:
    """How many of ``tokens`` each of ``left`` gets: all the same, but none more than it has. So equal rows stand side by side and nothing
    is idle. Each pass gives at least one token."""
    given = [0] * len(left)
    for place, k in enumerate(sorted(range(len(left)), key=left.__getitem__)):
        given[k] = min(left[k], (tokens - sum(given)) // (len(left) - place))
    if not any(given) and any(left):
        given[next(k for k, n in enumerate(left) if n)] = 1
    return given


class _Run:
    """One batch that ``stepper`` computes: its sequences hold pages until :meth:`close`. Those of ``living`` keep theirs."""

    def __init__(
        self, stepper: Stepper, batch: Batch, prefix: PrefixCache | None, keep_logits: bool, living: Sequence[KvSequence] | None = None
    ):
        self._stepper, self._batch, self._prefix, self._keep_logits = stepper, batch, prefix, keep_logits
        self.sequences = list(living or [KvSequence.of(number, prompt) for number, prompt in enumerate(batch.prompts)])
        self._own = [] if living else self.sequences
        self.passes: list[Pass] = []

    def prefill(self, progress: Callable[[int, int], None]) -> torch.Tensor:
        """All prompts, or what of them is not restored -> logits of each one's last token [batch, vocab]. UserError where
        they are no numbers.

        A card computes while what was restored is still being checked; where some of it is no good, everything from there on is computed
        once more.
        """
        if self._prefix is not None:
            self._prefix.restore([sequence for sequence in self.sequences if not sequence.pages])
        logits = self._compute(progress)
        if self._prefix is not None:
            computed = [sequence.cached for sequence in self.sequences]
            self._prefix.confirm()
            if [sequence.cached for sequence in self.sequences] != computed:
                logits |= self._compute(progress)
            self._prefix.keep(self.sequences)
        return _numbers(torch.stack([logits[sequence.number] for sequence in self.sequences]))

    def step(self, live: Sequence[KvSequence], drafts: Drafts, ends: bool) -> torch.Tensor:
        """The last token of each of ``live``, and its ``drafts`` behind it -> logits [live + drafts, vocab]. ``ends``: as a step has it."""
        each = zip(live, drafts, strict=True)
        return self._pass(Step(tuple(s.drafted(draft) if draft else s.row(1, RowKind.decode) for s, draft in each), ends))

    def put_by(self) -> None:
        """Queue copies of some of the prompts' pages, as many as can go beside what comes next."""
        if self._prefix is not None:
            self._prefix.advance()

    def put_rest_by(self) -> None:
        """At the end: keep the replies' KV as well, where the batch says so, and copy out all that is kept."""
        if self._prefix is None:
            return
        replies = self._batch.keep_replies
        if replies is not None:
            self._prefix.keep([sequence for sequence, keep in zip(self.sequences, replies, strict=True) if keep])
        self._prefix.finish()

    def close(self) -> None:
        """Give all pages back."""
        for sequence in self._own:
            self._stepper.forget(sequence.number)
            sequence.release(self._stepper.pool.pages)

    def _compute(self, progress: Callable[[int, int], None]) -> dict[int, torch.Tensor]:
        """What of the prompts is left -> each such sequence's last logits [vocab]."""
        for sequence, new in zip(self.sequences, self._batch.new_tokens, strict=True):
            sequence.hold(self._stepper.pool.pages, sequence.prompt_tokens + new)
        last: dict[int, torch.Tensor] = {}
        total = sum(sequence.prompt_tokens for sequence in self.sequences)
        for step in self._prompt_steps():
            logits = iter(self._pass(step))
            last |= {row.sequence: next(logits) for row in step.rows if row.wanted}
            progress(total - sum(sequence.left for sequence in self.sequences), total)
        return last

    def _prompt_steps(self) -> Iterator[Step]:
        tokens = len(self.sequences) * self._batch.chunk_tokens
        while any(sequence.left for sequence in self.sequences):
            given = shares([sequence.left for sequence in self.sequences], tokens)
            rows = zip(self.sequences, given, strict=True)
            yield Step(tuple(s.row(count, RowKind.prompt, int(count == s.left)) for s, count in rows if count))

    def _pass(self, step: Step) -> torch.Tensor:
        logits = self._stepper.run(step)
        for row in step.rows:
            self.sequences[row.sequence].cached = row.end
        if self._keep_logits:
            self.passes.append(Pass(step, logits.cpu()))
        return logits


def generate(
    stepper: Stepper,
    batch: Batch,
    sampler: Sampler,
    prefix: PrefixCache | None = None,
    finished: Finished | None = None,
    progress: Progress | None = None,
    keep_logits: bool = False,
    chains: Chains | None = None,
) -> Generation:
    """Generate up to its limit for each prompt of ``batch``; see :func:`generating`."""
    *_, made = generating(stepper, batch, sampler, prefix, finished, progress, keep_logits, chains=chains)
    return made


@torch.inference_mode()
def generating(
    stepper: Stepper,
    batch: Batch,
    sampler: Sampler,
    prefix: PrefixCache | None = None,
    finished: Finished | None = None,
    progress: Progress | None = None,
    keep_logits: bool = False,
    living: Sequence[KvSequence] | None = None,
    chains: Chains | None = None,
) -> Generator[Generation, None, None]:
    """Generate up to its limit for each prompt of ``batch``; the same object, as it is after each pass that chose tokens. It may be left
    between two passes. With ``chains`` passes after the first one compute drafts as well, and choose several tokens.

    ``finished`` may end sequences by their tokens. ``progress(phase, done, total)`` is called after every pass. A finished sequence leaves
    the steps; its pages are given back with the batch's.

    ``living`` are the batch's sequences where they lived before and live on: their tokens are ``batch.prompts``, and only those behind
    ``cached`` are computed.
    """
    told = progress or (lambda *_: None)
    result = Generation([[] for _ in batch.prompts])
    run, choose = _Run(stepper, batch, prefix, keep_logits, living), sampler.begin(batch.prompts)
    result.passes = run.passes
    try:
        begun = time.perf_counter()
        first = run.prefill(lambda done, total: told("prefill", done, total))
        chosen = [[token] for token in choose(first, range(len(batch.prompts))).tolist()]
        for number, tokens in enumerate(chosen):
            refuse_none(tokens, number)
        result.prefill_s = time.perf_counter() - begun
        live = run.sequences
        for passed in count(1):
            live = _say(result, live, chosen, batch, finished)
            told("decode", passed, batch.max_new_tokens)
            if passed == 1:
                result.first_token_s = time.perf_counter() - begun - result.prefill_s
            yield result
            run.put_by()
            if not live:
                break
            begun = time.perf_counter()
            left = [batch.new_tokens[sequence.number] - len(result.tokens[sequence.number]) for sequence in live]
            drafts = [()] * len(live) if chains is None else chains.draft(live, left)
            starts = [sequence.cached for sequence in live]
            chosen = choose.keep(run.step(live, drafts, max(left) == 1), [sequence.number for sequence in live], drafts)
            for sequence, start, tokens in zip(live, starts, chosen, strict=True):
                sequence.cached = start + len(tokens)  # what was computed of drafts that are not kept is written over
            if chains is not None:
                chains.book(drafts, chosen, time.perf_counter() - begun)
            result.step_s.append(time.perf_counter() - begun)
            result.stepped += sum(map(len, chosen))
        stepper.make_way()
        run.put_rest_by()
    finally:
        if chains is not None:
            for sequence in run.sequences:
                chains.forget(sequence.number)
        run.close()


def _numbers(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` of prompts [batch, vocab]: no text is made of what is none."""
    lost = logits.isnan().any(dim=-1).nonzero().flatten().tolist()
    if lost:
        raise UserError(
            f"the logits of prompt {lost[0] + 1} are not numbers (NaN), so there is no text; the checkpoint is damaged, or its numbers "
            f"exceed its dtype: compare with transformers, and download it again"
        )
    return logits


@torch.inference_mode()
def logits_behind(stepper: Stepper, batch: Batch, prefix: PrefixCache | None = None) -> torch.Tensor:
    """Of the token behind each prompt: [batch, vocab] on the device."""
    run = _Run(stepper, batch, prefix, keep_logits=False)
    try:
        return run.prefill(lambda *_: None)
    finally:
        run.close()


def _say(
    result: Generation, live: Sequence[KvSequence], chosen: Sequence[Sequence[int]], batch: Batch, finished: Finished | None
) -> list[KvSequence]:
    """Each of ``live`` says its tokens, as many as there are until one ends it -> those that go on. KV of the last ones comes with the next
    pass."""
    going = list(zip(live, chosen, strict=True))
    place, said = 0, []
    while going:
        for sequence, tokens in going:
            if tokens[place] not in batch.stop_ids:
                result.tokens[sequence.number].append(tokens[place])
                sequence.tokens.append(tokens[place])
        ended = finished(result.tokens) if finished else [False] * len(batch.prompts)
        going = [
            (s, tokens) for s, tokens in going
            if tokens[place] not in batch.stop_ids and len(result.tokens[s.number]) < batch.new_tokens[s.number] and not ended[s.number]
        ]  # fmt: skip
        place += 1
        said += [s for s, tokens in going if len(tokens) == place]
        going = [(s, tokens) for s, tokens in going if len(tokens) > place]
    for sequence in live:
        sequence.cached = min(sequence.cached, len(sequence.tokens))
    return [s for s in live if s in said]
