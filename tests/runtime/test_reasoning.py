"""What a model reasons is set apart from its answer, however its tokens fall, and is told again as its template tells it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from penstock.planner.contract.plan.planfile import write_plan
from penstock.runtime.asked.chat_template import find_template
from penstock.runtime.asked.dialogue import Dialogue
from penstock.runtime.asked.prompts import Vocabulary, read_vocabulary
from penstock.runtime.asked.reasoning import BetweenMarks, InChannels, Piece, Splitter, find_reasoning
from penstock.runtime.asked.run_schema import ChatConfig
from penstock.runtime.engine.passes.generate import Generation
from penstock.runtime.engine.talk import Talk
from penstock.runtime.told.spoken import Spoken
from penstock.runtime.tools.runtime_verbs import chat_verb
from tests.support import decisions, plan_for, save_tiny, with_tokenizer, workload

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</{{ m.role }}>\n{% endfor %}<assistant>{% if opened %}<think>\n{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ m.thinking }}<|end|>{% endfor %}<|start|>assistant<|channel|>"
)
HARMONY = "<|channel|>analysis<|message|>Hm,\nhm.<|end|><|start|>assistant<|channel|>final<|message|>It is\n5 < 6.<|return|>"


@pytest.fixture(scope="module")
def spoken_to(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("reasons"), layers=2)


def vocabulary(spoken_to: Path, template: str, *special: str) -> Vocabulary:
    with_tokenizer(spoken_to, template)
    tokenizer = AutoTokenizer.from_pretrained(spoken_to)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token) for token in special]})
    return Vocabulary(tokenizer, frozenset(), len(tokenizer), read_vocabulary(spoken_to, 300).generation)


def split(splitter: Splitter, text: str, size: int) -> tuple[str, str]:
    """The answer and what is reasoned, of ``text`` that comes ``size`` characters at a time."""
    pieces = [piece for k in range(0, len(text), size) for piece in splitter.add(text[k : k + size])] + list(splitter.rest())
    return "".join(p.text for p in pieces if not p.reasoning), "".join(p.text for p in pieces if p.reasoning)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("splitter", "text", "answer", "reasoned"),
    [
        (
            lambda: BetweenMarks("<think>", "</think>", False),
            "\n<think>a < b</thin</think>so <think>x</think>",
            "so <think>x</think>",
            "a < b</thin",
        ),
        (lambda: BetweenMarks("<think>", "</think>", True), "a</think>b", "b", "a"),
        (lambda: BetweenMarks("<think>", "</think>", False), "  <thing>", "  <thing>", ""),
        (lambda: BetweenMarks("<think>", "</think>", False), " <th", " <th", ""),
        (lambda: BetweenMarks("<think>", "</think>", True), "never ends</th", "", "never ends</th"),
        (InChannels, HARMONY, "It is\n5 < 6.", "Hm,\nhm."),
        (InChannels, "no header <|", "no header <|", ""),
        (InChannels, "<|start|>assistant<|message|>plain<|end|>", "plain", ""),
    ],
)
def test_a_reply_is_split_alike_however_it_comes(splitter: type[InChannels], text: str, answer: str, reasoned: str, size: int) -> None:
    assert split(splitter(), text, size) == (answer, reasoned)


def test_the_marks_are_those_of_the_tokenizer_and_its_template(spoken_to: Path) -> None:
    assert find_reasoning(vocabulary(spoken_to, "{{ messages }}")) is None
    thinks, channels = find_reasoning(vocabulary(spoken_to, THINKS)), find_reasoning(vocabulary(spoken_to, CHANNELS, "<|message|>"))
    assert thinks is not None and thinks.key == "reasoning_content" and isinstance(thinks.splitter(""), BetweenMarks)
    assert channels is not None and channels.key == "thinking" and isinstance(channels.splitter(""), InChannels)
    said = vocabulary(spoken_to, "{{ messages }}", "[THINK]", "[/THINK]", "<stop>")
    own = find_reasoning(said)
    assert own is not None and said.tokenizer is not None
    ids = said.tokenizer("[THINK]so[/THINK]yes<stop>", add_special_tokens=False)["input_ids"]
    assert own.message("", ids) == {"content": "yes", "reasoning_content": "so"}, "marks are special tokens, and stop is none of them"


def test_a_dialogue_keeps_reasoning_apart_and_its_template_leaves_it_out(spoken_to: Path) -> None:
    own = vocabulary(spoken_to, THINKS)
    assert own.tokenizer is not None
    dialogue = Dialogue(own, find_template(own.tokenizer, {"opened": True}))
    assert own.text(list(dialogue.ask("a"))).endswith("<assistant><think>\n")
    dialogue.hear(own.tokenizer("hm\n</think>\n\nb")["input_ids"])
    assert dialogue.messages[-1] == {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert own.text(list(dialogue.ask("c"))) == "<user>a</user>\n<assistant>b</assistant>\n<user>c</user>\n<assistant><think>\n"


def test_line_ends_around_reasoning_are_not_told(spoken_to: Path) -> None:
    own, told = vocabulary(spoken_to, THINKS), list[Piece]()
    assert own.tokenizer is not None
    spoken = Spoken(own.text, BetweenMarks("<think>", "</think>", False), told.append)
    spoken.add(own.tokenizer("<think>\na\n\nb\n\n")["input_ids"])
    assert spoken.only_reasons
    spoken.add(own.tokenizer("</think>\n\nc\n")["input_ids"])
    spoken.rest()
    assert ("".join(p.text for p in told if p.reasoning), "".join(p.text for p in told if not p.reasoning)) == ("a\n\nb", "c\n")
    assert not spoken.only_reasons


def test_a_piped_conversation_tells_answers_on_standard_output_and_reasoning_aside(
    spoken_to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = vocabulary(spoken_to, THINKS)
    assert own.tokenizer is not None
    replies = [own.tokenizer(text)["input_ids"] for text in ("<think>\nhm\n</think>\n\nyes", "<think>on and")]

    def reply(*_: object) -> Iterator[Generation]:
        yield Generation([replies.pop(0)], 1.0, 0.1, [0.1])

    monkeypatch.setattr(Talk, "reply", reply)
    write_plan(plan_for(spoken_to, decisions(pages=16, batch=2), work=workload(batch=2, prompt_tokens=100)), tmp_path / "plan.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n/save talk.json\n")))
    chat_verb(ChatConfig(plan="plan.yaml"))
    out, aside = capsys.readouterr()
    assert out.splitlines()[:2] == ["yes", ""] and "hm\n" in aside and "on and" in aside and "ended before its answer" in aside
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m.get("reasoning_content") for m in saved] == [None, "hm", None, "on and"]
