"""Layers of KV in DRAM that the CPU attends to: the logits of all other ways but for rounding, whatever comes between, and an end to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import enumerate as threads
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.decided.kv_tiers import attended_on_host
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import schedules_of
from penstock.planner.contract.policy.schedule_choice import AGAIN, ScheduleChoice
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session
from penstock.runtime.engine.validate import LogitsCheck, compare_logits
from penstock.runtime.kv.outside import host_attention
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny, workload

CPU = torch.device("cpu")
LAYERS = 6
A_LAYER = 16
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3, 4, 5]], max_new_tokens=9, chunk_tokens=1 << 20)
LONG = replace(BATCH, prompts=[list(range(3, 40)), list(range(50, 91))], chunk_tokens=7)
CASES = {
    "all in DRAM, all attended": (0, 6, 0, 6), "all in DRAM": (0, 6, 0, 3), "half": (3, 3, 0, 2), "all tiers": (1, 3, 2, 2),
    "one streams": (0, 6, 0, 5),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), layers=LAYERS)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = {thread.ident for thread in threads()}  # ranks that a worker keeps have one
    yield
    assert not [thread.name for thread in threads() if thread.name.startswith("penstock") and thread.ident not in before]


def _plan(checkpoint: Path, layers: tuple[int, int, int, int], **work: object) -> Plan:
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(1, 2, 0), batch=3), True, workload(kv_spill=True, **work))
    vram, dram, ssd, attended = layers
    made = replace(plan.decisions, kv=KvPages(64, vram * A_LAYER, dram * A_LAYER, ssd * A_LAYER, host_layers=attended))
    hardware = replace(plan.hardware, host=HostRates(2, {}, 1e-5, 1.0, 1.0, 20.0, 1e-4))
    return Plan(hardware, plan.model, plan.workload, made, predict(hardware, plan.model, plan.workload, made))


@contextmanager
def _session(plan: Plan, checkpoint: Path) -> Iterator[Session]:
    """Whose steps follow the plan's schedule, whatever others do on these cores."""
    with opened(plan, checkpoint, HostCopier()) as session:
        if (attention := session.engine.outside.attention) is not None:
            attention._choice = ScheduleChoice(attention._choice.schedules[:1])
        yield session


def _check(session: Session, checkpoint: Path, batch: Batch, roundings: float = 1.0) -> LogitsCheck:
    """``roundings``: of what a layer's two sums explain."""
    got = session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    found = compare_logits(model, CPU, batch, got, 64, lambda *_: None)
    assert found.relative_l2 <= roundings * found.rounding and found.same_argmax > 0.9, found
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_unstreamed_models_but_for_rounding(checkpoint: Path, case: str) -> None:
    plan = _plan(checkpoint, CASES[case])
    with _session(plan, checkpoint) as session:
        session.load(BATCH)
        for batch in (BATCH, replace(BATCH, prompts=BATCH.prompts[1:]), LONG):
            _check(session, checkpoint, batch)
        nbytes, _ = session.engine.stage_totals()["cpu"]
        assert session.engine.outside.attention is not None and session.engine.outside.attention.refused is None
    steps = [len(p) + k + 1 for b in (BATCH, replace(BATCH, prompts=BATCH.prompts[1:]), LONG) for p in b.prompts for k in range(8)]
    assert nbytes >= sum(steps) * 2 * 2 * 16 * 2 * CASES[case][3], "the CPU has read the layers that it attends to"


@pytest.mark.parametrize("model_type", ["gemma2", "mistral", "qwen3"])
def test_windows_and_capped_scores_are_attended_to(tmp_path: Path, model_type: str) -> None:
    checkpoint = save_tiny(tmp_path, model_type, model_type == "gemma2", layers=LAYERS, sliding_window=8)
    with _session(_plan(checkpoint, (1, 5, 0, 3)), checkpoint) as session:
        session.load(LONG)
        _check(session, checkpoint, LONG, 2.0 if model_type == "gemma2" else 1.0)  # which has four norms a layer


def test_heads_that_the_cpu_does_not_know_stream_and_the_user_is_told(tmp_path: Path) -> None:
    checkpoint, told = save_tiny(tmp_path, layers=LAYERS, head_dim=24), list[str]()
    with opened(_plan(checkpoint, (0, 6, 0, 3)), checkpoint, HostCopier(), tell=told.append) as session:
        session.load(BATCH)
        assert _check(session, checkpoint, BATCH).identical
        assert "cpu" not in session.engine.stage_totals()
    assert sum("are copied to the card" in line for line in told) == 1, told


def test_what_fails_on_the_cpu_is_raised_and_the_session_closes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _session(_plan(checkpoint, (0, 6, 0, 3)), checkpoint) as session:
        session.load(BATCH)

        def fail(pool: HostPool, *asked: object) -> None:
            raise MemoryError("no scratch")

        monkeypatch.setattr(HostPool, "attend_asked", fail)
        with pytest.raises(MemoryError, match="no scratch"):
            session.generate(BATCH, Sampler(Sampling(), CPU))


def test_what_fails_on_the_card_leaves_no_thread_waiting(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads wait for rows that a kernel would have written."""
    with _session(_plan(checkpoint, (0, 6, 0, 3)), checkpoint) as session:
        session.load(BATCH)

        def fail(copier: HostCopier, flag: torch.Tensor, value: int) -> None:
            raise RuntimeError("launch failed")

        with monkeypatch.context() as broken:
            broken.setattr(HostCopier, "compute_writes", fail)
            with pytest.raises(RuntimeError, match="launch failed"):
                session.generate(BATCH, Sampler(Sampling(), CPU))
            session.engine.outside.settle()


def test_steps_stream_while_another_process_has_the_cores_and_come_back(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which a step that attends takes as long as ``slow`` says, one that streams a second."""
    told, slow, now = list[str](), [True], [0.0]
    plan, batch = _plan(checkpoint, (0, 6, 0, 3)), replace(BATCH, max_new_tokens=98)
    own, alone = (replace(one, predicted_s=seconds) for one, seconds in zip(schedules_of(plan), (0.5, 1.0), strict=True))
    with opened(plan, checkpoint, HostCopier(), tell=told.append) as session:
        attention = session.engine.outside.attention
        assert attention is not None
        attention._choice = choice = ScheduleChoice((own, alone))
        session.load(batch)
        monkeypatch.setattr(host_attention, "time", SimpleNamespace(perf_counter=lambda: now[0]))

        def progress(phase: str, done: int, total: int) -> None:
            now[0] += 1.0 if choice.current is not own else 3.0 if slow[0] else 0.5
            slow[0] = slow[0] and done < 20

        session.generate(batch, Sampler(Sampling(), CPU), progress=progress)
    assert choice.current is own and choice.steps[alone.name] >= AGAIN and choice.steps[own.name] > 10
    assert [line for line in told if "streaming alone from now on" in line] and [line for line in told if "schedule again" in line]


def test_a_run_attends_to_the_layers_and_bytes_of_its_simulation(checkpoint: Path) -> None:
    plan = _plan(checkpoint, (1, 5, 0, 3), batch=3, requests=3, prompt_tokens=20, new_tokens=6)
    batch = Batch([list(range(3, 23))] * 3, 6, plan.decisions.prefill_chunk_tokens)
    with opened(plan, checkpoint, HostCopier(), keep_spans=True) as session:
        session.load(batch)
        before = len(session.engine.ledger.spans)
        session.generate(batch, Sampler(Sampling(), CPU))
        session.engine.stage_totals()  # what is over is booked
        ran = [span for span in session.engine.ledger.spans[before:] if span.track == "cpu"]
    acted = Simulation(plan, Options(keep_spans=True)).run()
    played = [span for span in acted.record.spans if span.track == "cpu" and not span.waits_for]
    wanted = [f"kv.{layer}" for layer in attended_on_host(LAYERS, plan.decisions.kv)] * 5
    assert [span.name for span in ran] == [span.name for span in played] == wanted
