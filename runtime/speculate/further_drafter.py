"""The model's own heads that predict further tokens: one layer, which reads the hidden states of the model's passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from penstock.planner.contract.decided.speculating import MOST_DRAFTS
from penstock.planner.contract.speculation.resident_drafter import STATES_WAITING
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.further.hidden_rows import HiddenRows
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.speculate.drafter import Drafts
from penstock.runtime.speculate.model_drafter import Steps

WAITING = STATES_WAITING - MOST_DRAFTS - 1
"""Hidden states of a row that wait for drafts to be asked for. More are taken in at once, so that a drafter at rest costs little."""


@dataclass
class _Taken:
    """A row as the head has it. Its entry e is the hidden state of token ``first`` + e, with the token behind that one."""

    own: KvSequence
    """Its tokens are those of the entries; K and V hold ``own.cached`` of them."""
    first: int
    """Tokens before it were restored, so nobody has seen their hidden states: the head attends to those from here on."""
    states: torch.Tensor
    """Hidden states of the entries from ``own.cached`` on: [entries, hidden]."""

    def see(self, row: Row, states: torch.Tensor) -> None:
        """``row`` was computed, with ``states`` [tokens, hidden]. What was known behind its start is void."""
        at = row.start - self.first
        waiting = self.states[: max(0, at - self.own.cached)]
        self.own.cached = min(self.own.cached, at)
        self.states = torch.cat([waiting, states])
        self.own.tokens[max(0, at - 1) :] = row.tokens if at else row.tokens[1:]

    def say(self, tokens: Sequence[int]) -> None:
        """``tokens`` are the row's so far."""
        cached = self.own.cached
        self.own.tokens[cached:] = tokens[self.first + 1 + cached :]

    def waiting(self, sure: int) -> int:
        """Of the first ``sure`` entries: how many K and V lack, as far as their states are known."""
        return max(0, min(sure - self.own.cached, len(self.states)))


class FurtherDrafter:
    """Greedy chains of the first head, which goes on from its own hidden state for each token after the first.

    ``steps`` compute the head. ``said`` has the hidden states of the model's passes, ``given`` those that the head reads, ``made`` those
    that it computes. Prompts are taken in as their passes end, ``chunk_tokens`` of a row at once. Rows without pages get no drafts.
    """

    def __init__(self, steps: Steps, said: HiddenRows, given: HiddenRows, made: HiddenRows, chunk_tokens: int):
        self._steps, self._said, self._given, self._made, self._chunk_tokens = steps, said, given, made, chunk_tokens
        self._rows: dict[int, _Taken] = {}

    def saw(self, step: Step) -> None:
        """The model computed ``step``."""
        each = self._said.of(step.tokens).split([len(row.tokens) for row in step.rows])
        late: list[tuple[_Taken, int]] = []
        for row, states in zip(step.rows, each, strict=True):
            taken = self._taken(row, states)
            taken.see(row, states)
            prompt = row.kind is RowKind.prompt
            sure = len(taken.own.tokens) if prompt else row.start - taken.first
            if taken.waiting(sure) > (0 if prompt else WAITING) and taken.own.hold_where_free(self._steps.pool.pages, sure):
                late.append((taken, sure))
        while late:
            self._run([(taken, min(self._chunk_tokens, taken.waiting(sure)), 0) for taken, sure in late], RowKind.prompt)
            late = [(taken, sure) for taken, sure in late if taken.waiting(sure)]
        self._said.drop()
        self._given.drop()
        self._made.drop()

    def ended(self, number: int) -> None:
        """The model has forgotten sequence ``number``."""
        taken = self._rows.pop(number, None)
        if taken is not None:
            self._steps.forget(number)
            taken.own.release(self._steps.pool.pages)

    def read(self, rows: Sequence[KvSequence]) -> None:
        for row in rows:
            if row.number in self._rows:
                self._rows[row.number].say(row.tokens)

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        drafts: dict[int, list[int]] = {row.number: [] for row in rows}
        rooms = {row.number: room for row, room in zip(rows, most, strict=True)}
        going = [self._rows[number] for number, room in rooms.items() if room and self._ready(number, room)]
        said = {taken.own.number: len(taken.own.tokens) for taken in going}
        counts = [taken.own.left for taken in going]
        while going:
            kind = RowKind.verify if max(counts) > 1 else RowKind.decode
            logits = self._run([(taken, count, 1) for taken, count in zip(going, counts, strict=True)], kind)
            made = self._made.of(sum(counts))
            last = zip(going, logits.argmax(-1).tolist(), accumulate(counts), strict=True)
            for taken, token, end in last:
                taken.own.tokens.append(token)
                taken.states = made[end - 1 : end].clone()
                drafts[taken.own.number].append(token)
            going = [taken for taken in going if len(drafts[taken.own.number]) < rooms[taken.own.number]]
            counts = [1] * len(going)
        for number, count in said.items():
            own = self._rows[number].own
            own.cached = count  # what was drafted has the head's states, and is computed again with the model's
            del own.tokens[count:]
            self._rows[number].states = self._rows[number].states[:0]
        return [drafts[row.number] for row in rows]

    def rest(self, number: int) -> None:
        """Nothing: the model forgets it, and :meth:`ended` is told."""

    def forget(self, number: int) -> None:
        """Nothing: a sequence may go on in another batch. :meth:`ended` is told of its end."""

    def _taken(self, row: Row, states: torch.Tensor) -> _Taken:
        """What is known of the sequence of ``row``; begun anew where it does not lead up to it."""
        known = self._rows.get(row.sequence)
        if known is None or not known.first <= row.start <= known.first + known.own.cached + len(known.states):
            self.ended(row.sequence)
            known = self._rows[row.sequence] = _Taken(KvSequence.of(row.sequence, ()), row.start, states[:0])
        return known

    def _ready(self, number: int, room: int) -> bool:
        """Whether a chain of ``room`` tokens may begin."""
        taken = self._rows.get(number)
        if taken is None or not 0 < taken.own.left == taken.waiting(len(taken.own.tokens)):
            return False
        return taken.own.hold_where_free(self._steps.pool.pages, len(taken.own.tokens) + room)

    def _run(self, taken: Sequence[tuple[_Taken, int, int]], kind: RowKind) -> torch.Tensor:
        """The next tokens of each, as many as it says, with as many logits wanted."""
        self._given.put(torch.cat([one.states[:count] for one, count, _ in taken]))
        step = Step(tuple(one.own.row(count, kind, wanted) for one, count, wanted in taken))
        logits = self._steps.run(step)
        for one, count, _ in taken:
            one.own.cached += count
            one.states = one.states[count:].clone()
        return logits
