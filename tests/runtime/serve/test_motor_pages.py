"""Kept pages of a server: what one life of a motor computed, the next one restores; what is damaged is computed again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.contract.decided.decisions import KvReuse
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.serve.wire.messages import Cancel
from tests.runtime.fakes import LockingCopier
from tests.runtime.serve.motors import GREEDY, Motor, alone, motor, serving_plan, submit
from tests.runtime.serve.test_motor import prompt_of


def keeping_plan(checkpoint: Path, gpu: bool, dram_pages: int = 12) -> Plan:
    plan = serving_plan(checkpoint, gpu=gpu)
    kv = replace(plan.decisions.kv, reuse=KvReuse(vram_pages=4 if gpu else 0, dram_pages=dram_pages))
    return replace(plan, decisions=replace(plan.decisions, kv=kv))


@pytest.mark.parametrize("gpu", [False, True])
def test_what_one_motor_computed_the_next_one_restores(exact_checkpoint: Path, tmp_path: Path, gpu: bool) -> None:
    plan, kv, prompt = keeping_plan(exact_checkpoint, gpu), ReuseConfig(dir=str(tmp_path), read_gbps=1e9), prompt_of(3, 50)
    with motor(plan, exact_checkpoint, LockingCopier() if gpu else None, kv) as made:
        (first,) = made.front.answers(submit(0, prompt, 8, salt="a"))
        assert made.front.drain()["kv_reuse"]["pages_written"] == 3
    with motor(plan, exact_checkpoint, LockingCopier() if gpu else None, kv) as made:
        (other,) = made.front.answers(submit(0, prompt, 8, salt="b"))
        (again,) = made.front.answers(submit(1, prompt, 8, salt="a"))
        assert [heard.began and heard.began.cached_tokens for heard in (first, other, again)] == [0, 0, 48]
        assert first.tokens[0] == other.tokens[0] == again.tokens[0] == alone(made.served, prompt, 8)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_damaged_page_is_computed_again_and_others_do_not_notice(exact_checkpoint: Path, gpu: bool) -> None:
    with motor(keeping_plan(exact_checkpoint, gpu), exact_checkpoint, LockingCopier() if gpu else None) as made:
        session, prompt = made.served.session, prompt_of(4, 60)
        made.front.answers(submit(0, prompt, 4))
        assert session.prefix is not None
        while session.prefix.pending:
            session.prefix.finish()
        session.prefix.forget()
        memory = session.engine.page_memory
        memory.view[memory.tensor.numel() // 12 + 77] ^= 4  # in the second page
        asked = [submit(1, prompt, 9), submit(2, prompt_of(5, 20), 9), submit(3, [*prompt[:30], 7], 9)]
        found = made.front.answers(*asked)
        assert [heard.tokens[0] for heard in found] == [alone(made.served, one.prompt, 9) for one in asked]
        assert session.prefix.facts()["failures"] == 1


def test_rows_that_are_given_up_go_on_from_kept_pages(exact_checkpoint: Path) -> None:
    plan = keeping_plan(exact_checkpoint, gpu=False, dram_pages=40)
    plan = replace(plan, decisions=replace(plan.decisions, kv=replace(plan.decisions.kv, dram_pages=8 * plan.model.layers)))
    with motor(plan, exact_checkpoint) as tight:
        asked = [submit(k, prompt_of(k, 20), 40) for k in range(4)]
        found = tight.front.answers(*asked)
        assert [heard.tokens[0] for heard in found] == [alone(tight.served, one.prompt, 40) for one in asked]
        totals = tight.front.drain()["totals"]
    assert totals["given_up"] > 0 and totals["restored_tokens"] > 0
    assert totals["prompt_tokens"] < 80 + 60 * totals["given_up"]


@pytest.fixture
def speaking(shared_models: Path) -> Iterator[Motor]:
    """A motor whose checkpoint has a tokenizer."""
    checkpoint = shared_models / "tiny-llama"
    with motor(serving_plan(checkpoint), checkpoint) as made:
        yield made


def test_a_grammar_is_kept_to_beside_rows_without_one(speaking: Motor) -> None:
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"], "additionalProperties": False}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    prompt, text = prompt_of(1, 20), speaking.served.text
    stops = sorted(speaking.served.stop_ids)
    hot = replace(GREEDY, temperature=1.5, seed=4)
    asked = [
        submit(0, prompt, 30, grammar=grammar, stop_ids=stops),
        submit(1, prompt, 12),
        submit(2, prompt, 30, grammar=grammar, stop_ids=stops, sampling=hot, n=2),
        submit(3, prompt, 12, grammar="no grammar"),
    ]
    first, plain, drawn, refused = speaking.front.answers(*asked)
    for heard, index in ((first, 0), (drawn, 0), (drawn, 1)):
        said = json.loads(text(heard.tokens[index]))
        assert list(said) == ["a"] and isinstance(said["a"], int) and heard.over[index].reason == "stop"
    assert plain.tokens[0] == alone(speaking.served, prompt, 12)
    assert refused.refused is not None and refused.refused.kind == "bad_grammar" and "\n" not in refused.refused.message


def test_a_disk_that_takes_its_time_holds_up_no_other_row(exact_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, kv, prompt = keeping_plan(exact_checkpoint, gpu=False), ReuseConfig(dir=str(tmp_path), read_gbps=1e9), prompt_of(3, 50)
    with motor(plan, exact_checkpoint, kv=kv) as made:
        (first,) = made.front.answers(submit(0, prompt, 8))
        made.front.drain()
    with motor(plan, exact_checkpoint, kv=kv) as made:
        kept, read = threading.Event(), made.served.session.kept.pages.read  # type: ignore[union-attr]
        monkeypatch.setattr(made.served.session.kept.pages, "read", lambda *of: kept.wait(60) and read(*of))  # type: ignore[union-attr]
        slow, cancelled, other = submit(0, prompt, 8), submit(1, prompt, 8), submit(2, prompt_of(9, 20), 8)
        made.front.say(slow, cancelled)
        made.front.answers(other)
        assert not made.front.requests[0].tokens, "it was computed, or the disk was waited for"
        made.front.say(Cancel(1))
        made.front.wait(cancelled)
        kept.set()
        made.front.wait(slow)
        again = made.front.requests[0]
        assert again.began is not None and again.began.cached_tokens == 48 and again.tokens == first.tokens
        assert made.front.requests[1].over[0].reason == "abort"
        assert made.front.drain()["kv_reuse"]["restored_tokens"] == {"vram": 0, "dram": 48, "ssd": 0}
