"""Progress is for a person at a terminal: elsewhere a verb says what is useful, and nothing more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.runtime.asked.run_schema import PackConfig, SynthConfig, Validation, VerifyConfig
from penstock.runtime.told.progress import PhaseBar
from penstock.runtime.tools.runtime_verbs import pack_verb, synth_verb, verify_verb
from tests.runtime.running import desk
from tests.support import decisions, plan_for

TINY = ModelConfig(name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=128)


def test_off_a_terminal_a_bar_draws_nothing_and_starts_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    threads = set(threading.enumerate())
    with PhaseBar() as bar:
        bar("load", 1, 2)
        bar("decode", 1, 2)
        assert set(threading.enumerate()) == threads
    assert capsys.readouterr() == ("", "")


def test_off_a_terminal_a_verb_prints_a_line_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, packed = str(tmp_path / "made"), str(tmp_path / "packed")
    for verb, cfg in (
        (synth_verb, SynthConfig(model=TINY, out=made)),
        (pack_verb, PackConfig(checkpoint=made, out=packed)),
        (verify_verb, VerifyConfig(store=packed)),
    ):
        verb(cfg)
        said = capsys.readouterr()
        assert said.err == "" and [bool(line.strip()) for line in said.out.splitlines()] == [True, True], said


def test_off_a_terminal_a_run_keeps_stderr_empty(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk(tmp_path, plan_for(checkpoint, decisions(pages=8))).run(max_new_tokens=2, validate=Validation.full)
    said = capsys.readouterr()
    assert said.err == "" and said.out.splitlines()[-1].startswith("{")
