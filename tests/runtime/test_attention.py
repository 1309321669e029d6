"""A row of a pass says what transformers says of that row alone, whatever else is in the pass and wherever its pages lie."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.runtime.engine.passes.generate import Batch, Generation, generate
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.kv.attention.paged_attention import AttentionByRows
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.recorded.agreement import BF16_STEP
from tests.runtime.steppers import CPU, PAGE_TOKENS, Alone, said, unstreamed
from tests.support import save_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama without groups": {"model_type": "llama", "num_key_value_heads": 4},
    "mistral": {"sliding_window": 16},
    "qwen3": {},
    "mixtral": {},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 48, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip
"""Grouped heads, windows, softcap (gemma2), sinks (gpt_oss), and K and V of different dimensions (deepseek_v3)."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"model_type": request.param} | FAMILIES[request.param]
    return save_tiny(tmp_path_factory.mktemp("model"), layers=3, **sizes)


def load(checkpoint: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, experts_implementation="eager").eval()


@pytest.fixture
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's product of several tokens with a matrix rounds some of its elements otherwise than that of each token (on one CPU,
    in BF16, 9 of 100,000): here each is multiplied by itself, so that all the rest must be equal bit for bit."""
    linear = torch.nn.functional.linear

    def each(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not tokens.numel():
            return linear(tokens, weight, bias)
        return torch.cat([linear(token, weight, bias) for token in tokens.split(1, -2)], -2)

    monkeypatch.setattr(torch.nn.functional, "linear", each)


def prompts(*lengths: int) -> list[list[int]]:
    made = random.Random(7)
    return [[made.randrange(300) for _ in range(n)] for n in lengths]


def alone(checkpoint: Path, got: Generation, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of each pass when transformers computes its rows one by one."""
    reference = Alone(load(checkpoint, dtype))
    return [reference.run(each.step) for each in got.passes]


@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [((40, 3, 17, 9), 9), ((33, 33, 33), 9), ((33, 33, 33), 1 << 20)],
    ids=["unequal, in parts", "equal, in parts", "equal, whole"],
)
@pytest.mark.usefixtures("token_by_token")
def test_rows_in_bf16_are_bit_for_bit_what_transformers_says_of_each_alone(checkpoint: Path, lengths: tuple, chunk: int) -> None:
    """Unequal ones that are whole are in the test of pages in any order."""
    got = said(load(checkpoint), Batch(prompts(*lengths), 4, chunk))
    for made, want in zip(got.passes, alone(checkpoint, got, torch.bfloat16), strict=True):
        assert torch.equal(made.logits, want)


def test_products_of_several_rows_differ_by_rounding_alone(checkpoint: Path) -> None:
    """In BF16, as the library multiplies."""
    got = said(load(checkpoint), Batch(prompts(40, 3, 17, 9), 6, 1 << 20))
    for made, want in zip(got.passes, alone(checkpoint, got, torch.bfloat16), strict=True):
        assert torch.allclose(made.logits.float(), want.float(), rtol=0, atol=4 * BF16_STEP * want.abs().max().item())


def test_rows_in_f32_are_within_rounding_and_say_the_same(checkpoint: Path) -> None:
    of = Batch(prompts(40, 3, 17, 9), 6, 16)
    got = said(load(checkpoint, torch.float32), of)
    for made, want in zip(got.passes, alone(checkpoint, got, torch.float32), strict=True):
        assert torch.allclose(made.logits, want, atol=1e-5, rtol=0)
        assert torch.equal(made.logits.argmax(-1), want.argmax(-1))


@pytest.mark.usefixtures("token_by_token")
def test_pages_in_any_order_are_as_good_as_adjacent_ones(checkpoint: Path) -> None:
    """Prompts, decode rows and rows to verify in one pass, each in pages that lie anywhere."""
    model, reference = load(checkpoint), Alone(load(checkpoint))
    stepper, pages = unstreamed(model), list(range(40))
    random.Random(3).shuffle(pages)
    tokens = prompts(60, 20, 45, 64)
    held = [tuple(pages[5 * k : 5 * k + 5]) for k in range(4)]

    def row(k: int, start: int, count: int, kind: RowKind, wanted: int) -> Row:
        return Row(k, tuple(tokens[k][start : start + count]), start, held[k], kind, wanted)

    begin = [row(0, 0, 30, RowKind.prompt, 0), row(1, 0, 19, RowKind.prompt, 1), row(2, 0, 40, RowKind.prompt, 1)]
    mixed = [row(3, 0, 64, RowKind.prompt, 1), row(0, 30, 30, RowKind.prompt, 1), row(1, 19, 1, RowKind.decode, 1)]
    for rows in (begin, [*mixed, row(2, 40, 5, RowKind.verify, 5)]):
        step = Step(tuple(rows))
        assert torch.equal(stepper.run(step), reference.run(step))


@pytest.mark.usefixtures("token_by_token")
def test_what_was_verified_and_refused_is_overwritten(checkpoint: Path) -> None:
    """A later row begins again where the refused tokens did."""
    stepper, reference = unstreamed(load(checkpoint)), Alone(load(checkpoint))
    (tokens,) = prompts(30)
    held = (3, 4, 5)
    stepper.run(Step((Row(0, tuple(tokens[:20]), 0, held, RowKind.prompt),)))
    stepper.run(Step((Row(0, (7, 8, 9, 10), 20, held, RowKind.verify, 4),)))
    got = stepper.run(Step((Row(0, tuple(tokens[20:]), 20, held, RowKind.verify, 10),)))
    reference.run(Step((Row(0, tuple(tokens[:20]), 0, held, RowKind.prompt),)))
    assert torch.equal(got, reference.run(Step((Row(0, tuple(tokens[20:]), 20, held, RowKind.verify, 10),))))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedModel]:
    checkpoint = save_tiny(tmp_path_factory.mktemp("small"), "mistral", layers=1, sliding_window=12)
    return load(checkpoint), load(checkpoint)


@pytest.mark.usefixtures("token_by_token")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_of_any_lengths_in_any_pages_and_passes(data: st.DataObject, small: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Sequences join, go on by any number of tokens and leave; pages of those that left are taken by others."""
    stepper, reference = unstreamed(small[0], slots=24), Alone(small[1])
    free = data.draw(st.permutations(range(24)))
    living: dict[int, tuple[int, tuple[int, ...]]] = {}
    for number in range(data.draw(st.integers(2, 5))):
        if len(free) >= 4:
            living[number] = 0, tuple(free[:4])
            free = free[4:]
        rows = []
        for sequence, (start, pages) in living.items():
            count = data.draw(st.integers(0, min(20, 4 * PAGE_TOKENS - start)))
            if count:
                made = data.draw(st.lists(st.integers(0, 299), min_size=count, max_size=count))
                rows.append(Row(sequence, tuple(made), start, pages, RowKind.prompt, count))
                living[sequence] = start + count, pages
        if rows:
            step = Step(tuple(rows))
            assert torch.equal(stepper.run(step), reference.run(step))
        if living and data.draw(st.booleans()):
            _, pages = living.pop(data.draw(st.sampled_from(sorted(living))))
            free = [*free, *pages]


def test_a_step_copies_nothing_but_its_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows are one view of the pool and one call of attention in each layer, unequal ones a call each."""
    calls: list[torch.Size] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append(query.shape)
        assert key.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), "K was copied"
        return attend(query, key, value, **more)

    model = load(save_tiny(tmp_path, layers=1, num_key_value_heads=4))
    stepper = unstreamed(model)
    generate(stepper, Batch(prompts(20, 20, 20, 20), 2, 64), Sampler(Sampling(), CPU))
    (buffer,) = stepper.pool.buffers().values()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    generate(stepper, Batch(prompts(20, 20, 20, 20), 2, 64), Sampler(Sampling(), CPU))
    assert [shape[0] for shape in calls] == [4, 4]
    calls.clear()
    generate(stepper, Batch(prompts(20, 21, 21, 5), 2, 64), Sampler(Sampling(), CPU))
    assert [shape[0] for shape in calls] == [1, 2, 1] * 2


def test_a_row_that_its_pages_do_not_hold_is_refused(small: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    with pytest.raises(RuntimeError, match="sequence 3 holds 1 pages of KV; 17 tokens need 2"):
        unstreamed(small[0]).run(Step((Row(3, (1,) * 17, 0, (0,), RowKind.prompt),)))


@pytest.mark.parametrize("chooses", [False, True])
def test_a_model_that_attends_by_itself_is_computed_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chooses: bool) -> None:
    """By its own functions, or by choosing among tokens first, as an indexer does."""
    model, reference = (load(save_tiny(tmp_path, layers=1)) for _ in range(2))
    if chooses:
        model.model.layers[0].self_attn.indexer = torch.nn.Identity()
    else:
        monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    AttentionByRows().convert(model)
    assert model.config._attn_implementation == reference.config._attn_implementation
    stepper, alone = unstreamed(model), Alone(reference)
    rows = Row(0, (1,) * 17, 0, (0, 1), RowKind.prompt), Row(1, (2, 3), 0, (2,), RowKind.prompt)
    assert torch.equal(stepper.run(Step(rows)), alone.run(Step(rows)))
    rows = Row(1, (4,), 2, (2,), RowKind.decode), Row(0, (5, 6), 17, (0, 1), RowKind.verify)
    assert torch.equal(stepper.run(Step(rows)), alone.run(Step(rows)))
    assert not stepper.goes_back
    with pytest.raises(RuntimeError, match="its cache has seen 19 tokens, the row begins at 17"):
        stepper.run(Step((Row(0, (5,), 17, (0, 1), RowKind.decode),)))
