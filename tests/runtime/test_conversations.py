"""`runtime run prompts=requests.jsonl`: every request says what transformers says to the same ids, with its KV restored or computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.runtime.asked.run_schema import ReuseConfig, Validation
from penstock.runtime.told.account import ROWS
from tests.cli import process
from tests.runtime.running import Desk, desk
from tests.support import decisions, plan_for, save_tiny, workload

PAGE = 16
TALK = [
    {"tokens": [(7 * i) % 251 + 1 for i in range(20)], "conversation": "a", "max_new_tokens": 30},
    {"tokens": [17, 250, 3], "max_new_tokens": 5},
    {"tokens": [5, 9, 200, 31], "conversation": "a", "max_new_tokens": 24},
    {"tokens": [80] * 40, "conversation": "[b]"},
    {"tokens": [81, 82], "conversation": "[b]", "max_new_tokens": 1},
    {"tokens": [40, 41, 42, 43, 44], "conversation": "a", "max_new_tokens": 7},
]
"""At the third turn of ``a`` 20 + 30 + 4 + 24 + 5 tokens; without a number of its own, a request gets eight new ones."""
USUAL = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32: passes of other shapes then differ by rounding alone, far below the gaps between logits."""
    directory = save_tiny(tmp_path_factory.mktemp("talk"), layers=5)
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def place(directory: Path, checkpoint: Path, batch: int) -> Desk:
    directory.mkdir()
    made = decisions(batch=batch, pages=10 * batch, prefill_chunk_tokens=32)
    return desk(directory, plan_for(checkpoint, made, work=workload(batch=batch, prompt_tokens=100)))


def written(here: Desk, lines: Sequence[dict[str, Any]]) -> str:
    path = here.plan.with_name("some requests.jsonl")
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def kept_in(directory: Path | str) -> ReuseConfig:
    """On a drive that is always fast enough."""
    return ReuseConfig(dir=str(directory), read_gbps=1e9)


def said_by_transformers(model: nn.Module, lines: Sequence[dict[str, Any]]) -> tuple[list[list[int]], list[int]]:
    """What each request is answered alone, its prompt all ids of the turns before and its own; and how long those were."""
    spoken: dict[str, list[int]] = {}
    replies, lengths = [], []
    for line in lines:
        talk = line.get("conversation")
        ids = spoken.get(talk, []) + line["tokens"]
        whole = model.generate(torch.tensor([ids]), max_new_tokens=line.get("max_new_tokens", USUAL), do_sample=False)[0].tolist()
        replies.append(whole[len(ids) :])
        lengths.append(len(ids))
        if talk is not None:
            spoken[talk] = whole
    return replies, lengths


@pytest.mark.parametrize("batch", [1, 3])
def test_turns_say_what_transformers_says_to_the_ids_put_together(checkpoint: Path, model: nn.Module, tmp_path: Path, batch: int) -> None:
    here = place(tmp_path / "desk", checkpoint, batch)
    replies, lengths = said_by_transformers(model, TALK)
    work = {"prompts": written(here, TALK), "max_new_tokens": USUAL}
    without, cold = here.run(**work, validate=Validation.full), here.run(**work, kv=kept_in(tmp_path / "kv"))
    warm = here.run(**work, kv=kept_in(tmp_path / "kv"))
    assert without["tokens"] == cold["tokens"] == warm["tokens"] == replies
    assert without["prompt_lens"] == cold["prompt_lens"] == warm["prompt_lens"] == lengths
    assert without["logits"]["within_rounding"] and without["batches"] == (6 if batch == 1 else 3)
    assert without["requests_total"]["restored_tokens"] == {"vram": 0, "dram": 0, "ssd": 0}
    assert sum(warm["requests_total"]["restored_tokens"].values()) > 100 and warm["kv_reuse"]["failures"] == 0
    assert warm["rules_broken"] == []


def test_the_next_run_goes_on_from_what_was_said_last(checkpoint: Path, model: nn.Module, tmp_path: Path) -> None:
    """The second turn's reply is in no prompt of the first run."""
    here = place(tmp_path / "desk", checkpoint, 1)
    talk = [line for line in TALK if line.get("conversation") == "a"]
    here.run(prompts=written(here, talk[:2]), kv=kept_in(tmp_path / "kv"))
    got = here.run(prompts=written(here, talk), kv=kept_in(tmp_path / "kv"))
    assert got["tokens"] == said_by_transformers(model, talk)[0]
    _, second, third = (sum(row["restored_tokens"].values()) for row in got["requests"])
    assert second == (20 + 30 + 4) // PAGE * PAGE, "all but its last token"
    assert third == (20 + 30 + 4 + 24 - 1) // PAGE * PAGE > second, "pages of the second reply, too"


def test_another_process_restores_the_same_requests(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = place(tmp_path / "desk", checkpoint, 3)
    prompts = written(here, TALK)
    want = here.run(prompts=prompts, kv=kept_in("auto"))
    assert want["kv_reuse"]["dir"] == str(tmp_path / "cache" / "penstock" / "kv")
    words = {"plan": here.plan, "out": here.out, "prompts": prompts, "kv.dir": "auto", "kv.read_gbps": 1e9}
    done = process("runtime", "run", *(f"{key}={json.dumps(str(value))}" for key, value in words.items()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    got = json.loads(here.out.read_text())
    restored = got["requests_total"]["restored_tokens"]
    assert got["tokens"] == want["tokens"] and sum(restored.values()) > 100 and restored["ssd"] > 0


def test_the_report_tells_of_every_request_and_of_all(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = place(tmp_path / "desk", checkpoint, 3)
    work = {"prompts": written(here, TALK), "max_new_tokens": USUAL, "kv": kept_in(tmp_path / "kv"), "rounds": 2}
    here.run(**work)
    capsys.readouterr()
    report = here.run(**work)
    rows, total = report["requests"], report["requests_total"]
    assert [(row["round"], row["request"]) for row in rows] == [(n, k) for n in range(2) for k in range(6)]
    assert [row["conversation"] for row in rows[:6]] == ["a", None, "a", "[b]", "[b]", "a"]
    assert [row["max_new_tokens"] for row in rows[:6]] == [30, 5, 24, 8, 1, 7] == [row["generated_tokens"] for row in rows[:6]]
    assert [row["prompt_tokens"] for row in rows[:6]] == report["prompt_lens"] and {row["cut_tokens"] for row in rows} == {0}
    token_bytes = 5 * 2 * 2 * 16 * 4
    for row in rows:
        restored = sum(row["restored_tokens"].values())
        assert restored + row["computed_tokens"] == row["prompt_tokens"] and row["hit_rate"] == restored / row["prompt_tokens"]
        for tier in ("vram", "dram", "ssd"):
            tokens, nbytes = row["restored_tokens"][tier], row["restored_bytes"][tier]
            assert tokens * token_bytes <= nbytes and bool(tokens) == bool(nbytes)
        assert row["found_tokens"] >= restored and isinstance(row["declined"], bool)
    first, second, third = ([rows[k] for k in members] for members in ((0, 1, 3), (2, 4), (5,)))
    for served, seconds in zip((first, second, third), report["prefill_each_s"][:3], strict=True):
        assert len({row["ttft_s"] for row in served}) == 1 and served[0]["ttft_s"] >= seconds > 0
    for key in ("prompt_tokens", "computed_tokens", "generated_tokens"):
        assert total[key] == sum(row[key] for row in rows)
    for key in ("restored_tokens", "restored_bytes"):
        assert total[key]["ssd"] == sum(row[key]["ssd"] for row in rows) > 0
    assert total["requests"] == 12 and total["hit_rate"] == sum(total["restored_tokens"].values()) / total["prompt_tokens"] > 0.3
    assert "requests" not in report["kv_reuse"]
    shown = capsys.readouterr().out
    assert "[b]" in shown and "1.5" in shown and f"{total['hit_rate']:.1%}" in shown


def test_of_many_requests_the_table_shows_some_and_all_together(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = place(tmp_path / "desk", checkpoint, 4)
    report = here.run(prompts=written(here, [{"tokens": [k + 1]} for k in range(ROWS + 3)]), max_new_tokens=2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    begin = lines.index(["requests"]) + 2
    assert [words[0] for words in lines[begin : begin + ROWS]] == [str(k) for k in range(ROWS)]
    assert lines[begin + ROWS] == ["and", "3", "more"] and lines[begin + ROWS + 1][:2] == ["all", "23"]
    assert len(report["requests"]) == ROWS + 3


def test_a_slow_directory_is_warned_of_and_not_read_from(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = place(tmp_path / "desk", checkpoint, 1)
    work = {"prompt_tokens": 100, "kv": ReuseConfig(dir=str(tmp_path / "kv"), read_gbps=1e-6)}
    here.run(**work)
    capsys.readouterr()
    report = here.run(**work)
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and f"warning: kv.dir={tmp_path / 'kv'} reads 1e-06 GB/s" in said
    assert report["requests_total"]["restored_tokens"]["ssd"] == 0 and report["requests"][0]["declined"]
    here.run(**work | {"kv": kept_in(tmp_path / "kv")})
    assert "warning" not in capsys.readouterr().out
