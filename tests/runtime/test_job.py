"""A job is the plan's decisions for the work at hand: its batches, its room and its prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.contract.rules.broken import broken_rules
from penstock.runtime.asked.chat_template import find_template
from penstock.runtime.asked.foreseen import for_requests
from penstock.runtime.asked.order import capacity_tokens, read_order
from penstock.runtime.asked.prompts import Vocabulary, ids_of, random_ids, read_vocabulary
from penstock.runtime.asked.requests import Asked
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.run_job import Job, prepare
from penstock.runtime.memory.free_memory import free_dram
from tests.support import decisions, plan_for, save_tiny, with_tokenizer, workload


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    checkpoint = save_tiny(tmp_path_factory.mktemp("model"))
    made = decisions(batch=4, pages=4 * 3, prefill_chunk_tokens=16)
    return plan_for(checkpoint, made, work=workload(batch=4, prompt_tokens=30, new_tokens=10, requests=6))


def job(plan: Plan, directory: Path, **keys: object) -> Job:
    write_plan(plan, directory / "plan.yaml")
    cfg = RunConfig(plan=str(directory / "plan.yaml"), out=str(directory / "run.json"), **keys)
    return prepare(cfg, read_order(cfg), torch.device("cpu"), free_dram())


def said(batch: Batch) -> Generation:
    """A model that says 7 as often as it may."""
    return Generation([[7] * limit for limit in batch.limits])


def played(made: Job) -> list[Batch]:
    return [served.batch for served in made.play(said)]


@pytest.fixture
def served(plan: Plan) -> Plan:
    """A server's plan of 4 rows, whose pool has 256 tokens, and one of whose sequences has 160 at most."""
    kv = replace(plan.decisions.kv, dram_pages=16 * plan.model.layers)
    work = replace(plan.workload, clients=4, batch=0, context_tokens=160)
    return replace(plan, workload=work, decisions=replace(plan.decisions, kv=kv))


def test_what_a_servers_plan_has_no_room_for_is_not_sent_to_a_plan_of_the_same_kind(served: Plan, tmp_path: Path) -> None:
    """`planner replan` would give its pool one such sequence, and a run each of its rows a share of that: refused as before, for ever."""
    for keys, remedy in (
        ({"prompt_tokens": 60}, "set batch=3: they share the KV of a server's plan"),
        ({"prompt_tokens": 80, "batch": 3}, "set batch=2"),
        ({"max_new_tokens": 64}, "64 tokens a sequence where 4 share it; set batch=3"),
        ({"prompt_tokens": 151}, "workload=chat workload.context_tokens=161: this plan is a server's"),
    ):
        with pytest.raises(UserError, match=remedy) as told:
            job(served, tmp_path, **keys)
        assert "replan" not in str(told.value)
    assert job(served, tmp_path, prompt_tokens=150, batch=1).capacity_tokens == 160
    assert job(served, tmp_path, prompt_tokens=80, batch=2).capacity_tokens == 128


def test_a_prompt_alone_has_what_a_server_gives_one(served: Plan, tmp_path: Path) -> None:
    """It had a row's share of the pool, as if the other rows were there."""
    made = asked(served, tmp_path, [{"tokens": [1, 2], "max_new_tokens": 100}])
    assert (made.capacity_tokens, made.plan.decisions.batch, capacity_tokens(made.plan)) == (160, 1, 160)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 160), (2, 128), (3, 80), (4, 64)])
def test_a_row_alone_has_what_a_server_gives_one(served: Plan, batch: int, tokens: int) -> None:
    """As many tokens as the workload names, while the pool holds them: a conversation had a row's share of it."""
    made = for_requests(served, batch, 30, 10, batch)
    assert capacity_tokens(made) == tokens and made.decisions.kv.pages <= served.decisions.kv.pages


def test_random_prompts_that_do_not_fit_are_refused_before_one_is_made(plan: Plan, tmp_path: Path) -> None:
    """They were made first, behind torch's imports: a wrong number of tokens was a run that never began."""
    write_plan(plan, tmp_path / "plan.yaml")
    with pytest.raises(UserError, match=f"prompt_tokens={10**9}: {10**9} tokens and 10 new ones, the plan has room for 48 together"):
        read_order(RunConfig(plan=str(tmp_path / "plan.yaml"), out=str(tmp_path / "run.json"), prompt_tokens=10**9))


def test_requests_come_in_the_plans_batches(plan: Plan, tmp_path: Path) -> None:
    made = job(plan, tmp_path)
    batches = played(made)
    assert [len(b.prompts) for b in batches] == [4, 2]
    assert [p for b in batches for p in b.prompts] == [r.ids for r in made.requests]
    assert made.first == batches[0]
    assert made.capacity_tokens == 48 and {(b.chunk_tokens, b.max_new_tokens, b.stop_ids) for b in batches} == {(16, 10, frozenset())}


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_a_smaller_batch_keeps_each_sequences_room_and_breaks_no_rule(plan: Plan, tmp_path: Path, batch: int) -> None:
    made = job(plan, tmp_path, batch=batch)
    assert [len(b.prompts) for b in played(made)] == [batch]
    assert made.plan.decisions.batch == batch and made.plan.decisions.kv.dram_pages == 3 * batch * plan.model.layers
    assert broken_rules(made.plan.hardware, made.plan.model, made.plan.workload, made.plan.decisions) == []


def test_the_prediction_is_for_the_work_at_hand(plan: Plan, tmp_path: Path) -> None:
    made = job(plan, tmp_path, batch=1, prompt_tokens=5, max_new_tokens=3)
    assert made.plan.workload == replace(plan.workload, batch=1, prompt_tokens=5, new_tokens=3, requests=1)
    cold = predict(plan.hardware, plan.model, made.plan.workload, made.plan.decisions)
    assert replace(made.plan.prediction, load_s=cold.load_s) == cold != plan.prediction
    assert made.plan.prediction.load_s <= cold.load_s, "this checkpoint was just written: it lies in the page cache, or nobody can say"
    assert made.plan.decisions.weights == plan.decisions.weights, "how weights move is the plan's"


def test_random_prompts_fit_the_vocabulary_and_repeat_with_a_seed() -> None:
    prompts = random_ids(3, 50, 300, seed=5)
    assert len(set(prompts)) == 3 and all(len(p) == 50 and 0 <= i < 300 for p in prompts for i in p)
    assert prompts == random_ids(3, 50, 300, seed=5) != random_ids(3, 50, 300, seed=6)


def test_random_prompts_keep_the_tail_that_fits(plan: Plan, tmp_path: Path) -> None:
    made = job(plan, tmp_path, prompt_tokens=50, batch=1, clip="tail")
    (served,) = made.play(said)
    assert served.batch.prompts == [made.requests[0].ids[-38:]] and served.cut == (12,)


def test_paths_may_begin_with_a_tilde(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(replace(plan, model=replace(plan.model, digest=None)), tmp_path / "plan.yaml")
    (tmp_path / "model").symlink_to(plan.model.checkpoint)
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    order = read_order(RunConfig(plan="~/plan.yaml", checkpoint="~/model", prompts="~/prompts.txt", out="~/run.json"))
    assert (order.checkpoint, order.out, [r.prompt for r in order.requests]) == (tmp_path / "model", tmp_path / "run.json", ["one", "two"])


def asked(plan: Plan, directory: Path, lines: list[dict], **keys: object) -> Job:
    (directory / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return job(plan, directory, prompts=str(directory / "requests.jsonl"), **keys)


TALK = [
    {"tokens": [1, 2, 3], "conversation": "a", "max_new_tokens": 2},
    {"tokens": [4], "conversation": "a", "max_new_tokens": 3},
    {"tokens": [5, 6], "max_new_tokens": 1},
    {"tokens": [9, 9], "conversation": "b"},
    {"tokens": [8], "conversation": "a"},
]


def test_a_turn_begins_with_all_that_was_said_before_it(plan: Plan, tmp_path: Path) -> None:
    made = asked(plan, tmp_path, TALK, batch=2)
    served = list(made.play(said))
    assert [s.members for s in served] == [(0, 2), (1, 3), (4,)]
    assert [s.batch.prompts for s in served] == [[(1, 2, 3), (5, 6)], [(1, 2, 3, 7, 7, 4), (9, 9)], [(1, 2, 3, 7, 7, 4, 7, 7, 7, 8)]]
    assert [s.batch.limits for s in served] == [[2, 1], [3, 10], [10]] and [s.batch.max_new_tokens for s in served] == [2, 10, 10]
    assert [s.batch.keep_replies for s in served] == [[True, False], [True, True], [True]]
    assert played(made) == [s.batch for s in served], "another round begins anew"
    assert made.plan.workload == replace(plan.workload, batch=2, prompt_tokens=10, new_tokens=10, requests=5)
    assert list(map(len, made.largest.prompts)) == [10, 10] and made.first == served[0].batch


def test_the_batch_is_never_larger_than_the_conversations_that_there_are(plan: Plan, tmp_path: Path) -> None:
    made = asked(plan, tmp_path, [{"tokens": [1], "conversation": "a"}] * 3)
    assert made.plan.decisions.batch == 1 and [len(b.prompts) for b in played(made)] == [1, 1, 1]


LONG = [{"tokens": [1] * 20, "conversation": "a", "max_new_tokens": 4}, {"tokens": [2] * 25, "conversation": "a", "max_new_tokens": 8}]
"""Of 48 tokens 40 are for prompts: the second turn has 45 to 49."""


def test_what_does_not_fit_is_refused_before_anything_is_loaded_with_what_would(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        asked(plan, tmp_path, LONG)
    said = (
        "line 2: 49 tokens and 8 new ones, the plan has room for 48 together; run it with replan=true, make a plan by `planner replan plan="
    )
    assert said in str(refused.value) and str(refused.value).endswith("context_tokens=57`, or drop the prompt's head by clip=tail")
    with pytest.raises(
        UserError, match="^prompt_tokens=40: 40 tokens and 10 new ones, .* together; set max_new_tokens=8, run it with replan"
    ):
        job(plan, tmp_path, prompt_tokens=40)
    beyond = replace(plan, model=replace(plan.model, max_tokens=48))
    with pytest.raises(
        UserError, match="together; shorten the prompt: .* is made for sequences of 48 tokens, or drop the prompt's head by"
    ):
        asked(beyond, tmp_path, LONG)


def test_a_turn_that_turns_out_too_long_loses_its_oldest_tokens(plan: Plan, tmp_path: Path) -> None:
    lines = [{"tokens": [1] * 30, "conversation": "a"}, {"tokens": [2] * 3, "conversation": "a"}, {"tokens": [3], "conversation": "a"}]
    made = asked(plan, tmp_path, lines, stop=["x"], clip="tail")
    assert made.plan.workload.prompt_tokens == 38
    first, second, third = made.play(said)
    assert (first.cut, second.cut, third.cut) == ((0,), (5,), (16,))
    assert second.batch.prompts == [(1,) * 25 + (7,) * 10 + (2,) * 3]
    assert third.batch.prompts == [(1,) * 14 + (7,) * 10 + (2,) * 3 + (7,) * 10 + (3,)]
    short = list(made.play(lambda batch: Generation([[7]])))
    assert [s.cut for s in short] == [(0,)] * 3


def test_later_turns_are_continuations_without_the_mark_of_a_beginning() -> None:
    words = Tokenizer(WordLevel({"<s>": 0, "?": 1, "one": 2, "two": 3}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=words), frozenset(), 4, GenerationConfig())
    requests = [Asked("a line", text, 1, talk) for text, talk in (("one", "a"), ("two", None), ("two one", "a"), ("two", "b"))]
    assert ids_of([*requests, Asked("a line", (3, 3), 1)], vocabulary) == [(0, 2), (0, 3), (3, 2), (0, 3), (3, 3)]
    with pytest.raises(UserError, match="a line: the prompt '' has no tokens"):
        ids_of([requests[0], replace(requests[2], prompt="")], vocabulary)


def test_messages_and_what_a_person_says_go_through_the_template_and_raw_text_does_not(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(with_tokenizer(save_tiny(tmp_path, layers=2), "<{{ messages[-1].content }}>"), 300)
    template = find_template(vocabulary.tokenizer, {})
    talk = ({"role": "user", "content": "no"}, {"role": "user", "content": "yes"})
    said = [Asked("a line", "", 1, messages=talk), Asked("prompt", "yes", 1, said=True), Asked("a line", "yes", 1)]
    assert [vocabulary.text(list(ids)) for ids in ids_of(said, vocabulary, template)] == ["<yes>", "<yes>", "yes"]
    assert [vocabulary.text(list(ids)) for ids in ids_of(said[1:], vocabulary)] == ["yes", "yes"]
    with pytest.raises(UserError, match="^a line: messages need a chat template, and there is none"):
        ids_of(said, vocabulary)
