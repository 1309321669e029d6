"""The requests that a motor has taken on, and what is told of each."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import GenerationConfig

from penstock.planner.common.errors import UserError
from penstock.runtime.asked.sampling_keys import Sampling, SamplingKeys, check_sampling, sampling_of
from penstock.runtime.engine.passes.sampling import seed_of
from penstock.runtime.kv.attention.page_tables import Put
from penstock.runtime.serve.motor.grammars import Matcher
from penstock.runtime.serve.motor.row_choice import RowChoice, Told
from penstock.runtime.serve.motor.row_sampling import Picked
from penstock.runtime.serve.wire.messages import Began, Chosen, Message, Over, Reason, Sampled, Submit


@dataclass(eq=False)
class Reply:
    """One of a request's n replies; ``number`` is its sequence's."""

    number: int
    submit: Submit
    index: int
    choice: RowChoice
    began: bool = False
    said: int = 0
    """Tokens that were told."""
    scored: int = 1
    """Tokens of the prompt whose logprobs were told, where they are asked; the first has none."""

    @property
    def scores(self) -> bool:
        """Whether it tells the logprobs of the prompt."""
        return self.submit.prompt_logprobs is not None and self.index == 0 and self.scored < len(self.submit.prompt)

    def told_of(self, start: int) -> Began | None:
        """What is told when it is computed for the first time, from token ``start`` on."""
        first, self.began = not self.began, True
        return Began(self.submit.id, len(self.submit.prompt), start) if first and self.index == 0 else None

    def goes_on(self, picked: Picked) -> tuple[list[Message | Chosen], bool]:
        """What is told of the token that was ``picked``, and whether that was the last."""
        submit, token = self.submit, picked.token
        if token is None:
            return [self.over("error", message="the logits are not numbers (NaN): the checkpoint is damaged, or exceeds its dtype")], True
        if picked.error is not None:
            return [self.over("error", message=picked.error)], True
        if not submit.new_tokens:
            return [self.over("length")], True
        if not submit.ignore_eos and token in submit.stop_ids:
            return [Over(submit.id, self.index, "stop", token, logprobs=picked.logprobs)], True
        self.said += 1
        said: list[Message | Chosen] = [
            Chosen(submit.id, self.index, [token], None if picked.logprobs is None else [picked.logprobs], time.monotonic())
        ]
        if self.choice.matcher is not None and self.choice.matcher.over:
            return [*said, self.over("stop")], True
        if self.said >= submit.new_tokens:
            return [*said, self.over("length")], True
        return said, False

    def over(self, reason: Reason, message: str | None = None) -> Over:
        return Over(self.submit.id, self.index, reason, None, message)


@dataclass
class Replies:
    """By the numbers of their sequences; a number is never used twice."""

    _by_number: dict[int, Reply] = field(default_factory=dict)
    _by_id: dict[int, list[Reply]] = field(default_factory=dict)
    _begun: int = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def __getitem__(self, number: int) -> Reply:
        return self._by_number[number]

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def begin(self, submit: Submit, sampling: Sampling, put: Put, matcher: Matcher | None) -> list[Reply]:
        """All n replies of ``submit``, each with a chance of its own."""
        stops = frozenset() if submit.ignore_eos else frozenset(submit.stop_ids)
        told = Told(stops, submit.min_tokens, submit.logprobs, submit.sampling.logit_bias)
        found = []
        for index in range(submit.n):
            own = matcher.twin() if matcher is not None and index else matcher
            choice = RowChoice(sampling, told, submit.prompt, seed_of(sampling.seed, index), put, own)
            found.append(Reply(self._begun, submit, index, choice))
            self._begun += 1
        self._by_number |= {reply.number: reply for reply in found}
        self._by_id[submit.id] = list(found)
        return found

    def of(self, id: int, index: int | None) -> Sequence[Reply]:
        """Those of request ``id`` that are not over."""
        return [reply for reply in self._by_id.get(id, ()) if index is None or reply.index == index]

    def every(self) -> Iterator[Reply]:
        yield from list(self._by_number.values())

    def end(self, reply: Reply) -> None:
        """It is over."""
        del self._by_number[reply.number]
        rest = self._by_id[reply.submit.id]
        rest.remove(reply)
        if not rest:
            del self._by_id[reply.submit.id]


def sampling_for(sampled: Sampled, generation: GenerationConfig) -> Sampling:
    """``sampled`` over the checkpoint's ``generation`` config. UserError for a value that no token can be chosen by."""
    keys = SamplingKeys(
        temperature=sampled.temperature,
        top_k=sampled.top_k,
        top_p=sampled.top_p,
        min_p=sampled.min_p,
        repetition_penalty=sampled.repetition_penalty,
        frequency_penalty=sampled.frequency_penalty,
        presence_penalty=sampled.presence_penalty,
        seed=secrets.randbits(62) if sampled.seed is None else sampled.seed,
    )
    check_sampling(keys)
    return sampling_of(keys, generation)


def check_submit(submit: Submit, vocab: int, capacity_tokens: int) -> None:
    """UserError for what no motor can compute; its first word is the kind of ``Refused``."""
    length = len(submit.prompt)
    wrong = next((token for token in [*submit.prompt, *submit.sampling.logit_bias, *submit.stop_ids] if not 0 <= token < vocab), None)
    if wrong is not None or not length:
        raise UserError("bad_prompt: " + ("it has no tokens" if wrong is None else f"token {wrong}: 0 to {vocab - 1} are allowed"))
    if submit.n < 1 or submit.new_tokens < 0 or submit.min_tokens > submit.new_tokens:
        raise UserError(f"bad_sampling: n={submit.n}, new_tokens={submit.new_tokens}, min_tokens={submit.min_tokens} do not go together")
    if length + submit.new_tokens > capacity_tokens:
        raise UserError(f"too_long: {length} tokens and {submit.new_tokens} new ones; the context has room for {capacity_tokens} together")
