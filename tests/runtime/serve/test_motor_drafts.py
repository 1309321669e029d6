"""Drafts change how long a server's replies take, never what they say: whatever is asked, and whoever drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.checkpoint.draft_checkpoint import heads_spec
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.serve.motor import served as serving
from penstock.runtime.serve.wire.messages import Cancel, Sampled, Submit
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Drafts
from penstock.runtime.speculate.model_drafter import ModelDrafter
from tests.runtime.serve.motors import GREEDY, Heard, motor, serving_plan, submit
from tests.runtime.serve.test_motor import prompt_of
from tests.runtime.speculate.test_further_drafter import GLM, GROUPS
from tests.support import add_further_head, save_tiny

WARM = Sampled(temperature=0.9, top_k=20, seed=5)
PENALISED = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={7: 2.0})


class Knows:
    """Drafts what was said ``before`` to the same prompt; each token is wrong with the probability ``wrong``."""

    def __init__(self, before: Sequence[tuple[list[int], list[int]]], wrong: float):
        self._before, self._wrong, self._chance = before, wrong, random.Random(1)
        self.forgotten: set[int] = set()

    def read(self, rows: Sequence[KvSequence]) -> None:
        assert all(row.tokens for row in rows)

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        return [self._behind(row.tokens, count) for row, count in zip(rows, most, strict=True)]

    def _behind(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        for prompt, reply in self._before:
            said = len(tokens) - len(prompt)
            if list(tokens) == [*prompt, *reply[:said]] and said < len(reply):
                return [token if self._chance.random() >= self._wrong else 1 + token % 250 for token in reply[said : said + most]]
        return [3] * self._chance.randint(0, most)

    def rest(self, number: int) -> None:
        assert number not in self.forgotten

    def forget(self, number: int) -> None:
        self.forgotten.add(number)


def drafting(plan: Plan, tokens: int) -> Plan:
    return replace(plan, decisions=replace(plan.decisions, speculation=Speculation(Drafter.lookup, tokens, 0.3)))


def with_model(plan: Plan, tokens: int, checkpoint: Path) -> Plan:
    """For a server, with the model of ``checkpoint``."""
    decided = Speculation(Drafter.draft, tokens, 0.6, spec_from_checkpoint(checkpoint))
    work = replace(plan.workload, clients=plan.decisions.batch)
    return replace(plan, decisions=replace(plan.decisions, speculation=decided), workload=work)


def schema_of(a: str) -> str:
    schema = {"type": "object", "properties": {a: {"type": "integer", "maximum": 99}}, "required": [a], "additionalProperties": False}
    return json.dumps({"grammars": [{"json_schema": schema}]})


def everything() -> list[Submit]:
    """Requests with all that a reply may be asked for."""
    long = prompt_of(40, 45)
    return [
        submit(0, prompt_of(1, 20), 24),
        submit(1, prompt_of(2, 9), 17, sampling=WARM, n=3, logprobs=2),
        submit(2, prompt_of(3, 30), 20, sampling=PENALISED),
        submit(3, long, 20, sampling=replace(WARM, presence_penalty=0.7, seed=8), logprobs=0),
        submit(4, prompt_of(5, 12), 22, stop_ids=list(range(0, 300, 40)), min_tokens=6, logprobs=1),
        submit(5, prompt_of(6, 25), 9, logprobs=3, prompt_logprobs=1),
        submit(6, prompt_of(7, 11), 24, grammar=schema_of("a"), sampling=replace(WARM, temperature=1.5), n=2),
        submit(7, [*long[:32], 9], 1),
        submit(8, prompt_of(8, 14), 18, stop_ids=list(range(0, 300, 25)), ignore_eos=True),
    ]


@pytest.mark.parametrize(("pages", "wanted", "wrongs"), [(40, 200, (0.0, None)), (9, 8, (0.3,))])
def test_drafts_change_no_reply_of_a_server(
    desk: Path, monkeypatch: pytest.MonkeyPatch, pages: int, wanted: int, wrongs: Sequence[float | None]
) -> None:
    """By drafters that know the replies, that are wrong at times, and that look them up; in a pool and passes that have room and not."""
    monkeypatch.setattr(ChainLength, "choose", lambda length: length.most)
    monkeypatch.setattr(serving, "wanted_rows", lambda plan, pass_tokens: wanted)
    checkpoint = desk / "model"
    plan = serving_plan(checkpoint, pages=pages)
    with motor(plan, checkpoint, grammars=True) as made:
        said = made.front.answers(*everything())
        assert made.front.drain()["totals"]["drafted"] == 0 and all(heard.refused is None for heard in said)
    before = [(one.prompt, reply) for one, heard in zip(everything(), said, strict=True) for reply in heard.tokens.values()]
    for wrong in wrongs:
        who = None if wrong is None else Knows(before, wrong)
        with motor(drafting(plan, 5), checkpoint, grammars=True) as made:
            chains = made.served.session.chains
            assert isinstance(chains, Chains)
            if who is not None:
                chains._proposer = who
            found = made.front.answers(*everything())
            made.front.say(submit(50, prompt_of(9, 30), 60))
            late = made.front.requests[50]
            made.front.hear(lambda late=late: len(late.tokens.get(0, ())) > 3)  # type: ignore[misc]
            made.front.say(Cancel(50))
            made.front.hear(lambda late=late: bool(late.over))  # type: ignore[misc]
            totals = made.front.drain()["totals"]
        assert [plain_of(heard) for heard in found] == [plain_of(heard) for heard in said]
        for own, first in zip(found, said, strict=True):
            assert logprobs_of(own) == pytest.approx(logprobs_of(first), abs=1e-4)
        if who is not None:
            assert 0 < totals["kept"] <= totals["drafted"]
            assert len(who.forgotten) == 13, "a sequence is remembered for ever"
        assert pages > 9 or totals["given_up"] > 0


def test_a_model_drafts_in_a_server(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its K and V follow rows that join, leave, are given up and come back; for greedy ones the model itself is right nearly always. It
    reads prompts in parts."""
    greedy = [submit(20 + k, prompt_of(20 + k, 12 + 7 * k), 26) for k in range(6)]
    monkeypatch.setattr(ChainLength, "choose", lambda length: length.most)
    monkeypatch.setattr(serving, "wanted_rows", lambda plan, pass_tokens: 24)
    checkpoint = desk / "model"
    plan = serving_plan(checkpoint, pages=7, chunk=32)
    with motor(plan, checkpoint, grammars=True) as made:
        said = made.front.answers(*greedy) + made.front.answers(*everything())
        made.front.drain()
    with motor(with_model(plan, 5, checkpoint), checkpoint, grammars=True) as made:
        chains = made.served.session.chains
        assert chains is not None
        drafter = chains._proposer
        assert isinstance(drafter, ModelDrafter) and drafter._at_once
        found = made.front.answers(*greedy)
        assert chains.counts.kept > 0.8 * sum(chains.counts.tried_at) > 40
        found += made.front.answers(*everything())
        made.front.say(submit(50, prompt_of(9, 30), 60))
        late = made.front.requests[50]
        made.front.hear(lambda: len(late.tokens.get(0, ())) > 3)
        made.front.say(Cancel(50))
        made.front.hear(lambda: bool(late.over))
        totals = made.front.drain()["totals"]
        pool = drafter._steps.pool.pages
        assert not drafter._followed and pool.free == pool.slots, "memory of a sequence that has gone"
    assert [plain_of(heard) for heard in found] == [plain_of(heard) for heard in said]
    assert 0 < totals["draft_s"] < totals["pass_s"] and totals["given_up"] > 0


def test_further_heads_draft_in_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that knows what follows each token is always right, also of rows that were given up and came back."""
    monkeypatch.setattr(ChainLength, "choose", lambda length: length.most)
    checkpoint = add_further_head(save_tiny(tmp_path / "glm", "glm4_moe", layers=2, **GLM, **GROUPS), still=True)
    greedy = [submit(k, prompt_of(20 + k, 12 + 7 * k), 26) for k in range(6)]
    plan = serving_plan(checkpoint, pages=7, chunk=32)
    heads = Speculation(Drafter.mtp, 3, 0.7, heads_spec(spec_from_checkpoint(checkpoint)))
    said, totals = [], {}
    for one in (plan, replace(plan, decisions=replace(plan.decisions, speculation=heads))):
        with motor(one, checkpoint) as made:
            said.append([plain_of(heard) for heard in made.front.answers(*greedy)])
            totals = made.front.drain()["totals"]
    assert said[0] == said[1]
    assert totals["kept"] == totals["drafted"] > 60 and totals["given_up"] > 0


def plain_of(heard: Heard) -> tuple[object, ...]:
    over = {index: (last.reason, last.stop_id) for index, last in heard.over.items()}
    return heard.tokens, over, [token for token, *_ in heard.prompt]


def logprobs_of(heard: Heard) -> list[float]:
    rows = [row for rows in heard.logprobs.values() for row in rows] + [(own, *likeliest) for _, own, likeliest in heard.prompt]
    return [number for own, ids, values in rows for number in (own, *ids, *values)]
