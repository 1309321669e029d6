"""The model's own heads draft: what transformers' module for them drafts, through pauses, wrong drafts, and other rows' ends."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import penstock
from penstock.planner.contract.checkpoint.draft_checkpoint import heads_spec
from penstock.planner.contract.checkpoint.further_heads import FURTHER_HEADS
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.memory_law import drafter_bytes
from penstock.planner.contract.published.model_source import further_heads_of
from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength
from penstock.runtime.engine.passes.generate import Batch, generate
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.model.further.further_layer import feed
from penstock.runtime.model.further.hidden_rows import HiddenRows
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.speculate.chains import Chains
from penstock.runtime.speculate.drafter import Drafts
from penstock.runtime.speculate.further_drafter import FurtherDrafter
from tests.runtime.serve.motors import motor, serving_plan, submit
from tests.runtime.serve.test_motor import prompt_of
from tests.runtime.speculate.test_model_drafter import Anyhow
from tests.runtime.steppers import CPU, unstreamed
from tests.support import add_further_head, save_tiny

GLM: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
GLM |= {"first_k_dense_replace": 1}
DEEPSEEK = GLM | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
DEEPSEEK |= {"num_key_value_heads": 4}
GROUPS = {"n_group": 1, "topk_group": 1}


@dataclass
class Made:
    """A model in float64, where passes of other shapes choose the same tokens, its heads as we and as transformers have them."""

    target: Any
    alone: Any
    head: Any
    further: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path: Path = tmp_path_factory.mktemp("models") / "glm"
    add_further_head(save_tiny(path, "glm4_moe", layers=2, **GLM, **GROUPS))
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]  # it knows its heads by the layers of published checkpoints
    further = MtpModel.from_pretrained(target).to(torch.float64).eval()
    head = build_skeleton(path / FURTHER_HEADS).to_empty(device="cpu").to(torch.float64)
    head.set_experts_implementation("eager")
    ((theirs,), (mine,)) = further.layers, head.model.layers
    mine.load_state_dict(theirs.mtp_block.state_dict(), strict=False)
    for name in ("enorm", "hnorm", "eh_proj"):
        mine.get_submodule(name).load_state_dict(theirs.get_submodule(name).state_dict())
    head.model.norm.load_state_dict(theirs.post_norm.state_dict())
    head.model.embed_tokens, head.lm_head = target.model.embed_tokens, target.lm_head
    head.model.rotary_emb = deepcopy(target.model.rotary_emb)
    return Made(target, deepcopy(target), head, further)


class Compared(FurtherDrafter):
    """Holds each chain against transformers' module, which reads all anew, and goes on from its own states as its generator does not."""

    other: Made

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        drafts = super().propose(rows, most)
        for row, draft, room in zip(rows, drafts, most, strict=True):
            assert len(draft) == room
            assert list(draft) == self._anew(row.tokens, self._rows[row.number].first, room)
        return drafts

    def _anew(self, said: Sequence[int], first: int, room: int) -> list[int]:
        further, tokens, drafted = self.other.further, list(said[first:]), []
        states = self.other.alone.model(torch.tensor([said[:-1]])).last_hidden_state[:, first:]
        for _ in range(room):
            places = torch.arange(1, len(tokens))[None] + first
            cache = MtpCache(config=self.other.alone.config.get_mtp_config())
            out = further.forward_layer(0, states, places, cache, input_ids=torch.tensor([tokens[1:]]))
            drafted.append(int(self.other.alone.lm_head(out[0, -1]).argmax()))
            tokens.append(drafted[-1])
            states = torch.cat([states, out[:, -1:]], 1)
        return drafted


def drafting(made: Made, few: int, chunk_tokens: int) -> tuple[Compared, Stepper, Stepper]:
    target, head = deepcopy(made.target), deepcopy(made.head)
    said, taken, gave = (HiddenRows(few, 64, torch.float64, CPU) for _ in range(3))
    said.follow(target)
    feed(head, taken)
    gave.follow(head)
    stepper, steps = unstreamed(target), unstreamed(head)
    proposer = Compared(steps, said, taken, gave, chunk_tokens)
    proposer.other = made
    stepper.watcher = proposer
    return proposer, stepper, steps


@given(data=st.data())
@settings(deadline=None, max_examples=8, phases=[Phase.generate])
def test_heads_draft_what_transformers_drafts_and_the_text_stays(made: Made, data: st.DataObject) -> None:
    """Of any prompts, batches, limits and stop tokens, with chains of any length, none among them."""
    prompts = data.draw(st.lists(st.lists(st.integers(1, 250), min_size=1, max_size=20), min_size=1, max_size=3))
    limits = [data.draw(st.integers(1, 12)) for _ in prompts]
    stop = frozenset(data.draw(st.lists(st.integers(0, 299), max_size=20)))
    batch = Batch(prompts, max(limits), data.draw(st.integers(1, 8)), stop, limits)
    sampling = data.draw(st.sampled_from([Sampling(), Sampling(temperature=1.0, top_k=50, seed=3)]))
    proposer, stepper, steps = drafting(made, data.draw(st.sampled_from([1, 3, 64])), data.draw(st.integers(1, 8)))
    length = Anyhow(4, lambda drafts: 1.0, Acceptance(0.5), draw=random.Random(data.draw(st.integers(0, 99))))
    free = steps.pool.pages.free
    drafted = generate(stepper, batch, Sampler(sampling, CPU), chains=Chains("mtp", proposer, length)).tokens
    assert drafted == generate(unstreamed(deepcopy(made.target)), batch, Sampler(sampling, CPU)).tokens
    assert steps.pool.pages.free == free


@torch.inference_mode()
def test_a_head_reads_on_behind_what_was_restored_and_back_where_a_turn_is_told_otherwise(made: Made) -> None:
    proposer, stepper, _ = drafting(made, 64, 4)
    row, tokens = KvSequence.of(0, range(1, 25)), stepper.pool.pages.page_tokens
    row.hold(stepper.pool.pages, 48)

    def compute(count: int) -> None:
        stepper.run(Step((row.row(count, RowKind.prompt, wanted=0),)))
        row.cached += count

    stepper.watcher = None
    compute(8)
    stepper.watcher = proposer
    for said in ([], [9] * 20):
        row.tokens += said
        compute(row.left)
        row.tokens.append(40)
        compute(1)
        row.tokens.append(41)
        proposer.read([row])
        assert len(proposer.propose([row], [3])[0]) == 3
        row.cached = tokens
        row.tokens[tokens:] = [50, 51, 52]
    proposer.ended(0)
    assert not proposer._rows


@pytest.mark.parametrize(("kind", "sizes"), [("glm4_moe", GLM), ("deepseek_v3", DEEPSEEK)])
def test_a_run_drafts_by_the_checkpoints_own_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, int]
) -> None:
    """Where the head is always right, all that it drafts is kept, through prompts in chunks, batches, and a plan file."""
    monkeypatch.setattr(ChainLength, "choose", lambda length: length.most)
    checkpoint = add_further_head(save_tiny(tmp_path / "target", kind, layers=2, **sizes, **GROUPS), still=True)
    keys: dict[str, Any] = {
        "model.checkpoint": str(checkpoint),
        "workload.prompt_tokens": 24,
        "workload.new_tokens": 16,
        "workload.batch": 2,
    }
    forced: dict[str, Any] = {"force.speculate_tokens": 3, "force.prefill_chunk_tokens": 8}
    plan = penstock.solve(hardware="cpu", speculate="mtp", **forced, **keys)
    heads = plan.decisions.speculation.model
    assert heads is not None
    assert heads.layers == 1
    published = further_heads_of(json.loads((checkpoint / "config.json").read_text()), plan.model)
    assert published is not None
    assert published.weight_bytes == pytest.approx(heads.weight_bytes, rel=0.01)
    taken = drafter_bytes(plan.hardware, plan.model, plan.workload, plan.decisions)
    assert taken[Tier.dram] > heads.weight_bytes
    assert not any("left out" in note for note in plan.notes)
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").drafter == plan.drafter
    said, prompts = {}, [[5, 9, 200, 31] * 6, [7, 7, 8]]
    for name, one in {"plain": penstock.solve(hardware="cpu", **keys), "drafted": str(tmp_path / "plan.yaml")}.items():
        with penstock.open(one) as model:
            said[name] = [reply.tokens for reply in model.generate(prompts, 16, greedy=True)]
            chains = model._session.chains
    assert said["drafted"] == said["plain"]
    assert chains is not None
    assert chains.counts.kept == chains.counts.drafted > 0
    assert chains.counts.passes == 4


def test_heads_draft_in_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that join, leave, are given up and come back: where the head is always right, all is kept."""
    monkeypatch.setattr(ChainLength, "choose", lambda length: length.most)
    checkpoint = add_further_head(save_tiny(tmp_path / "target", "glm4_moe", layers=2, **GLM, **GROUPS), still=True)
    plain = serving_plan(checkpoint, pages=7)
    speculation = Speculation(Drafter.mtp, 4, 0.9, heads_spec(plain.model))
    asked, said = [submit(k, prompt_of(k, 12 + 9 * k), 18) for k in range(5)], []
    for plan in (plain, replace(plain, decisions=replace(plain.decisions, speculation=speculation))):
        with motor(plan, checkpoint) as made:
            said.append([heard.tokens for heard in made.front.answers(*asked)])
            totals, chains = made.front.drain()["totals"], made.served.session.chains
    assert said[0] == said[1]
    assert totals["kept"] == totals["drafted"] > 30
    assert totals["given_up"] > 0
    assert isinstance(chains, Chains)
    assert isinstance(chains._proposer, FurtherDrafter)
    assert not chains._proposer._rows


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "llama has no heads that predict further tokens"),
        ({"draft": "{llama}"}, "speculate=mtp drafts without a model"),
        ({"model": "llama8b", "model.checkpoint": None}, "nothing says that llama8b has heads"),
    ],
)
def test_heads_that_are_not_there_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    checkpoint = save_tiny(tmp_path / "llama", layers=1)
    keys = {"model.checkpoint": str(checkpoint)} | {k: v.format(llama=checkpoint) if isinstance(v, str) else v for k, v in keys.items()}
    with pytest.raises(penstock.UserError, match=said):
        penstock.solve(hardware="rtx4090", speculate="mtp", **{key: value for key, value in keys.items() if value is not None})
