"""A tiny model of each class of decoders: unequal rows packed into passes, against transformers on each row alone, and the units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.model import OWN_ATTENTION
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.kv.attention.paged_attention import attends_over_pages
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.store.decoder import decoder_layers
from penstock.runtime.store.parameters import model_slots
from tests.runtime.sessions import opened
from tests.runtime.steppers import CPU, Alone, unstreamed
from tests.support import decisions, plan_for

BASE = dict(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
OLD = dict(vocab_size=300, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None)
LINEAR = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, head_dim=8
)
MIXED = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = dict(vocab_size=300, hidden_size=32, num_hidden_layers=3, bos_token_id=None, eos_token_id=None, pad_token_id=0)
ZOO: dict[str, dict[str, Any]] = {
    "lfm2": BASE | dict(layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    "qwen3_next": BASE | LINEAR
    | dict(layer_types=MIXED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "falcon_h1": BASE | dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8, head_dim=8),
    "jamba": BASE | dict(num_experts=1, attn_layer_period=3, attn_layer_offset=1, mamba_d_state=4, use_mamba_kernels=False),
    "mamba": MAMBA | dict(state_size=8, time_step_rank=4, use_mambapy=False),
    "recurrent_gemma": BASE
    | dict(lru_width=32, attention_window_size=8, head_dim=8, block_types=["recurrent", "attention"], num_hidden_layers=3),
    "minimax": BASE
    | dict(layer_types=["linear_attention", "full_attention", "linear_attention"], num_local_experts=4, num_experts_per_tok=2, head_dim=8,
           block_size=4, rms_norm_eps=1e-5),
    "mamba2": MAMBA | dict(num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8),
    "gemma4_text": BASE
    | dict(
        layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=8, head_dim=8, num_kv_shared_layers=1,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=300,
    ),
    "gpt2": OLD | dict(n_positions=256, n_embd=32),
    "gpt_neox": BASE,
    "opt": BASE | dict(ffn_dim=48, word_embed_proj_dim=32),
    "bloom": OLD | dict(hidden_size=32, pad_token_id=0),
    "gptj": OLD | dict(n_positions=256, n_embd=32, rotary_dim=4),
}  # fmt: skip
"""Model type -> sizes: convolutions, linear attention with experts, attention and Mamba in one layer, Mamba 1 and 2, heads of two sizes
with shared KV, older names, and attention that transformers' interface does not reach."""

LENGTHS = (11, 3, 7)
PROMPTS = [[5 + (7 * i + k) % 290 for i in range(length)] for k, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def checkpoint(saved: dict[str, Path], kind: str, root: Path) -> Path:
    """Random weights in F32 of the model type ``kind``."""
    if kind not in saved:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **ZOO[kind]), dtype=torch.float32)
        for name, p in model.named_parameters():
            if p.dim() == 2 and "A_log" not in name:
                torch.nn.init.normal_(p, std=0.15)
        model.save_pretrained(root / kind)
        saved[kind] = root / kind
    return saved[kind]


@pytest.fixture(params=list(ZOO))
def directory(request: pytest.FixtureRequest, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(saved, request.param, tmp_path_factory.getbasetemp())


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def steps() -> list[Step]:
    """Prompts in two passes, one of them going on by several tokens; then a token of each."""
    pages = [(0, 1), (2, 3), (4, 5)]
    first = Step(tuple(Row(k, tuple(prompt[:5]), 0, pages[k], RowKind.prompt) for k, prompt in enumerate(PROMPTS)))
    rest = [Row(k, tuple(prompt[5:]), 5, pages[k], RowKind.prompt) for k, prompt in enumerate(PROMPTS) if len(prompt) > 5]
    return [first, Step(tuple(rest)), Step(tuple(Row(k, (9 + k,), n, pages[k], RowKind.decode) for k, n in enumerate(LENGTHS)))]


def test_unequal_rows_in_one_pass_are_what_transformers_says_of_each_alone(directory: Path) -> None:
    stepper, whole = unstreamed(load(directory)), load(directory)
    for number, step in enumerate(steps()):
        said = stepper.run(step)
        for row, logits in zip(step.rows, said, strict=True):
            tokens = torch.tensor([[*PROMPTS[row.sequence], 9 + row.sequence][: row.end]])
            with torch.inference_mode():
                want = whole(input_ids=tokens, use_cache=False).logits[0, -1]
            assert torch.allclose(logits, want, atol=2e-4, rtol=2e-3), f"pass {number}, row {row.sequence}: {(logits - want).abs().max()}"


def test_a_streamed_run_says_the_same(directory: Path) -> None:
    """With one layer of three in DRAM at a time."""
    plan = plan_for(directory, decisions(hwm=2, cap=0, distance=1, batch=3, pages=3 * 12))
    stepper, batch = unstreamed(load(directory)), Batch(PROMPTS, 3, 1 << 20)
    with opened(plan, directory) as session:
        session.load(batch, lambda *_: None)
        made = session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True)
    for each in made.passes:
        want, said = stepper.run(each.step), each.logits
        # in F32 a product rounds by where its operands lie, and transformers computes routed experts in another order
        assert torch.allclose(want, said, atol=1e-5)


def test_planner_and_store_divide_the_layers_alike(directory: Path) -> None:
    spec, model = spec_from_checkpoint(directory), load(directory)
    slots = model_slots(model).units
    sizes = {unit: sum(4 * torch.Size(slot.shape).numel() for slot in group) for unit, group in slots.items()}
    for name, buffer in model.state_dict().items():
        if name.endswith(("slope_rate", "query_decay", "key_decay", "diagonal_decay")):  # buffers, which are never a unit's
            sizes[Unit("attn", int(name.split(".")[2]))] += buffer.nbytes
    assert [sizes.get(Unit("ffn", i), 0) for i in range(3)] == list(spec.ffn_bytes)
    assert [sizes.get(Unit("attn", i), 0) for i in range(3)] == list(spec.attn_bytes)
    assert len(decoder_layers(model)) == spec.layers == 3


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "jamba", "falcon_h1"])
def test_states_are_as_large_as_planned_for(kind: str, saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = checkpoint(saved, kind, tmp_path_factory.getbasetemp())
    spec, model = spec_from_checkpoint(directory), load(directory)
    alone = Alone(model)
    alone.run(Step((Row(0, tuple(PROMPTS[0]), 0, (), RowKind.prompt),)))
    kept = kv = 0
    for layer in alone._caches[0].layers:
        tensors = [value for value in vars(layer).values() if torch.is_tensor(value)]
        many = (list(v.values()) if isinstance(v, dict) else v for v in vars(layer).values() if isinstance(v, dict | list))
        lists = [t for held in many for t in held if torch.is_tensor(t)]
        kv += sum(t.nbytes for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if torch.is_tensor(t))
        kept += sum(t.nbytes for t in (*tensors, *lists))
    assert kv == spec.kv_bytes_per_token * LENGTHS[0]
    assert kept - kv <= spec.state_bytes <= 1.5 * (kept - kv)


def test_what_the_planner_takes_for_attention_of_its_own_is_that(directory: Path) -> None:
    """GPT-J has attended through the interface since transformers 5.24: that it does is not planned with."""
    spec = spec_from_checkpoint(directory)
    by_pages = attends_over_pages(load(directory))
    assert by_pages == (spec.model_type not in OWN_ATTENTION) or (by_pages and spec.model_type == "gptj")
