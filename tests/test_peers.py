"""The comparison with peers: the same loop, honest rows, and processes that cannot take the table with them."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bench.peers.diffusers_groups import left_out
from bench.peers.peer import SYSTEMS, Job, Measured
from bench.peers.run import Request, last_line, present, run_one
from bench.peers.table import Ended, agreement, make_rows
from bench.peers.timing import measure_model, weights_room_bytes
from penstock.planner.common.errors import UserError
from tests.support import save_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("peers") / "tiny", layers=2)


def job(checkpoint: Path, folder: Path, system: str = "accelerate_dram", **changes: object) -> Job:
    values = {
        "system": system,
        "checkpoint": str(checkpoint),
        "prompts": [[5, 6, 7, 8], [9, 10, 11, 12]],
        "new_tokens": 5,
        "vram_bytes": 0,
        "context_bytes": 0,
        "dram_bytes": None,
        "folder": str(folder / system),
        "config_dir": str(folder),
    }
    return Job(**{**values, **changes})


def measured(step_s: float, tokens: list[list[int]], **changes: object) -> Measured:
    values = {"prefill_s": 1.0, "step_s": [step_s] * 3, "tokens": tokens, "load_s": 2.0, "vram_bytes": 3, "dram_bytes": 4}
    return Measured(**{**values, **changes})


def test_a_peer_is_timed_over_every_pass_and_gives_the_greedy_tokens(checkpoint: Path, tmp_path: Path):
    asked = job(checkpoint, tmp_path)
    got = measure_model(asked, lambda j, device: AutoModelForCausalLM.from_pretrained(j.checkpoint, dtype=torch.bfloat16).to(device))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    ids = torch.tensor(asked.prompts)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)[:, 4:]
    assert got.tokens == want.tolist()
    assert len(got.step_s) == 4 and min(got.step_s) > 0 and got.prefill_s > 0 and got.load_s > 0
    assert got.vram_bytes == 0


def test_weights_get_what_kv_activations_and_a_guard_leave_of_the_budget(checkpoint: Path, tmp_path: Path):
    config = AutoModelForCausalLM.from_pretrained(checkpoint).config
    one = job(checkpoint, tmp_path, vram_bytes=2 << 30, context_bytes=1 << 29, prompts=[[1] * 100])
    kv, activations = 2 * 2 * (2 * 16) * 105 * 2, 6 * 100 * (64 + 160) * 2
    assert weights_room_bytes(one, config) == (2 << 30) - (1 << 29) - (256 << 20) - kv - activations


def test_a_module_left_out_is_not_found_and_comes_back_in_its_place():
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3), nn.Linear(3, 4))
    before = list(model.children())
    with left_out(model, [before[1]]):
        assert before[1] not in list(model.modules())
    assert list(model.children()) == before


def test_a_peer_that_is_not_installed_stands_in_the_table_with_its_message(checkpoint: Path, tmp_path: Path):
    if importlib.util.find_spec("airllm"):
        pytest.skip("airllm is installed here")
    ended = run_one(job(checkpoint, tmp_path, "airllm"), limit_s=100)
    (row,) = make_rows({"airllm": ended})
    assert row.message == "ModuleNotFoundError: No module named 'airllm'"
    assert row.decode_s is None
    assert not (tmp_path / "airllm").exists()


def test_a_process_that_takes_too_long_is_cut_and_says_so(checkpoint: Path, tmp_path: Path):
    assert run_one(job(checkpoint, tmp_path), limit_s=0.05).message.startswith("cut after 0.05 s")


def test_rows_compare_with_penstock_and_with_the_limit_of_its_slowest_link():
    ours = measured(0.2, [[1, 2, 3, 4]], limit={"ssd": 0.1, "h2d": 0.19})
    rows = make_rows({"penstock": Ended(ours), "airllm": Ended(measured(0.8, [[1, 2, 9, 4]])), "diffusers_leaf": Ended(None, "no memory")})
    assert [r.title for r in rows] == [SYSTEMS[n].title for n in ("penstock", "airllm", "diffusers_leaf")]
    assert rows[0].of_limit == pytest.approx(0.95) and rows[1].of_limit == pytest.approx(0.2375)
    assert rows[1].times_penstock == pytest.approx(4) and rows[1].tokens_per_s == pytest.approx(1.25)
    assert (rows[0].agreed, rows[1].agreed, rows[2].agreed) == (1, 0.5, None)


def test_without_penstock_the_others_keep_their_figures():
    rows = make_rows({"penstock": Ended(None, "no plan fits"), "airllm": Ended(measured(0.8, [[1, 2]]))})
    assert rows[1].decode_s == 0.8 and rows[1].times_penstock is None and rows[1].of_limit is None and rows[1].agreed == 1


def test_one_new_token_leaves_decode_empty():
    (row,) = make_rows({"penstock": Ended(replace(measured(1, [[7]], limit={"h2d": 1.0}), step_s=[]))})
    assert row.prefill_s == 1.0 and row.decode_s is None and row.tokens_per_s is None and row.of_limit is None


@pytest.mark.parametrize(
    ("got", "want", "share"), [([[1, 2], [3, 4]], [[1, 2], [3, 5]], 0.75), ([[2, 1]], [[1, 1]], 0), ([[1]], [[1, 2]], 0.5)]
)
def test_agreement_counts_tokens_before_the_first_difference(got: list, want: list, share: float):
    assert agreement(got, want) == share


def test_the_message_of_a_log_is_its_last_line_with_something_in_it():
    assert last_line("Loading:  0%\rLoading: 100%\nTraceback\nValueError: bad\n\n") == "ValueError: bad"
    assert last_line("\n") == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "checkpoint: missing"),
        (["checkpoint=x", "promt_tokens=5"], "did you mean prompt_tokens?"),
        (["checkpoint=x", "systems=penstok"], "did you mean penstock?"),
        (["checkpoint=x", "vram_bytes=much"], "must be a size such as 6GiB"),
        (["checkpoint=x", "new_tokens=0"], "must be a whole number, 1 or more"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(arguments: list[str], says: str):
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        Request.read(arguments)
    assert says in str(error.value)


def test_arguments_become_a_request(tmp_path: Path):
    request = Request.read([f"checkpoint={tmp_path}", "vram_bytes=6GiB", "prompt_tokens=128", "systems=airllm,penstock"])
    assert (request.checkpoint, request.vram_bytes, request.prompt_tokens) == (tmp_path, 6 << 30, 128)
    assert request.systems == ("airllm", "penstock") and request.new_tokens == Request(tmp_path).new_tokens


def test_the_document_is_shown_with_machine_versions_messages_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ended = {"penstock": Ended(measured(0.2, [[1]], limit={"h2d": 0.19})), "airllm": Ended(None, "cut after 240 s")}
    document = {
        "machine": {"gpu": "a card", "cores": 4, "dram_gb": 64.0, "date": "2026-01-01"},
        "versions": {"torch": "2.11.0", "airllm": "4.0.0"},
        "work": {
            "checkpoint": "8b",
            "checkpoint_bytes": 16 * 10**9,
            "vram_bytes": 6 << 30,
            "dram_bytes": None,
            "batch": 1,
            "prompt_tokens": 2048,
            "new_tokens": 8,
        },
        "rows": [asdict(row) for row in make_rows(ended)],
    }
    out = tmp_path / "peers.json"
    present(json.loads(json.dumps(document)), out)
    said = capsys.readouterr().out
    for words in ("a card, 4 cores", "torch 2.11.0", "AirLLM, from disk: cut after 240 s", "95.0%", "prompt 2048", "VRAM budget 6.44 GB"):
        assert words in said
    assert json.loads(said.splitlines()[-1])["systems"]["penstock"]["decode_s"] == 0.2
    if importlib.util.find_spec("matplotlib"):
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "draw it where matplotlib is" in said
