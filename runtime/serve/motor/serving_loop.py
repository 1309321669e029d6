"""The loop of a motor: what was asked joins, a pass is computed for all rows at once, and each hears its token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from penstock.planner.contract.serving.serve_scheduler import Scheduler
from penstock.planner.contract.serving.serve_step import ServeStep, Share
from penstock.planner.contract.serving.serving_forecast import mixed_of
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.model.rows import Row, Step
from penstock.runtime.serve.motor.inbox import Gone, Inbox
from penstock.runtime.serve.motor.intake import Intake, ServeLaw
from penstock.runtime.serve.motor.logprobs import cut_step, in_blocks
from penstock.runtime.serve.motor.replies import Reply
from penstock.runtime.serve.motor.row_sampling import Picked, RowSampler
from penstock.runtime.serve.motor.serve_sequences import ServeSequences
from penstock.runtime.serve.motor.vitals import Vitals
from penstock.runtime.serve.wire.frames import Frames
from penstock.runtime.serve.wire.messages import Chosen, Message, PromptLogprobs, Vital, said, together
from penstock.runtime.speculate.chains import Chains

COPYING_S = 0.02
"""Seconds between two looks at pages that are to be copied out while nobody asks anything."""


class Steps(Protocol):
    """``Session.step``."""

    def __call__(self, step: Step) -> torch.Tensor: ...


class ServingLoop:
    """One request's error ends that request. What a pass raises ends the loop: the pool is then as nobody knows."""

    def __init__(
        self,
        step: Steps,
        put: Put,
        sampler: RowSampler,
        scheduler: Scheduler,
        sequences: ServeSequences,
        intake: Intake,
        law: ServeLaw,
        inbox: Inbox,
        frames: Frames,
        vitals: Vitals,
        chains: Chains | None = None,
    ):
        self._step, self._put, self._scheduler, self._sequences = step, put, scheduler, sequences
        self._intake, self._replies, self._law = intake, intake.replies, law
        self._inbox, self._frames, self._vitals = inbox, frames, vitals
        self._sampler, self._chains = sampler, chains
        self._idle_from = time.perf_counter()

    def run(self) -> bool:
        """Until it was drained: True; or until the front has gone: False."""
        while self._hear():
            if self._intake.over:
                return True
            begun = time.perf_counter()
            drafts = self._draft()
            step = self._scheduler.next_step({number: len(draft) for number, draft in drafts.items()})
            self._vitals.totals.given_up += len(step.given_up)
            if step.rows:
                self._compute(step, drafts, begun)
            else:
                self._meanwhile()
            self._sequences.advance()
        return False

    def _meanwhile(self) -> None:
        """What may take milliseconds, and no row waits for: while a card computes, where there is one."""
        if self._vitals.due:
            self._sequences.fold()
            self._tell([Vital(self._vital())])

    def _hear(self) -> bool:
        """All that was said, waiting for it where there is nothing to do. False: the front has gone."""
        wait_s = 0.0
        if not (self._scheduler.living or self._scheduler.waiting or self._intake.over):
            wait_s = COPYING_S if self._sequences.pending else 1.0
        while (message := self._inbox.next(wait_s)) is not None:
            if wait_s:
                self._idle_from = time.perf_counter()
            wait_s = 0.0
            if isinstance(message, Gone):
                return False
            self._tell(self._intake.obey(message))
        return True

    def _draft(self) -> dict[int, Sequence[int]]:
        """Row that decodes -> what may follow its newest token; of those without a guess nothing."""
        rooms = {} if self._chains is None else self._scheduler.rooms
        if not rooms or self._chains is None:
            return {}
        drafts = self._chains.draft(self._sequences.each(rooms), [room + 1 for room in rooms.values()])
        return dict(zip(rooms, drafts, strict=True))

    def _compute(self, step: ServeStep, drafts: Mapping[int, Sequence[int]], begun: float) -> None:
        """One step, of one pass unless prompts want more logits than fit."""
        shares = step.rows
        shape = mixed_of(step)
        told: list[Message | Chosen] = []
        self._tell_begun(shares)
        logits, wanted = self._logits(shares, drafts, told)
        self._vitals.expect(shape)
        self._meanwhile()
        void = self._sequences.confirm()
        for number, cached in void.items():
            self._scheduler.recomputed(number, cached)
        chosen, over = self._choose(logits, {number: rows for number, rows in wanted.items() if number not in void}, drafts, told)
        for share in shares:
            if share.kind == "verify":
                self._sequences.verified(share.number, share.start + len(chosen[share.number]))
        for number, tokens in chosen.items():
            if None in tokens:
                self._sequences.spoil(number)
        self._tell(told)
        now = time.perf_counter()
        decoded = [share for share in shares if share.kind != "prompt"]
        gave = sum(len(chosen[share.number]) for share in decoded)
        self._vitals.passed(shape, gave, now - begun, begun - self._idle_from)
        self._idle_from = now
        if self._chains is not None:
            self._book(self._chains, decoded, drafts, chosen, None if shape.tokens else now - begun)
        for share in shares:
            if share.kind == "prompt" and share.wanted and share.number not in void and share.number not in over:
                self._sequences.keep(share.number)
        for number in self._scheduler.finished(over, {number: len(tokens) for number, tokens in chosen.items()}):
            self._replies.end(self._replies[number])
            self._sequences.end(number)
        self._vitals.totals.restored_tokens = self._sequences.restored_tokens

    def _tell_begun(self, shares: Sequence[Share]) -> None:
        """Before the pass is computed: the front makes their responses meanwhile, and their first tokens then find these begun."""
        new = [(reply, share.start) for reply, share in ((self._replies[share.number], share) for share in shares) if not reply.began]
        self._tell([began for reply, start in new if (began := reply.told_of(start)) is not None])

    def _choose(
        self, logits: torch.Tensor, wanted: Mapping[int, range], drafts: Mapping[int, Sequence[int]], told: list[Message | Chosen]
    ) -> tuple[dict[int, list[int | None]], list[int]]:
        """Of each sequence, whose ``wanted`` rows of ``logits`` are: the tokens that it chooses, one behind each of its drafts that it
        would have chosen; None where its logits are no numbers. And those that are over. ``told`` gets what is said of each token.

        All that is known of a reply is chosen at once; one with a grammar goes on behind each draft that it kept.
        """
        chosen: dict[int, list[int | None]] = {number: [] for number in wanted}
        over: list[int] = []
        going = list(wanted)
        read = self._sampler.read(logits) if going else None
        while going and read is not None:
            rows = [wanted[number][len(chosen[number]) :] for number in going]
            left = [drafts.get(number, ())[len(chosen[number]) :] for number in going]
            runs = self._sampler.pick(read, rows, [self._replies[number].choice for number in going], left)
            agreed = []
            for number, run, own, draft in zip(going, runs, rows, left, strict=True):
                for pick in run:
                    chosen[number].append(pick.token)
                    if self._say(number, pick, told):
                        over.append(number)
                        break
                else:
                    if len(run) < len(own) and run[-1].token == draft[len(run) - 1]:
                        agreed.append(number)
            going = agreed
        return chosen, over

    def _say(self, number: int, pick: Picked, told: list[Message | Chosen]) -> bool:
        """Its reply goes on with ``pick``. Whether it is over."""
        reply = self._replies[number]
        said_, last = reply.goes_on(pick)
        told += said_
        if pick.token is None:
            self._vitals.totals.errors += 1
        elif not last or pick.token not in reply.submit.stop_ids:
            self._sequences.said(number, pick.token)
            self._vitals.totals.tokens += 1
        return last

    def _book(
        self,
        chains: Chains,
        decoded: Sequence[Share],
        drafts: Mapping[int, Sequence[int]],
        chosen: Mapping[int, Sequence[int | None]],
        seconds: float | None,
    ) -> None:
        """What became of drafts in a pass of ``seconds``; None: it carried prompts as well."""
        if not decoded:
            return
        verified = [drafts.get(share.number, ())[: share.count - 1] for share in decoded]
        chains.book(verified, [[token or 0 for token in chosen[share.number]] for share in decoded], seconds)
        totals = self._vitals.totals
        counts = chains.counts
        totals.drafted, totals.kept, totals.draft_s = counts.drafted, counts.kept, counts.draft_s + counts.read_s

    def _logits(
        self, shares: Sequence[Share], drafts: Mapping[int, Sequence[int]], told: list[Message | Chosen]
    ) -> tuple[torch.Tensor, dict[int, range]]:
        """Compute ``shares`` -> logits of the tokens that come next, and which rows of them each sequence has. ``told`` gets the logprobs
        of prompts."""
        asked = [share.count if share.kind == "verify" else int(share.wanted) for share in shares]
        scoring = {k: self._replies[share.number] for k, share in enumerate(shares) if share.kind == "prompt" and self._scores(share)}
        counts = [(share.count, self._wanted(share) if k in scoring else asked[k]) for k, share in enumerate(shares)]
        whole = [k for k in range(len(shares)) if k not in scoring]
        passes = cut_step(counts, self._law.wanted_rows, whole) if scoring else [[(k, *row) for k, row in enumerate(counts)]]
        done, last = [0] * len(shares), dict[int, torch.Tensor]()
        for cut in passes:
            rows = [self._sequences.row(shares[k], done[k], count, wanted, drafts.get(shares[k].number, ())) for k, count, wanted in cut]
            logits = self._step(Step(tuple(rows)))
            self._sequences.computed(rows)
            if not scoring:
                return logits, _places(shares, asked)
            parts = logits.split([row.wanted for row in rows])
            for (k, count, _), row, own in zip(cut, rows, parts, strict=True):
                done[k] += count
                if k in scoring:
                    told += self._score(scoring[k], row, own)
                if asked[k] and done[k] == shares[k].count:
                    last[k] = own[-asked[k] :].clone()
        order = sorted(last)
        found = torch.cat([last[k] for k in order]) if order else torch.empty(0)
        return found, _places([shares[k] for k in order], [asked[k] for k in order])

    def _scores(self, share: Share) -> bool:
        reply = self._replies[share.number]
        return reply.scores and share.start + share.count >= reply.scored

    def _wanted(self, share: Share) -> int:
        """Last tokens of ``share`` whose logits tell the prompt's next ones."""
        first = max(share.start, self._replies[share.number].scored - 1)
        return share.start + share.count - first

    def _score(self, reply: Reply, row: Row, logits: torch.Tensor) -> list[Message]:
        """``logits`` of the last tokens of ``row`` tell the tokens of the prompt behind them."""
        prompt, first = reply.submit.prompt, row.end - row.wanted + 1
        tokens = prompt[first : row.end + 1]
        if not tokens:
            return []
        found = in_blocks(logits[: len(tokens)], self._put(tokens), reply.submit.prompt_logprobs or 0, self._law.block_rows)
        reply.scored = first + len(tokens)
        rows = [(token, own, (ids, values)) for token, (own, ids, values) in zip(tokens, found, strict=True)]
        return [PromptLogprobs(reply.submit.id, rows)]

    def _tell(self, words: Sequence[Message | Chosen]) -> None:
        self._frames.send(*map(said, together(words)))

    def _vital(self) -> dict[str, Any]:
        used = self._scheduler.limits.pages - self._sequences.free
        return self._vitals.take(self._scheduler.living, self._scheduler.waiting, used, self._sequences.kept)


def _places(shares: Sequence[Share], wanted: Sequence[int]) -> dict[int, range]:
    """Sequence -> its rows of the logits, where those of ``shares`` follow each other, ``wanted`` of each."""
    ends = list(accumulate(wanted))
    return {share.number: range(end - count, end) for share, count, end in zip(shares, wanted, ends, strict=True) if count}
