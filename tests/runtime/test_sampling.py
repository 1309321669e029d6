"""Which token comes next: as transformers' ``generate`` has it, of the keys and of generation_config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from penstock.planner.common.errors import UserError
from penstock.runtime.asked.prompts import read_vocabulary
from penstock.runtime.asked.sampling_keys import FILE, TOP_K, Sampling, SamplingKeys, check_sampling, sampling_of
from penstock.runtime.engine.passes.generate import Batch, generate
from penstock.runtime.engine.passes.sampling import Sampler
from tests.runtime.running import desk
from tests.runtime.steppers import unstreamed
from tests.support import decisions, plan_for, save_tiny

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 200, 31, 7, 80, 81, 82, 83], [17, 250], [40]]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> nn.Module:
    """In float32, where passes of other shapes differ by rounding alone. Computed by transformers."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> nn.Module:
    """The same, computed in steps."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def said(model: nn.Module, keys: SamplingKeys, prompts: list[list[int]] = PROMPTS, **file: Any) -> list[list[int]]:
    sampler = Sampler(sampling_of(keys, GenerationConfig(**file)), CPU)
    return generate(unstreamed(model), Batch(prompts, NEW_TOKENS, chunk_tokens=1 << 20), sampler).tokens


def said_by_transformers(model: nn.Module, prompt: list[int], **file: Any) -> list[int]:
    ids = model.generate(torch.tensor([prompt]), generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, pad_token_id=0, **file))
    return ids[0, len(prompt) :].tolist()


def test_greedy_with_the_files_penalties_says_what_transformers_says(model: nn.Module, alone: nn.Module) -> None:
    """In a batch of unequal rows; the file asks to draw, and greedy=true overrules that alone."""
    penalties = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    made = said(model, SamplingKeys(greedy=True), do_sample=True, temperature=0.7, **penalties)
    assert made == [said_by_transformers(alone, prompt, do_sample=False, **penalties) for prompt in PROMPTS]
    assert made != said(model, SamplingKeys(greedy=True)), "the penalties change nothing here, so nothing is tested"


@pytest.mark.parametrize(
    ("keys", "theirs"),
    [
        ({"top_k": 7}, [TemperatureLogitsWarper(1.2), TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TemperatureLogitsWarper(1.2), TopPLogitsWarper(0.8)]),
        ({"min_p": 0.2}, [TemperatureLogitsWarper(1.2), MinPLogitsWarper(0.2)]),
        ({"typical_p": 0.7}, [TemperatureLogitsWarper(1.2), TypicalLogitsWarper(0.7)]),
        ({"repetition_penalty": 1.5}, [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(1.2)]),
    ],
)
def test_tokens_are_drawn_from_the_distribution_that_transformers_makes(keys: dict[str, Any], theirs: list[LogitsProcessor]) -> None:
    rows, prompt = 4000, [3, 5]
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)) * 2
    expected = torch.softmax(LogitsProcessorList(theirs)(torch.tensor([prompt]), logits.clone()), -1)[0].double()
    choose = Sampler(Sampling(temperature=1.2, seed=3, **keys), CPU).begin([prompt] * rows)
    counts = torch.bincount(choose(logits.repeat(rows, 1), range(rows)), minlength=30)
    possible = expected > 0
    chi = ((counts - rows * expected)[possible] ** 2 / (rows * expected[possible])).sum()
    freedom = int(possible.sum()) - 1
    assert not counts[~possible].any() and chi < freedom + 5 * (2 * freedom) ** 0.5  # five deviations of a chi-squared variable


def test_what_is_drawn_for_a_sequence_does_not_depend_on_its_neighbours(model: nn.Module) -> None:
    keys = SamplingKeys(temperature=1.5, frequency_penalty=0.5, seed=5)
    together = said(model, keys)
    sampler = Sampler(sampling_of(keys, GenerationConfig()), CPU)
    each = [generate(unstreamed(model), Batch([p], NEW_TOKENS, chunk_tokens=1 << 20), sampler).tokens[0] for p in PROMPTS]
    assert together == each
    assert said(model, keys) == together != said(model, replace(keys, seed=6))


@pytest.mark.parametrize("keys", [{}, {"temperature": 1.0}, {"frequency_penalty": 1.0}, {"temperature": 1.0, "repetition_penalty": 2.0}])
def test_logits_that_are_no_numbers_are_said_with_their_row(keys: dict[str, Any]) -> None:
    """Where they lie behind a draft that is not kept they change nothing."""
    choose = Sampler(Sampling(seed=1, **keys), CPU).begin([[1], [1]])
    logits = torch.full((4, 9), -1e4)
    logits[:, 4], logits[1] = 1e4, torch.nan
    assert choose.keep(logits, [0, 1], [[5], [4]]) == [[4], [4, 4]]
    with pytest.raises(UserError, match=r"^the logits behind prompt 1 are not numbers \(NaN\)[^\n]*$"):
        choose.keep(logits, [0, 1], [[4], [4]])


def test_neighbouring_seeds_have_no_draw_in_common(model: nn.Module) -> None:
    both = [said(model, SamplingKeys(temperature=3.0, top_k=0, seed=seed), [[40]] * 3) for seed in (0, 1)]
    assert len({tuple(tokens) for made in both for tokens in made}) == 6


def test_frequency_and_presence_are_counted_over_the_reply_alone() -> None:
    choose = Sampler(Sampling(frequency_penalty=1.0, presence_penalty=0.5), CPU).begin([[3, 3, 3]])
    logits = torch.tensor([[0.0, 1.0, 2.4, 4.6]])
    assert [choose(logits, [0]).item() for _ in range(6)] == [3, 3, 2, 3, 3, 1]
    # token 3 has 4.6, 3.1, 2.1, 2.1, 1.1, 0.1, token 2 has 2.4 until it is said and 0.9 then, token 1 has 1.0


@pytest.mark.parametrize(
    ("keys", "file", "line"),
    [
        ({}, {}, None),
        ({"greedy": True}, {"do_sample": True, "temperature": 0.6}, None),
        ({}, {"do_sample": False, "temperature": 0.6, "top_p": 0.9}, None),
        (
            {},
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            f"sampling: temperature=0.6 top_k=20 top_p=0.95 by {FILE}",
        ),
        (
            {"temperature": 0.8},
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            f"sampling: temperature=0.8; top_p=0.9 by {FILE}; top_k={TOP_K} by transformers",
        ),
        ({"top_k": 5}, {}, "sampling: top_k=5; temperature=1 by transformers"),
        ({"temperature": 0.0}, {"do_sample": True, "repetition_penalty": 1.05}, f"sampling: greedy; repetition_penalty=1.05 by {FILE}"),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.05}, None),
        ({}, {"suppress_tokens": [1]}, f"sampling: {FILE}'s suppress_tokens not obeyed"),
    ],
)
def test_a_key_overrules_the_file_and_one_line_says_what_counts(keys: dict[str, Any], file: dict[str, Any], line: str | None) -> None:
    assert sampling_of(SamplingKeys(**keys), GenerationConfig(**file)).line == line


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"greedy": True, "top_k": 5}, "greedy=true and top_k=5"),
        ({"greedy": False, "temperature": 0.0}, "greedy=false and temperature=0"),
        ({"top_k": -1}, "top_k=-1: must be a whole number of 0"),
        ({"min_p": 1.5}, "min_p=1.5: must be 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be above 0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
        ({"no_repeat_ngram": -2}, "no_repeat_ngram=-2"),
    ],
)
def test_a_value_that_nothing_can_be_chosen_by_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_sampling(SamplingKeys(**keys))


def test_a_file_with_such_a_value_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / FILE).write_text('{"do_sample": true, "top_p": "most"}')
    with pytest.raises(UserError, match=f"{FILE}: .*top_p.*"):
        sampling_of(SamplingKeys(), read_vocabulary(tmp_path, 300).generation)


def test_transformers_own_top_k_is_what_we_take_it_for() -> None:
    assert GenerationConfig().top_k or GenerationConfig._get_default_generation_params()["top_k"] == TOP_K


def test_a_run_obeys_the_file_and_says_so(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = checkpoint / FILE
    was = generation.read_text()
    try:
        generation.write_text('{"do_sample": true, "temperature": 1.5, "top_k": 9}')
        here = desk(tmp_path, plan_for(checkpoint, decisions(batch=2, pages=16)))
        report = here.run(warmup_rounds=1, rounds=2)
        assert f"sampling: temperature=1.5 top_k=9 by {FILE}" in capsys.readouterr().out
        assert report["sampling"] == {"temperature": 1.5, "top_k": 9}
        assert here.run()["tokens"] == report["tokens"] != here.run(greedy=True)["tokens"], "a round more changes what is said"
    finally:
        generation.write_text(was)
