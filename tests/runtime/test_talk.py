"""A conversation: what is said equals what transformers says to all of it, and only what is new is computed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.planfile import write_plan
from penstock.runtime.asked.chat_template import ChatTemplate, find_template
from penstock.runtime.asked.dialogue import Dialogue
from penstock.runtime.asked.prompts import Vocabulary, read_vocabulary
from penstock.runtime.asked.run_schema import ChatConfig, ReuseConfig
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session
from penstock.runtime.engine.talk import Talk
from penstock.runtime.tools.runtime_verbs import chat_verb
from tests.runtime.sessions import CPU, opened
from tests.support import decisions, plan_for, save_tiny, with_tokenizer, workload

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('|')[-1] }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if shout %}!{% endif %}{% endif %}"
)
"""Of a reply, what stands before ``|`` is not told again, as reasoning is not."""


@pytest.fixture(scope="module")
def spoken_to(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = with_tokenizer(save_tiny(tmp_path_factory.mktemp("talk"), layers=2), TEMPLATE)
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def session(spoken_to: Path) -> Iterator[Session]:
    plan = plan_for(spoken_to, decisions(pages=8, prefill_chunk_tokens=32), work=workload(prompt_tokens=100))
    with opened(plan, spoken_to) as session:
        session.load(Batch([(0,) * 100], 1, 32))
        yield session


@pytest.fixture(scope="module")
def vocabulary(spoken_to: Path) -> Vocabulary:
    return read_vocabulary(spoken_to, 300)


def alone(spoken_to: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(spoken_to, dtype=torch.float32).eval()
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


def said(talk: Talk, prompt: tuple[int, ...], count: int) -> list[int]:
    *_, made = talk.reply(prompt, count, Sampler(Sampling(), CPU), frozenset(), lambda *_: None)
    return made.tokens[0]


def test_turns_say_what_transformers_says_and_compute_what_is_new(session: Session, spoken_to: Path) -> None:
    talk = Talk(session)
    first = tuple(range(1, 41))
    reply = said(talk, first, 6)
    assert reply == alone(spoken_to, first, 6) and talk.kept_tokens == 0
    second = (*first, *reply, 7, 9)
    assert said(talk, second, 4) == alone(spoken_to, second, 4)
    assert talk.kept_tokens == len(first) + 5, "all but the reply's last token, which nothing followed"
    otherwise = (*first[:35], 3, 3, 3)
    assert said(talk, otherwise, 3) == alone(spoken_to, otherwise, 3)
    assert talk.kept_tokens == 32, "whole pages of what is told as before"
    talk.end()
    assert session.engine.kv.pages.free == session.engine.kv.pages.slots


def test_a_reply_that_was_left_is_gone_on_from(session: Session, spoken_to: Path) -> None:
    talk, prompt = Talk(session), tuple(range(50, 70))
    for made in talk.reply(prompt, 20, Sampler(Sampling(), CPU), frozenset(), lambda *_: None):
        if len(made.tokens[0]) == 3:
            break
    whole = (*prompt, *made.tokens[0], 8)
    assert said(talk, whole, 4) == alone(spoken_to, whole, 4) and talk.kept_tokens == len(prompt) + 2
    talk.end()


def test_a_dialogue_goes_on_from_the_ids_that_were_computed(vocabulary: Vocabulary) -> None:
    dialogue = Dialogue(vocabulary, find_template(vocabulary.tokenizer, {}), system="be brief")
    first = dialogue.ask("hé")
    assert vocabulary.text(list(first)) == "<system>be brief</system>\n<user>hé</user>\n<assistant>"
    dialogue.hear(vocabulary.tokenizer("so")["input_ids"])
    second = dialogue.ask("and?")
    assert second[: len(first) + 2] == (*first, *vocabulary.tokenizer("so")["input_ids"])
    assert vocabulary.text(list(second)).endswith("<assistant>so</assistant>\n<user>and?</user>\n<assistant>")
    dialogue.take_back()
    assert [m["role"] for m in dialogue.messages] == ["system", "user", "assistant"]


def test_what_a_template_tells_otherwise_is_read_anew(vocabulary: Vocabulary) -> None:
    dialogue = Dialogue(vocabulary, find_template(vocabulary.tokenizer, {}))
    dialogue.ask("a")
    dialogue.hear(vocabulary.tokenizer("hm, hm|b")["input_ids"])
    assert vocabulary.text(list(dialogue.ask("c"))) == "<user>a</user>\n<assistant>b</assistant>\n<user>c</user>\n<assistant>"


def test_options_reach_the_template_and_what_it_refuses_is_one_line(vocabulary: Vocabulary) -> None:
    assert find_template(vocabulary.tokenizer, False) is None
    assert find_template(vocabulary.tokenizer, {"shout": True}).text([{"role": "user", "content": "a"}], "x").endswith("<assistant>!")
    with pytest.raises(
        UserError, match="^template.shoot: the model's chat template has no such option; leave it out; did you mean shout[?]$"
    ):
        find_template(vocabulary.tokenizer, {"shoot": True})
    with pytest.raises(UserError, match="^template.fir: the model's chat template has no such option; leave it out$"):
        find_template(vocabulary.tokenizer, {"fir": 1})
    with pytest.raises(UserError, match="^prompt: the model's chat template refuses it .*template=false$"):
        ChatTemplate(vocabulary.tokenizer, {}).text([{"role": "user", "content": {}}], "prompt")


@pytest.mark.parametrize("program", ["{{ 1 / 0 }}", "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ messages[7].content.a }}"])
def test_whatever_a_template_raises_is_one_line(vocabulary: Vocabulary, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary.tokenizer, "chat_template", program)
    with pytest.raises(UserError, match="^prompt: the model's chat template refuses it .*template=false$") as refused:
        ChatTemplate(vocabulary.tokenizer, {}).text([{"role": "user", "content": "a"}], "prompt")
    assert "\n" not in str(refused.value)


def talked(
    spoken_to: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: str,
    made_for: int = 0,
    **keys: Any,
) -> tuple[str, dict[str, Any], str]:
    """What `runtime chat` says to piped lines: texts, the closing line, and what it tells aside. The model is
    ``made_for`` so many tokens."""
    plan = plan_for(spoken_to, decisions(pages=16, batch=2), work=workload(batch=2, prompt_tokens=100))
    write_plan(replace(plan, model=replace(plan.model, max_tokens=made_for)), directory / "plan.yaml")
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    chat_verb(ChatConfig(**{"plan": "plan.yaml", "max_new_tokens": 5} | keys))
    out, aside = capsys.readouterr()
    *texts, closing = out.splitlines()
    return "\n".join(texts), json.loads(closing), aside


def test_a_conversation_is_piped_in_and_saved(
    spoken_to: Path, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = 'hi\n\n"""\ntwo\nlines\n"""\n/stats\n/save talk.json\n/reset\nhi\n/quit\nnever\n'
    _, closing, aside = talked(spoken_to, tmp_path, monkeypatch, capsys, lines)
    (first, said, second, *_), count = json.loads((tmp_path / "talk.json").read_text())["messages"], 5
    assert [first["content"], second["content"]] == ["hi", "two\nlines"]
    prompt = tuple(vocabulary.tokenizer("<user>hi</user>\n<assistant>")["input_ids"])
    assert said["content"] == vocabulary.text(alone(spoken_to, prompt, count))
    assert (closing["turns"], closing["generated_tokens"]) == (3, 15)
    assert "tokens/s" in aside and "predicted" in aside and "bound by" in aside and "4 messages" in aside


def test_a_conversation_that_outgrows_its_context_is_refused_or_clipped(
    spoken_to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = f"{'a' * 40}\n{'b' * 40}\n"
    with pytest.raises(UserError, match=r"with this the conversation has \d+ tokens, and the context has 128: /reset"):
        talked(spoken_to, tmp_path, monkeypatch, capsys, lines)
    with pytest.raises(UserError, match="/reset begins anew, and the model is made for no more$"):
        talked(spoken_to, tmp_path, monkeypatch, capsys, lines, made_for=128)
    capsys.readouterr()
    _, closing, aside = talked(spoken_to, tmp_path, monkeypatch, capsys, lines, clip="tail", quiet=False)
    assert closing["turns"] == 2 and "the first turn is forgotten" in aside


def test_a_model_without_a_template_says_so(
    spoken_to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = with_tokenizer(save_tiny(tmp_path / "bare", layers=2))
    with pytest.raises(UserError, match="^max_new_tokens=0: must be 1 or more"):
        chat_verb(ChatConfig(plan="nowhere.yaml", max_new_tokens=0))
    with pytest.raises(UserError, match="no chat template; it continues raw text with template=false"):
        talked(bare, tmp_path, monkeypatch, capsys, "hi\n")
    _, closing, _ = talked(bare, tmp_path, monkeypatch, capsys, "hi\nho\n", template=False)
    assert closing["turns"] == 2 and closing["kept_prompt_tokens"] >= 2 + 5 - 1


def test_a_conversation_that_is_kept_on_disk_is_gone_on_from(
    spoken_to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, lines = ReuseConfig(dir=str(tmp_path / "kv"), read_gbps=1e9), "a longer question\nand another one\n/reset\na longer question\n"
    without, *_ = talked(spoken_to, tmp_path, monkeypatch, capsys, lines)
    first, *_ = talked(spoken_to, tmp_path, monkeypatch, capsys, lines, kv=kept)
    again, *_ = talked(spoken_to, tmp_path, monkeypatch, capsys, lines, kv=kept)
    assert without == first == again
