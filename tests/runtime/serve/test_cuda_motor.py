"""A motor on a card says what each prompt alone is told: resident or streamed, recorded or launched, given up or restored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.serve.wire.messages import Sampled
from tests.runtime.serve.motors import alone, motor, serving_plan, submit
from tests.runtime.serve.test_motor import prompt_of
from tests.runtime.serve.test_motor_pages import keeping_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("resident", [(0, 0, 0), (6, 6, 1)], ids=["streamed", "resident"])
@pytest.mark.parametrize("pages", [24, 8], ids=["roomy", "tight"])
def test_replies_are_those_of_the_prompt_alone(exact_checkpoint: Path, resident: tuple[int, int, int], pages: int) -> None:
    plan = serving_plan(exact_checkpoint, gpu=True, resident=resident, pages=pages)
    with motor(plan, exact_checkpoint, CudaDevice(0), device=CARD) as made:
        asked = [submit(k, prompt_of(k, 14 + 7 * k % 20), 40) for k in range(6)]
        found = made.front.answers(*asked)
        assert [heard.tokens[0] for heard in found] == [alone(made.served, one.prompt, one.new_tokens) for one in asked]
        report = made.front.drain()
    assert (report["totals"]["given_up"] > 0) == (pages == 8)


def test_a_damaged_page_is_computed_again_and_others_do_not_notice(exact_checkpoint: Path) -> None:
    with motor(keeping_plan(exact_checkpoint, gpu=True), exact_checkpoint, CudaDevice(0), device=CARD) as made:
        session, prompt = made.served.session, prompt_of(4, 60)
        made.front.answers(submit(0, prompt, 4))
        assert session.prefix is not None
        while session.prefix.pending:
            session.prefix.finish()
        session.prefix.forget()
        memory = session.engine.page_memory
        memory.view[memory.tensor.numel() // 12 + 77] ^= 4
        asked = [submit(1, prompt, 9), submit(2, prompt_of(5, 20), 9), submit(3, [*prompt[:30], 7], 9)]
        found = made.front.answers(*asked)
        assert [heard.tokens[0] for heard in found] == [alone(made.served, one.prompt, 9) for one in asked]
        assert session.prefix.facts()["failures"] == 1


def test_what_one_motor_computed_the_next_one_restores(exact_checkpoint: Path, tmp_path: Path) -> None:
    plan, kv, prompt = keeping_plan(exact_checkpoint, gpu=True), ReuseConfig(dir=str(tmp_path), read_gbps=1e9), prompt_of(3, 50)
    said = []
    for cached in (0, 48):
        with motor(plan, exact_checkpoint, CudaDevice(0), kv, CARD) as made:
            (heard,) = made.front.answers(submit(0, prompt, 8))
            assert heard.began is not None and heard.began.cached_tokens == cached
            said.append(heard.tokens[0])
            made.front.drain()
    assert said[0] == said[1]


def test_rows_draw_the_same_in_any_company(exact_checkpoint: Path) -> None:
    with motor(serving_plan(exact_checkpoint, gpu=True), exact_checkpoint, CudaDevice(0), device=CARD) as made:
        kinds = [
            Sampled(temperature=1.5, seed=1),
            Sampled(temperature=2.0, top_k=30, top_p=0.9, seed=2),
            Sampled(temperature=1.2, min_p=0.01, seed=3),
            Sampled(temperature=0, repetition_penalty=1.3, logit_bias={5: 2.0}),
        ]
        asked = [submit(k, prompt_of(k, 20), 12, sampling=kind, logprobs=2) for k, kind in enumerate(kinds)]
        together = [heard.tokens[0] for heard in made.front.answers(*asked)]
        singly = [made.front.answers(submit(10 + k, prompt_of(k, 20), 12, sampling=kind))[0].tokens[0] for k, kind in enumerate(kinds)]
    assert together == singly
