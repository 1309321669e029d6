"""Whatever is wrong with what is asked of a run ends as one line that names it, before the run begins."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.contract.plan.planfile import read_plan, write_plan
from tests.runtime.running import Desk, desk
from tests.support import decisions, plan_for, workload

SHARD = "model.safetensors"


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"batch": 2}, "batch=2: the plan holds KV for 1 at most; solve again with workload.batch=2"),
        ({"batch": 0}, "batch=0: must be 1 or more, at most 1 by this plan"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be 1 or more, at most 1023"),
        ({"max_new_tokens": 1024}, "max_new_tokens=1024.*1 to 1023 are allowed"),
        ({"template": "maybe"}, "template=maybe: must be false.*or options"),
        ({"template": {"shout": True}}, "template.shout: the model has no chat template"),
        ({"out": "/proc/run.json"}, "out=/proc/run.json: /proc is not a directory that can be written to"),
        ({"prompt_tokens": 0}, "prompt_tokens=0.*1 or more"),
        ({"temperature": -1.0}, "temperature=-1.0.*0 .greedy. or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0.*above 0"),
        ({"top_p": 1.1}, "top_p=1.1.*at most 1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed=.*below"),
        ({"stop": ["a", ""]}, "stop.*empty"),
        ({"prompt": "a", "prompts": "b"}, "both given; choose one"),
        ({"prompt": "a"}, "no tokenizer.*random tokens"),
        ({"prompts": "nowhere=at all.txt"}, "prompts=nowhere=at all.txt.*one prompt a line"),
        ({"prompts": "."}, r"prompts=\.: cannot be read \(Is a directory\); give a text file"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(here: Desk, keys: dict[str, Any], complaint: str) -> None:
    assert re.search(complaint, here.refusal(**keys))


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xff\xfe\x00"])
def test_a_prompts_file_without_prompts_is_refused(here: Desk, content: bytes) -> None:
    path = here.plan.with_name("prompts.txt")
    path.write_bytes(content)
    assert f"prompts={path}" in here.refusal(prompts=str(path))


def test_a_prompt_without_tokens_is_refused(shared_models: Path, tmp_path: Path) -> None:
    here = desk(tmp_path, plan_for(shared_models / "tiny-llama", decisions()))
    assert "has no tokens" in here.refusal(prompt="")


def test_a_reply_longer_than_the_model_is_made_for_is_not_sent_to_the_planner(here: Desk) -> None:
    plan = read_plan(here.plan)
    write_plan(replace(plan, model=replace(plan.model, max_tokens=512)), here.plan)
    line = here.refusal(max_new_tokens=1024)
    assert "is made for sequences of 512 tokens" in line and "1 to 511 are allowed" in line


def test_a_place_that_cannot_be_written_is_refused_before_the_run(here: Desk) -> None:
    (here.plan.parent / "file").write_text("precious")
    assert "a directory" in here.refusal(out=str(here.plan.parent))
    assert "not a directory" in here.refusal(out=str(here.plan.parent / "file" / "run.json"))


def test_a_report_is_not_written_over_what_the_run_reads(here: Desk) -> None:
    plan, prompts = here.plan.read_bytes(), here.plan.with_name("prompts.txt")
    prompts.write_text("one\n")
    assert "out=" in (line := here.refusal(out=str(here.plan))) and "plan= names the same file; choose another out=" in line
    assert "prompts= names the same file" in here.refusal(prompts=str(prompts), out=str(prompts))
    assert here.plan.read_bytes() == plan and prompts.read_text() == "one\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write anywhere")
def test_no_permission_is_refused(here: Desk, own_checkpoint: Path) -> None:
    (own_checkpoint / SHARD).chmod(0)
    assert "Permission denied" in here.refusal()
    here.plan.chmod(0)
    assert "Permission denied" in here.refusal()


@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_a_directory_in_place_of_a_file_is_refused(here: Desk, own_checkpoint: Path, name: str) -> None:
    (own_checkpoint / name).unlink()
    (own_checkpoint / name).mkdir()
    assert str(own_checkpoint / name) in here.refusal()


def test_spaces_and_equals_signs_in_every_path(shared_models: Path, tmp_path: Path) -> None:
    place = tmp_path / "a = b" / "c=d e"
    place.mkdir(parents=True)
    checkpoint = shutil.copytree(shared_models / "tiny-llama", place / "my model=x")
    (place / "the prompts=1.txt").write_text("def main():\n")
    here = desk(place, plan_for(checkpoint, decisions(), work=workload(new_tokens=4)))
    report = here.run(prompts=str(place / "the prompts=1.txt"), checkpoint=str(checkpoint), out=str(here.out))
    assert len(report["texts"]) == 1
