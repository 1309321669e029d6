"""A file of requests: what each line may say, and the one line that refuses anything else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.asked.requests import Asked, read_requests
from tests.cli import ROOT
from tests.runtime.running import Desk

VOCAB, CAPACITY, USUAL = 300, 64, 9


def read(path: Path) -> list[Asked]:
    return read_requests(str(path), VOCAB, CAPACITY, USUAL)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some requests=1.JSONL"


def test_each_line_is_a_request(file: Path) -> None:
    lines = [
        '{"prompt": "Hello"}',
        "  ",
        '{"tokens": [0, 299], "max_new_tokens": 63, "conversation": "a b"}\r',
        '{"prompt": "one\u2028two", "conversation": null, "max_new_tokens": null, "tokens": null}',
    ]
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    where = f"prompts={file}, line"
    assert read(file) == [
        Asked(f"{where} 1", "Hello", USUAL),
        Asked(f"{where} 3", (0, 299), 63, "a b"),
        Asked(f"{where} 4", "one\u2028two", USUAL),
    ]


def test_a_text_file_is_a_prompt_a_line_whatever_it_looks_like(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('{"prompt": "Hello"}\n\nimport os\n')
    assert [(a.prompt, a.max_new_tokens, a.conversation) for a in read(path)] == [('{"prompt": "Hello"}', 9, None), ("import os", 9, None)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Hello", r"not JSON \(Expecting value at character 1\); write one object a line, such as {"),
        ('{"prompt": "a"', "not JSON .*at character 15"),
        ('{"prompt": "a"} {"prompt": "b"}', "not JSON .Extra data at character 17"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ('{"tokens": [1%s]}' % ("0" * 5000), "not JSON that can be read"),
        ('["a"]', r'\["a"\] is not an object'),
        ("null", "null is not an object"),
        ('{"promt": "a"}', 'unknown key "promt"; choose of prompt, messages, tokens, max_new_tokens, conversation; did you mean prompt?'),
        ('{"prompt": "a", "prompt": "b"}', 'key "prompt" is given twice'),
        ('{"prompt": "a", "messages": []}', "both prompt and messages; give one"),
        ('{"messages": []}', r'messages is \[\], not a list of some; write them in brackets, such as \[{"role"'),
        ('{"messages": ["a"]}', 'messages holds "a"; write objects with role and content'),
        ('{"messages": [{"role": "user", "content": "a"}], "conversation": "a"}', "messages with conversation; messages hold all"),
        ("{}", "neither prompt nor messages nor tokens; give one"),
        ('{"prompt": null}', "neither prompt nor messages nor tokens"),
        ('{"prompt": "a", "tokens": [1]}', "both prompt and tokens; give one"),
        ('{"prompt": 5}', "prompt is 5, not a text; write it in quotes"),
        ('{"prompt": ["%s"]}' % ("a" * 100), r'prompt is \["a{38}\.\.\., not a text'),
        ('{"prompt": ""}', "prompt is empty; give some text"),
        ('{"prompt": "a\\ud800"}', r'prompt holds half a character, "\\ud800"'),
        ('{"tokens": "5 9"}', 'tokens is "5 9", not a list; write token ids in brackets'),
        ('{"tokens": []}', "tokens is empty"),
        ('{"tokens": [1, 300]}', "tokens holds 300; the model's vocabulary has ids 0 to 299"),
        ('{"tokens": [-1]}', "tokens holds -1"),
        ('{"tokens": [1.0]}', "tokens holds 1.0"),
        ('{"tokens": [true]}', "tokens holds true"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens=0; give 1 to 63$"),
        ('{"prompt": "a", "max_new_tokens": 64}', "max_new_tokens=64; the plan holds KV for 64 tokens .* workload.new_tokens=64$"),
        ('{"prompt": "a", "max_new_tokens": "8"}', 'max_new_tokens is "8", not a whole number; give 1 to 63'),
        ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is true, not"),
        ('{"prompt": "a", "conversation": 7}', "conversation is 7, not a text"),
        ('{"prompt": "a", "conversation": ""}', "conversation is empty"),
    ],
)
def test_a_wrong_line_is_refused_by_file_and_number(file: Path, line: str, said: str) -> None:
    file.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError) as refused:
        read(file)
    text = str(refused.value)
    assert text.startswith(f"prompts={file}, line 3: ") and "\n" not in text and "; " in text
    assert re.search(said, text), text


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_a_request_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UserError, match="no request in it; give one JSON object a line|byte 0 is not UTF-8; give one JSON object a line"):
        read(file)


def test_a_run_ends_with_that_line_and_leaves_nothing(here: Desk) -> None:
    path = here.plan.with_name("requests.jsonl")
    path.write_text('{"tokens": [1]}\n{"tokens": [300]}\n')
    assert f"prompts={path}, line 2: tokens holds 300" in here.refusal(prompts=str(path))
    path.write_text('{"tokens": [1]}\n{"prompt": "some text"}\n')
    assert f"prompts={path}, line 2: the checkpoint has no tokenizer" in here.refusal(prompts=str(path))


def test_reading_them_needs_no_torch() -> None:
    code = "import sys; from penstock.runtime.asked import foreseen, order, requests, schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
