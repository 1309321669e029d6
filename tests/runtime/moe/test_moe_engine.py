"""A model whose experts stream says what the unstreamed one says, bit for bit on the CPU, whatever has a slot and whoever decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots
from penstock.planner.contract.experts.expert_slots import fewest_slots, kept_at_first
from penstock.planner.contract.experts.routing import Phase
from penstock.planner.contract.experts.routing_files import read_routings
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session
from penstock.runtime.experts import expert_forward as forward
from penstock.runtime.experts import expert_rows
from penstock.runtime.experts.expert_rehearsal import RehearsedExperts
from penstock.runtime.experts.tiers.expert_fetch import Key
from penstock.runtime.reading.layout import UnitLayout
from penstock.runtime.reading.native.readers_library import readers_file
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import CarryingCopier, HostCopier, decisions, plan_for

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250]], max_new_tokens=6, chunk_tokens=1 << 20)
CHUNK = 1 << 12
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MANY = {"num_experts": 8, "num_experts_per_tok": 3}
FAMILIES = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {**MANY, "moe_intermediate_size": 48, "head_dim": 16, "mlp_only_layers": [1]},
    "olmoe": {**MANY, "num_key_value_heads": 4},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 48, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip
"""Attention of DeepSeek is not the planner's to know: its KV is taken as the model makes it."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(3)
    config = AutoConfig.for_model(request.param, **{**SIZES, **FAMILIES[request.param]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.05)
    model.save_pretrained(directory, max_shard_size="150kB")
    return directory


def run(
    checkpoint: Path, experts: ExpertSlots, gpu: bool = False, batch: Batch = BATCH, record: Path | None = None
) -> tuple[Generation, dict]:
    plan = plan_for(checkpoint, decisions(gpu=gpu, batch=len(batch.prompts), experts=experts), gpu)
    with opened(plan, checkpoint, HostCopier() if gpu else None, record=record) as session:
        session.load(batch)
        made = session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True)
        return made, session.engine.facts()["experts"]


def expect(checkpoint: Path, batch: Batch = BATCH) -> Generation:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    return said(model, batch)


@pytest.fixture(scope="module")
def unstreamed(checkpoint: Path) -> Generation:
    """What the whole model says of ``BATCH``."""
    return expect(checkpoint)


@pytest.fixture(scope="module")
def unstreamed_first(checkpoint: Path) -> Generation:
    """What it says of its first prompt alone."""
    return expect(checkpoint, replace(BATCH, prompts=BATCH.prompts[:1]))


def same(got: Generation, want: Generation) -> None:
    assert got.tokens == want.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def slots(checkpoint: Path, vram: str | None, dram: str, **more: object) -> ExpertSlots:
    """``few``: as few as there may be; ``some``: half; ``all``."""
    experts = plan_for(checkpoint, decisions()).model.experts
    count = {None: 0, "none": 0, "few": fewest_slots(experts), "some": experts.units // 2, "all": experts.units}
    return ExpertSlots(count[vram], count[dram], **{"chunk_bytes": CHUNK, **more})


@pytest.mark.parametrize("dram", ["few", "some", "all"])
def test_two_tiers_give_the_unstreamed_logits(checkpoint: Path, unstreamed: Generation, dram: str) -> None:
    got, facts = run(checkpoint, slots(checkpoint, None, dram, prefetch=2))
    same(got, unstreamed)
    assert (facts["dram"]["hit_rate"] == 1) == (dram == "all") and facts["vram"] is None


@pytest.mark.parametrize(
    ("vram", "dram"), [("few", "few"), ("few", "all"), ("some", "few"), ("some", "some"), ("all", "all"), ("all", "none")]
)
def test_three_tiers_give_the_unstreamed_logits(checkpoint: Path, unstreamed: Generation, vram: str, dram: str) -> None:
    got, facts = run(checkpoint, slots(checkpoint, vram, dram, prefetch=2, read_ahead=2), gpu=True)
    same(got, unstreamed)
    assert (facts["vram"]["hit_rate"] == 1) == (vram == "all")


def in_slots(session: Session) -> tuple[dict[Key, bytes], set[Key]]:
    """What lies in slots of VRAM, and which experts DRAM has, before anything was computed."""
    host, card = session.engine.host.experts, session.engine.card
    assert host.vram_cache is not None and card is not None
    slots = {key: host.vram_cache.slot(*key) for key in host.room.layouts}
    return (
        {key: card.expert_slots[slot].numpy().tobytes() for key, slot in slots.items() if slot is not None},
        {key for key in host.room.layouts if host.dram.here(*key)},
    )


WIDE = replace(BATCH, prompts=[list(range(3, 150)), list(range(150, 290))], max_new_tokens=1)
"""Its prompts visit every expert."""


@dataclass(frozen=True)
class Start:
    """What a start on a card has put into slots, and what the prompts of ``WIDE`` then read."""

    on_card: dict[Key, bytes]
    in_dram: set[Key]
    layouts: Mapping[Key, UnitLayout]
    loaded_bytes: int
    """Read, or copied on as it was read."""
    prompt_bytes: int
    said: Generation


def started(checkpoint: Path, held: ExpertSlots) -> Start:
    planned = plan_for(checkpoint, decisions(gpu=True, batch=2, experts=replace(held, chunk_bytes=CHUNK)), True)
    with opened(planned, checkpoint, HostCopier()) as session:
        session.load(WIDE)
        engine = session.engine
        found, layouts = in_slots(session), engine.host.experts.room.layouts
        loaded_bytes = engine.loading.arrived()["h2d"][1] + sum(nbytes for _, nbytes in engine.host.reads)
        before = engine.host.pool.meter.bytes
        got = session.generate(WIDE, Sampler(Sampling(), CPU), keep_logits=True)
        return Start(*found, layouts, loaded_bytes, engine.host.pool.meter.bytes - before, got)


@pytest.fixture(scope="module")
def started_with_all(checkpoint: Path) -> Start:
    """With a slot of VRAM for every expert."""
    return started(checkpoint, ExpertSlots(plan_for(checkpoint, decisions()).model.experts.units, 0))


@pytest.fixture(scope="module")
def wide_unstreamed(checkpoint: Path) -> Generation:
    """What the whole model says of ``WIDE``."""
    return expect(checkpoint, WIDE)


@pytest.mark.parametrize(("vram", "dram"), [(2, 3), (3, 2), (1, 2), (4, 4)])
def test_a_start_fills_both_tiers_with_different_experts_each_read_once(
    checkpoint: Path, started_with_all: Start, wide_unstreamed: Generation, vram: int, dram: int
) -> None:
    """With so many slots a layer, as ``load_s`` pays for. Where they hold all experts a prompt then reads none."""
    every, experts = started_with_all, plan_for(checkpoint, decisions()).model.experts
    layers = len(experts.layers)
    slots = ExpertSlots(*(n * layers + fewest_slots(experts) for n in (vram, dram)))
    held = started(checkpoint, slots)
    same(held.said, wide_unstreamed)
    assert (len(held.on_card), len(held.in_dram)) == (vram * layers, dram * layers), "no slot of a layer's own is empty"
    assert all(every.on_card[key] == held_bytes for key, held_bytes in held.on_card.items())
    kept, first = held.on_card.keys() | held.in_dram, kept_at_first(experts, slots.vram_slots, slots.dram_slots)
    assert len(kept) == first == layers * min(experts.count, vram + dram)
    ahead = fewest_slots(experts)  # of the first layer, for a pass that does not come
    assert first < experts.units or held.prompt_bytes <= ahead * max(x.nbytes for x in held.layouts.values())
    left_out = sum(x.payload_bytes for key, x in held.layouts.items() if key not in kept)
    assert every.loaded_bytes - held.loaded_bytes == left_out


@pytest.mark.skipif(not readers_file().exists(), reason="no compiler made the readers")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("prefetch", "words"), [(0, False), (2, True)])
def test_what_readers_copy_on_gives_the_unstreamed_logits(
    checkpoint: Path, unstreamed: Generation, unstreamed_first: Generation, rows: int, prefetch: int, words: bool
) -> None:
    """Of one sequence its experts come together, of two one by one. With ``words`` the former are computed with before they are read."""
    batch, card = replace(BATCH, prompts=BATCH.prompts[:rows]), CarryingCopier(words)
    held = slots(checkpoint, "few", "some", prefetch=prefetch)
    plan = plan_for(checkpoint, decisions(gpu=True, batch=rows, experts=held), True)
    with opened(plan, checkpoint, card) as session:
        session.load(batch)
        same(session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True), unstreamed if rows == 2 else unstreamed_first)
        facts = session.engine.facts()["experts"]
    assert facts["dram"]["misses"] and (card.carried or rows > 1), "where more are missing than there are slots, the consumer copies"
    assert bool(card.unread) == (words and rows == 1)


def test_no_policy_changes_what_is_said(checkpoint: Path, unstreamed: Generation, request: pytest.FixtureRequest) -> None:
    """Each with a card for one of the families, and without one for another."""
    family = list(FAMILIES).index(request.node.callspec.params["checkpoint"])
    for number, policy in enumerate(ExpertPolicyName):
        turn = (family - number) % len(FAMILIES)
        if turn < 2:
            experts = slots(checkpoint, "some" if turn else None, "some", policy=policy, prefetch=1, read_ahead=turn)
            same(run(checkpoint, experts, gpu=turn == 1)[0], unstreamed)


def test_a_packed_store_and_prompts_in_chunks_say_the_same(checkpoint: Path, tmp_path: Path) -> None:
    pack_checkpoint(checkpoint, tmp_path / "packed", None, False, lambda done, total: None)
    batch = replace(BATCH, prompts=[list(range(3, 40)), list(range(50, 60))], chunk_tokens=8)
    same(run(tmp_path / "packed", slots(checkpoint, "few", "some"), True, batch)[0], expect(checkpoint, batch))


def test_what_a_run_records_is_read_back(checkpoint: Path, tmp_path: Path) -> None:
    experts = slots(checkpoint, None, "some")
    made, facts = run(checkpoint, experts, record=tmp_path / "routings.jsonl.xz")
    routings = read_routings(tmp_path / "routings.jsonl.xz")
    known = plan_for(checkpoint, decisions()).model.experts
    prompts, steps = sum(map(len, BATCH.prompts)), len(made.step_s) * len(BATCH.prompts)
    assert routings.experts.shape == (prompts + steps, len(known.layers), known.top_k)
    assert routings.decode.sum() == steps and routings.count == known.count and len(routings.scores) == 2


def test_what_is_recorded_is_what_the_model_chose(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **{**SIZES, **FAMILIES["mixtral"]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    batch = replace(BATCH, prompts=[[5, 9, 200, 31]], max_new_tokens=1)
    run(tmp_path / "model", slots(tmp_path / "model", None, "some"), batch=batch, record=tmp_path / "routings.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "routings.jsonl").read_text().splitlines()]
    with torch.inference_mode():
        logits = model(torch.tensor(batch.prompts), output_router_logits=True).router_logits
    for pos, line in enumerate(lines):
        assert (line["prompt"], line["phase"], line["pos"]) == (0, Phase.prefill, pos)
        assert line["experts"] == [layer[pos].topk(2).indices.tolist() for layer in logits]


def test_experts_computed_with_rows_of_no_use_say_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; a product of another height may round otherwise."""
    batch = replace(BATCH, prompts=[list(range(3, 90)), list(range(50, 100))], chunk_tokens=32)
    want, asked = expect(checkpoint, batch), []

    def height_of(hidden: torch.Tensor, prompt: bool) -> Callable[[int], int]:
        def height(rows: int) -> int:
            asked.append((rows, expert_rows.padded(rows, len(hidden)) if prompt else rows))
            return asked[-1][1]

        return height

    monkeypatch.setattr(forward, "height_of", height_of)
    monkeypatch.setattr(expert_rows, "LEAST_STEP", 4)
    got, _ = run(checkpoint, slots(checkpoint, "few", "some"), True, batch)
    assert got.tokens == want.tokens and len({height for _, height in asked}) > 3
    assert any(height > rows for rows, height in asked) and any(height == rows for rows, height in asked)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(got.logits, want.logits, strict=True))


@pytest.mark.parametrize("tokens, top_k, rows", [(1, 2, [1, 1]), (64, 2, [64, 32, 16, 8, 4, 4]), (6, 3, [6, 6, 3, 2, 1]), (5, 1, [5])])
def test_a_rehearsal_has_experts_of_many_heights(tokens: int, top_k: int, rows: list[int]) -> None:
    rehearsed = RehearsedExperts((), [torch.empty(0, dtype=torch.uint8)], count=6)
    chosen = rehearsed.route(torch.zeros(tokens, top_k, dtype=torch.long), torch.zeros(tokens, 4))
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert torch.bincount(chosen.ravel()).tolist() == rows
