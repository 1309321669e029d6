"""`runtime run` streams real checkpoints and says what transformers says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.planner.contract.config.config_schema import ForceConfig
from penstock.planner.contract.decided.decisions import CachePolicy
from penstock.runtime.asked.run_schema import EngineConfig, Validation
from penstock.runtime.tools import run as running
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.running import PROMPTS, Desk, desk, solved
from tests.support import decisions, plan_for, save_tiny

NEW_TOKENS = 24


@pytest.fixture(params=["tiny-llama", "tiny-mixtral"])
def trained(request: pytest.FixtureRequest, shared_models: Path) -> Path:
    return shared_models / request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, no tokenizer, and a path that a careless program splits."""
    return save_tiny(tmp_path_factory.mktemp("models") / "a model=tiny")


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path) -> Desk:
    return desk(tmp_path, plan_for(checkpoint, decisions(batch=2, pages=16)))


def said_by_transformers(checkpoint: Path, prompts: list[str], **options: Any) -> list[str]:
    """Texts that ``generate`` adds to ``prompts``, to each of them alone: padded attention rounds otherwise."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    texts = []
    for prompt in prompts:
        fed = tokenizer(prompt, return_tensors="pt")
        fed.pop("token_type_ids", None)
        ids = model.generate(**fed, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "tokenizer": tokenizer} | options)
        texts.append(tokenizer.decode(ids[0, fed["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_a_prompt_is_continued_as_transformers_does(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = solved(trained, prompt_tokens=40, new_tokens=NEW_TOKENS)
    report = desk(tmp_path, plan).run(prompt=PROMPTS[0])
    want = said_by_transformers(trained, PROMPTS[:1])
    assert report["texts"] == want and len(want[0]) > 20
    assert want[0].strip() in capsys.readouterr().out
    assert report["stages"]["decode"]["ssd"]["bytes"] > 0, "nothing was streamed"


def test_a_batch_of_unequal_lengths_is_continued_as_transformers_does(trained: Path, tmp_path: Path) -> None:
    lines = [p.replace("\n", " ") for p in PROMPTS]
    (tmp_path / "some prompts=3.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    plan = solved(trained, batch=3, prompt_tokens=40, new_tokens=NEW_TOKENS)
    report = desk(tmp_path, plan).run(prompts=str(tmp_path / "some prompts=3.txt"))
    assert report["texts"] == said_by_transformers(trained, lines)
    assert len(set(report["prompt_lens"])) > 1 and report["batch_size"] == 3


def test_more_prompts_than_the_batch_are_run_in_turns(shared_models: Path, tmp_path: Path) -> None:
    lines = [p.replace("\n", " ") for p in PROMPTS]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    plan = solved(shared_models / "tiny-llama", batch=2, prompt_tokens=40, new_tokens=8)
    report = desk(tmp_path, plan).run(prompts=str(tmp_path / "prompts.txt"), validate=Validation.full)
    two = said_by_transformers(shared_models / "tiny-llama", lines[:2], max_new_tokens=8)
    one = said_by_transformers(shared_models / "tiny-llama", lines[2:], max_new_tokens=8)
    assert report["texts"] == two + one
    assert report["logits"]["identical"]


def test_a_packed_store_runs_like_its_checkpoint(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is the checkpoint's, so a plan may be made before the weights are packed."""
    pack_checkpoint(trained, tmp_path / "packed", None, False, lambda done, total: None)
    plan = solved(trained, prompt_tokens=40, new_tokens=6)
    report = desk(tmp_path, plan).run(prompt=PROMPTS[0], checkpoint=str(tmp_path / "packed"), validate=Validation.full)
    assert report["texts"] == said_by_transformers(trained, PROMPTS[:1], max_new_tokens=6)
    assert report["logits"]["identical"] and report["logits"]["max_abs_error"] == 0
    assert report["logits"]["against"] == "the checkpoint that was packed, unstreamed"
    assert "against the checkpoint that was packed, unstreamed: bit-identical" in " ".join(capsys.readouterr().out.split())
    read = report["ssd"]["direct_files"] + report["ssd"]["buffered_files"]
    assert read and all(Path(file).is_relative_to(tmp_path / "packed") for file in read)


def test_the_unstreamed_model_is_computed_with_the_plans_threads(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of threads may add up in another order."""
    plan, seen = solved(trained, prompt_tokens=40, new_tokens=4), list[int]()
    compare = running.compare_logits

    def compared(*given: Any) -> Any:
        seen.append(torch.get_num_threads())
        return compare(*given)

    monkeypatch.setattr(running, "compare_logits", compared)
    other = torch.get_num_threads() + 1
    report = desk(tmp_path, replace(plan, hardware=replace(plan.hardware, cpu_threads=other))).run(
        prompt=PROMPTS[0], validate=Validation.full
    )
    assert seen == [other] and torch.get_num_threads() == other - 1
    assert report["logits"]["identical"]


def test_full_validation_finds_the_logits_bit_identical(small: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    check = small.run(validate=Validation.full, max_new_tokens=5)["logits"]
    assert check == check | {"passes": 5, "identical": True, "max_abs_error": 0.0, "same_argmax": 1.0, "within_rounding": True}
    assert check["max_abs_logit"] > 0
    out = capsys.readouterr().out
    assert "bit-identical" in out and "further off" not in out


def test_full_validation_finds_wrong_weights(small: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = running.load_unstreamed

    def other(*args: Any) -> torch.nn.Module:
        model = real(*args)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
        return model

    monkeypatch.setattr(running, "load_unstreamed", other)
    check = small.run(validate=Validation.full, max_new_tokens=5)["logits"]
    assert not check["identical"] and not check["within_rounding"]
    out = capsys.readouterr().out
    assert "difference" in out and "bit-identical" not in out
    assert "logits are further off than rounding explains" in out


def test_without_a_prompt_random_tokens_are_run_and_a_seed_repeats_them(small: Desk) -> None:
    first, again, other = small.run(), small.run(), small.run(seed=1)
    assert first["prompt_lens"] == [16, 16] and first["max_new_tokens"] == 8
    assert [len(t) for t in first["tokens"]] == [8, 8]
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["texts"] == [" ".join(map(str, t)) for t in first["tokens"]], "a checkpoint without a tokenizer prints ids"


def test_prompt_tokens_and_batch_and_new_tokens_may_differ_from_the_plans(small: Desk) -> None:
    report = small.run(prompt_tokens=5, batch=1, max_new_tokens=3)
    assert (report["prompt_lens"], report["batch_size"], report["decode_tokens_total"]) == ([5], 1, 3)
    assert report["predicted"]["dram_bytes"] < small.run()["predicted"]["dram_bytes"], "the prediction is for this work"


def test_sampling_repeats_itself_with_a_seed(small: Desk) -> None:
    def sampled(**keys: Any) -> list[list[int]]:
        return small.run(prompt_tokens=7, temperature=1.0, **keys)["tokens"]

    assert sampled(top_p=0.9, seed=3) == sampled(top_p=0.9, seed=3) != small.run(prompt_tokens=7, seed=3)["tokens"]
    assert sampled(top_p=1e-9, seed=3) == small.run(prompt_tokens=7, seed=3)["tokens"], "the likeliest token alone is greedy"


def test_the_same_prompt_in_two_turns_is_sampled_twice(shared_models: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def main():\n" * 2)
    plan = solved(shared_models / "tiny-llama", prompt_tokens=8, new_tokens=16)
    one, two = desk(tmp_path, plan).run(prompts=str(tmp_path / "prompts.txt"), temperature=1.5, max_new_tokens=12)["tokens"]
    assert one != two


def test_a_stop_text_ends_its_own_sequence_alone(shared_models: Path, tmp_path: Path) -> None:
    checkpoint, prompts = shared_models / "tiny-llama", ["def main():", "import os"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    plan = solved(checkpoint, batch=2, prompt_tokens=40, new_tokens=NEW_TOKENS)
    here = desk(tmp_path, plan)
    full = here.run(prompts=str(tmp_path / "prompts.txt"))["texts"]
    # a word of the text, since CPUs of other instructions say other ones
    words = full[0].split()
    stop = next(word for word in words[1:] if word.isalpha() and len(word) > 2 and word not in full[1] and word != words[0])
    stopped = here.run(prompts=str(tmp_path / "prompts.txt"), stop=[stop, "never said"])["texts"]
    assert stopped == said_by_transformers(checkpoint, prompts, stop_strings=[stop])
    assert stopped[0] != full[0] and full[0].startswith(stopped[0]) and stopped[1] == full[1]


def test_a_models_own_stop_token_ends_a_sequence(small: Desk, checkpoint: Path, tmp_path: Path) -> None:
    """Named by generation_config.json, else by config.json, as transformers has it."""
    free = small.run(prompt_tokens=5, batch=1)["tokens"][0]
    config = (checkpoint / "config.json").read_text()
    generation = checkpoint / "generation_config.json"
    was = generation.read_text()
    try:
        generation.write_text(f'{{"eos_token_id": [299, {free[3]}]}}')
        assert small.run(prompt_tokens=5, batch=1)["tokens"] == [free[: free.index(free[3])]]
        generation.unlink()
        (checkpoint / "config.json").write_text(config.replace('"eos_token_id": null', f'"eos_token_id": {free[2]}'))
        here = desk(tmp_path, plan_for(checkpoint, decisions(batch=2, pages=16)))
        assert here.run(prompt_tokens=5, batch=1)["tokens"] == [free[: free.index(free[2])]]
    finally:
        generation.write_text(was)
        (checkpoint / "config.json").write_text(config)


def test_an_over_long_prompt_keeps_its_tail(shared_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = shared_models / "tiny-llama"
    here = desk(tmp_path, solved(checkpoint, prompt_tokens=20, new_tokens=12))
    report = here.run(clip="tail", prompt="import this\n" * 30 + PROMPTS[0])
    (kept,) = report["prompt_lens"]
    ids = AutoTokenizer.from_pretrained(checkpoint)("import this\n" * 30 + PROMPTS[0])["input_ids"]
    assert kept == 32 - 12 < len(ids)
    assert f"first {len(ids) - kept} tokens were cut" in capsys.readouterr().out
    tail = AutoTokenizer.from_pretrained(checkpoint).decode(ids[-kept:])
    assert report["texts"] == said_by_transformers(checkpoint, [tail], max_new_tokens=12)


@pytest.mark.parametrize("policy", CachePolicy)
@pytest.mark.parametrize("engine", [EngineConfig(wrap_around=False), EngineConfig(warmup_layers=0), EngineConfig(warmup_layers=1)])
def test_how_the_engine_moves_does_not_change_what_is_computed(
    checkpoint: Path, tmp_path: Path, policy: CachePolicy, engine: EngineConfig
) -> None:
    here = desk(tmp_path, plan_for(checkpoint, decisions(policy=policy, batch=2, pages=16)))
    assert here.run(engine=engine, validate=Validation.full, max_new_tokens=4)["logits"]["identical"]


def test_a_forced_decision_is_checked_obeyed_and_predicted(small: Desk) -> None:
    usual, forced = small.run(max_new_tokens=4), small.run(max_new_tokens=4, force=ForceConfig(cap_layers=3))
    assert forced["tokens"] == usual["tokens"]
    assert forced["stages"]["decode"]["ssd"]["bytes"] < usual["stages"]["decode"]["ssd"]["bytes"]
    assert forced["predicted"]["ssd_bytes_per_token"] < usual["predicted"]["ssd_bytes_per_token"]
    assert "cap" in small.refusal(force=ForceConfig(cap_layers=7))


@pytest.mark.parametrize("streams", [True, False])
def test_compute_threads_sleep_while_they_wait_only_where_weights_are_read_meanwhile(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")  # and whatever the run sets goes with the test
    made = decisions() if streams else decisions(cap=6, hwm=9, distance=6)
    here = desk(tmp_path, plan_for(checkpoint, made))
    assert bool(here.run(max_new_tokens=3)["stages"]["decode"]["ssd"]["bytes"]) == streams
    assert os.environ.get("OMP_WAIT_POLICY") == ("PASSIVE" if streams else None)
