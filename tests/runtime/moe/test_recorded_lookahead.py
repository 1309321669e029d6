"""What foresight is worth on a trained model: every token of a text that tiny-mixtral reads is a step of its own."""

from __future__ import annotations

import json.decoder
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies import AheadScores, ExpertPolicy, make_expert_policy
from penstock.planner.contract.experts.policies.next_layer import AheadPolicy
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.contract.experts.routing_files import read_routings
from penstock.planner.replay.replayed import Fetched, replay
from penstock.runtime.experts.expert_forward import WholeExperts
from penstock.runtime.experts.routing_record import RoutingRecorder
from penstock.runtime.model.rows import Row, RowKind, Step
from tests.conftest import SHARED
from tests.runtime.whole_experts import take_over

PROMPTS, TOKENS = 8, 256
LIKELY = Prefetch(2, 0.5)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Routings:
    directory = SHARED / "models" / "tiny-mixtral"
    if not directory.is_dir():
        pytest.skip("no ../shared/models beside this checkout")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    layers, path = model.model.layers, tmp_path_factory.mktemp("routings") / "routings.jsonl"
    recorder, source = RoutingRecorder(path, layers), WholeExperts(layers)
    for runner in take_over(model, source):
        runner.feed(source, watcher=recorder)
    text = AutoTokenizer.from_pretrained(directory)(Path(json.decoder.__file__).read_text(), return_tensors="pt").input_ids
    with torch.inference_mode():
        for read in (text[:, :1], text[:, : PROMPTS * TOKENS].view(PROMPTS, -1)):
            rows = (Row(number, tuple(ids), 0, (), RowKind.prompt) for number, ids in enumerate(read.tolist()))
            recorder.begin_pass(Step(tuple(rows)))
            model(read)
    recorder.close()
    return read_routings(path, 8, lambda share: None).all_decoded()


def by_rank(layers: int, count: int, top_k: int) -> ExpertPolicy:
    """The scores alone: the share of visits that used an expert of the same rank."""
    return AheadPolicy(layers, count, top_k, make_expert_policy(ExpertPolicyName.mix, layers, count, top_k), AheadScores.router)


def test_on_a_trained_model_lookahead_names_more_and_fetches_more_of_use_than_mix_or_scores_alone(
    recorded: Routings, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, mix = (fetched_beside(recorded, name) for name in (ExpertPolicyName.lookahead, ExpertPolicyName.mix))
    monkeypatch.setattr("penstock.planner.replay.replayed.make_expert_policy", lambda name, *shape: by_rank(*shape))
    alone = fetched_beside(recorded, ExpertPolicyName.lookahead)
    for slots in (2, 4):
        assert both[slots].named > max(mix[slots].named, alone[slots].named)
        assert gain(both[slots]) > max(gain(mix[slots]), gain(alone[slots]))
    assert both[2].named > mix[2].named + 0.03 * recorded.experts.size


def fetched_beside(routings: Routings, name: ExpertPolicyName) -> dict[int, Fetched]:
    return {f.slots: f for f in replay(routings, name, [2, 4], LIKELY).fetched}


def gain(fetched: Fetched) -> int:
    """Those of use less those in vain: what penstock.planner.contract.experts.expert_caches.LIKELY weighs."""
    return 2 * fetched.right - fetched.fetched
