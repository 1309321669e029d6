"""Prefill, sampling and stopping, held against transformers and against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.runtime.engine.generate import Batch, Generation, Sampler, Sampling, Sequences, generate, pad_left
from penstock.runtime.kv.batch.contiguous import KvBuffers
from tests.support import save_tiny

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 200, 31, 7, 80, 81, 82, 83], [17, 250], [40]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """In float32: passes of other shapes then differ by rounding alone, far below the gaps between logits."""
    checkpoint: Path = save_tiny(tmp_path_factory.mktemp("model"), layers=3)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def batch(prompts: list[list[int]] = PROMPTS, new: int = 6, chunk: int = 1 << 20, stop: frozenset[int] = frozenset()) -> Batch:
    return Batch(prompts, new, capacity=64, chunk_tokens=chunk, stop_ids=stop)


def run(model: nn.Module, of: Batch, sampling: Sampling | None = None, **options) -> Generation:
    sampler = Sampler(sampling or Sampling(), CPU)
    return generate(Sequences(model, CPU, of, lambda: None), of, sampler, keep_logits=True, **options)


def test_a_batch_says_what_each_prompt_says_alone(model: nn.Module) -> None:
    together = run(model, batch())
    assert together.tokens == [run(model, batch([p])).tokens[0] for p in PROMPTS]
    ids, mask = pad_left(PROMPTS, 0)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert together.tokens == want[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 9])
def test_prefill_in_chunks_is_prefill_at_once(model: nn.Module, chunk: int) -> None:
    """Also where a chunk is nothing but padding for the shorter prompts."""
    whole, cut = run(model, batch()), run(model, batch(chunk=chunk))
    assert cut.tokens == whole.tokens
    for a, b in zip(cut.logits, whole.logits, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_stop_token_ends_its_own_sequence_and_is_left_out(model: nn.Module) -> None:
    free = run(model, batch(new=8)).tokens
    stop = free[0][3]
    ended = run(model, batch(new=8, stop=frozenset({stop}))).tokens
    assert ended[0] == free[0][: free[0].index(stop)]
    assert ended[1:] == [t[: t.index(stop)] if stop in t else t for t in free[1:]]


def test_generation_ends_when_every_sequence_has(model: nn.Module) -> None:
    free = run(model, batch([PROMPTS[0]], new=8)).tokens[0]
    ended = run(model, batch([PROMPTS[0]], new=8, stop=frozenset({free[2]})))
    assert len(ended.step_s) == free.index(free[2]) and len(ended.logits) == len(ended.step_s) + 1
    assert run(model, batch([PROMPTS[0]], new=1)).step_s == []


def test_what_was_said_so_far_may_end_a_sequence(model: nn.Module) -> None:
    free = run(model, batch(new=8)).tokens
    ended = run(model, batch(new=8), finished=lambda tokens: [len(tokens[0]) >= 3, False, len(tokens[2]) >= 5]).tokens
    assert ended == [free[0][:3], free[1], free[2][:5]]


def test_progress_counts_prompt_tokens_and_steps(model: nn.Module) -> None:
    seen: list[tuple[str, int, int]] = []
    run(model, batch(new=3, chunk=4), progress=lambda *at: seen.append(at))
    assert seen == [("prefill", 4, 9), ("prefill", 8, 9), ("prefill", 9, 9), ("decode", 1, 3), ("decode", 2, 3), ("decode", 3, 3)]


def test_the_same_seed_repeats_itself_and_another_does_not(model: nn.Module) -> None:
    def sampled(seed: int) -> list[list[int]]:
        return run(model, batch(new=12), Sampling(temperature=2.0, top_p=0.95, seed=seed)).tokens

    assert sampled(7) == sampled(7) != sampled(8)


LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]))


def drawn(temperature: float, top_p: float, logits: torch.Tensor = LOGITS, times: int = 4000) -> torch.Tensor:
    """Shares [batch, vocab] of tokens over many draws."""
    sampler = Sampler(Sampling(temperature, top_p, seed=1), CPU)
    counts = torch.zeros_like(logits)
    for _ in range(times):
        counts[torch.arange(len(logits)), sampler(logits)] += 1
    return counts / times


def test_sampling_draws_by_probability_at_its_temperature() -> None:
    assert torch.allclose(drawn(1.0, 1.0), LOGITS.exp(), atol=0.03)
    assert torch.allclose(drawn(2.0, 1.0), torch.softmax(LOGITS / 2, -1), atol=0.03)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_warming_up_changes_nothing_that_is_drawn(top_p: float) -> None:
    draws = []
    for warm in (False, True):
        sampler = Sampler(Sampling(1.0, top_p, seed=1), CPU)
        if warm:
            sampler.warm_up(torch.zeros_like(LOGITS))
        draws.append([sampler(LOGITS).tolist() for _ in range(20)])
    assert draws[0] == draws[1]


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4)])
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    assert ((drawn(1.0, top_p, times=600) > 0).sum(-1) == kept).all()


def test_the_least_top_p_is_greedy_also_where_logits_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]).repeat(3, 40).bfloat16()
    assert torch.equal(Sampler(Sampling(1.0, 1e-9), CPU)(logits), Sampler(Sampling(), CPU)(logits))


def test_a_sequence_ends_at_its_own_limit_and_the_batch_when_all_have(model: nn.Module) -> None:
    free = run(model, batch(new=8)).tokens
    limited = run(model, replace(batch(new=8), limits=[2, 5, 1]))
    assert limited.tokens == [free[0][:2], free[1][:5], free[2][:1]]
    assert len(limited.step_s) == 4


class Kept:
    """A prefix cache that restores nothing and remembers what it was told to keep."""

    def __init__(self) -> None:
        self.sequences: list[list[list[int]]] = []

    def restore(self, prompts: Sequence[Sequence[int]], pairs: object) -> int:
        return 0

    def confirm(self) -> int:
        return 0

    def keep(self, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences.append([list(s) for s in sequences])

    def advance(self, *_: object) -> None:
        pass

    def finish(self, *_: object) -> None:
        pass


def test_at_the_end_replies_are_kept_as_far_as_they_were_fed(model: nn.Module) -> None:
    of, kept = replace(batch(new=4), keep_replies=[True, False, True], limits=[4, 4, 1]), Kept()
    buffers = KvBuffers(model.config, of.capacity)
    Sequences(model, CPU, of, lambda: None, buffers).prefill()
    said = generate(Sequences(model, CPU, of, lambda: None, buffers, kept), of, Sampler(Sampling(), CPU)).tokens
    assert kept.sequences == [PROMPTS, [PROMPTS[0] + said[0][:3], PROMPTS[1], PROMPTS[2]]]
