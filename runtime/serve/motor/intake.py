"""What the front asks, taken or refused: checked, its grammar compiled, its kept pages fetched, and then in line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from penstock.planner.common.errors import UserError
from penstock.planner.contract.serving.serve_scheduler import Scheduler
from penstock.planner.contract.serving.waiting import QueueFull, ServeRequest
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.serve.motor.grammars import Grammars, Matcher
from penstock.runtime.serve.motor.inbox import Inbox
from penstock.runtime.serve.motor.replies import Replies, Reply, check_submit, sampling_for
from penstock.runtime.serve.motor.serve_sequences import ServeSequences
from penstock.runtime.serve.motor.vitals import Totals
from penstock.runtime.serve.wire.messages import Cancel, Drain, Message, Refused, Submit


@dataclass(frozen=True)
class Compiled:
    """A request whose grammar was compiled, or what is wrong with it."""

    submit: Submit
    grammar: Matcher | UserError


@dataclass(frozen=True)
class Fetched:
    """A request whose kept pages lie in memory now."""

    id: int


@dataclass(frozen=True)
class ServeLaw:
    """What requests and passes are held to."""

    vocab: int
    capacity_tokens: int
    """Of a prompt and its reply."""
    wanted_rows: int
    """Logits that one pass gives, at most."""
    block_rows: int
    """Of these, that are taken to float32 at once."""


class Intake:
    """Between passes. What takes time, other threads do; they put what came of it into ``inbox``."""

    def __init__(
        self,
        scheduler: Scheduler,
        sequences: ServeSequences,
        generation: GenerationConfig,
        grammars: Grammars | None,
        law: ServeLaw,
        put: Put,
        inbox: Inbox,
        totals: Totals,
    ):
        self._scheduler, self._sequences, self._generation, self._grammars = scheduler, sequences, generation, grammars
        self._law, self._put, self._inbox, self._totals = law, put, inbox, totals
        self.replies = Replies()
        self._compiling: set[int] = set()
        """Requests whose grammars are."""
        self._draining = False

    @property
    def over(self) -> bool:
        """Whether it was drained: nothing lives, nothing comes."""
        return self._draining and not self.replies and not self._compiling

    def obey(self, message: Any) -> Sequence[Message]:
        """What is told of it at once."""
        if isinstance(message, Submit):
            return self._take(message)
        if isinstance(message, Compiled):
            return self._compiled(message)
        if isinstance(message, Fetched):
            return self._join(self.replies.of(message.id, None))
        if isinstance(message, Cancel):
            return self._cancel(message)
        if isinstance(message, Drain):
            self._draining = True
            return ()
        raise RuntimeError(f"the front said {type(message).__name__}")

    def _take(self, submit: Submit) -> Sequence[Message]:
        try:
            check_submit(submit, self._law.vocab, self._law.capacity_tokens)
        except UserError as error:
            kind, _, line = str(error).partition(": ")
            return self._refuse(submit, kind, line)
        if self._draining:
            return self._refuse(submit, "draining", "the server is ending")
        if submit.grammar is None:
            return self._begin(submit, None)
        if self._grammars is None:
            return self._refuse(submit, "bad_grammar", "grammars are not served")
        self._compiling.add(submit.id)
        self._grammars.compile(submit.grammar, lambda grammar: self._inbox.put(Compiled(submit, grammar)))
        return ()

    def _compiled(self, compiled: Compiled) -> Sequence[Message]:
        submit, grammar = compiled.submit, compiled.grammar
        if submit.id not in self._compiling:
            return ()  # nobody waits for it any more
        self._compiling.discard(submit.id)
        return self._refuse(submit, "bad_grammar", str(grammar)) if isinstance(grammar, UserError) else self._begin(submit, grammar)

    def _begin(self, submit: Submit, matcher: Matcher | None) -> Sequence[Message]:
        try:
            sampling = sampling_for(submit.sampling, self._generation)
        except UserError as error:
            return self._refuse(submit, "bad_sampling", str(error))
        limits, waiting = self._scheduler.limits, len(self.replies) - self._scheduler.living
        if waiting + submit.n > limits.queue + max(0, limits.rows - self._scheduler.living):
            return self._refuse(submit, "queue_full", f"{waiting} requests wait already")
        replies = self.replies.begin(submit, sampling, self._put, matcher)
        for reply in replies:
            self._sequences.begin(reply.number, submit.prompt, submit.salt, alone=reply.scores)
        fetched = Fetched(submit.id)
        return () if self._sequences.fetch(replies[0].number, lambda: self._inbox.put(fetched)) else self._join(replies)

    def _join(self, replies: Sequence[Reply]) -> Sequence[Message]:
        """Get in line. The first one computes the prompt, which the others then share."""
        replies = list(replies)
        for reply in replies:
            submit, after = reply.submit, None if reply is replies[0] else replies[0].number
            try:
                self._scheduler.add(ServeRequest(reply.number, len(submit.prompt), max(1, submit.new_tokens), after))
            except (QueueFull, ValueError) as error:
                for each in replies:
                    self._leave(each)
                return self._refuse(submit, "queue_full" if isinstance(error, QueueFull) else "too_long", str(error))
        self._totals.requests += bool(replies)
        return ()

    def _refuse(self, submit: Submit, kind: str, line: str) -> Sequence[Message]:
        self._totals.refused += 1
        return [Refused(submit.id, kind, line)]

    def _cancel(self, cancel: Cancel) -> Sequence[Message]:
        self._compiling.discard(cancel.id)
        replies = list(self.replies.of(cancel.id, cancel.index))
        for reply in replies:
            self._leave(reply)
        return [reply.over("abort") for reply in replies]

    def _leave(self, reply: Reply) -> None:
        """It is over, whatever became of it."""
        self._scheduler.abort(reply.number)
        self.replies.end(reply)
        self._sequences.end(reply.number)
