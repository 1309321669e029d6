"""What a simulation says the DRAM cache loads and evicts is what a real run's cache does, in the same order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.asked.verb_schema import SimulateConfig
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, ExpertPolicyName, ExpertSlots
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.contract.policy import make_policy
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Acted, Options
from penstock.planner.verbs.simulate_verb import simulate_verb
from penstock.runtime.asked.run_schema import ExpertsConfig
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.kv.outside.spill import SpillHome
from tests.runtime.running import Desk, desk
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny, workload

CPU = torch.device("cpu")
LAYERS = 6


def run(plan: Plan, wrap: bool, copier: HostCopier | None = None) -> Engine:
    """An engine that has served the plan's workload, closed."""
    work, batch = plan.workload, plan.decisions.batch
    with opened(plan, Path(plan.model.checkpoint), copier, wrap_around=wrap, keep_log=True) as session:
        prompts = [list(range(5, 5 + work.prompt_tokens))] * batch
        asked = Batch(prompts, work.new_tokens, plan.decisions.prefill_chunk_tokens)
        session.load(asked)
        for _ in range(work.requests // batch):
            session.generate(asked, Sampler(Sampling(), CPU))
        return session.engine


def simulated(plan: Plan, wrap: bool = True, skip: bool = True) -> Acted:
    return Simulation(plan, Options(wrap, keep_log=True, skip=skip)).run()


@st.composite
def plans(draw: st.DrawFn) -> Callable[[Path, bool], Plan]:
    """Any plan for six layers that keeps the rules of the DRAM cache, and some work."""
    cap = draw(st.integers(0, LAYERS))
    hwm = cap + draw(st.integers(3, 10))
    distance = draw(st.integers(cap, hwm))
    policy = draw(st.sampled_from(CachePolicy))
    resident = draw(st.tuples(st.integers(0, LAYERS), st.integers(0, LAYERS), st.integers(0, 1)))
    slots = draw(st.integers(4, 8))
    ahead, ffn_slots = draw(st.integers(0, slots - 2)), draw(st.integers(0, 2))
    cap = min(cap, LAYERS - min(resident[:2]))
    hwm, distance = min(hwm, cap + 10), max(cap, min(distance, cap + 10, hwm))
    batch = draw(st.integers(1, 2))
    prompt, new = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    work = workload(prompt_tokens=prompt, new_tokens=new, requests=batch * draw(st.integers(1, 3)), batch=batch)
    chunk = draw(st.integers(1, 12))

    def make(checkpoint: Path, gpu: bool) -> Plan:
        made: Decisions = decisions(
            resident=resident if gpu else (0, 0, 0), slots=slots, vram_distance=ahead, cap=cap, hwm=hwm, distance=distance, policy=policy,
            gpu=gpu, prefill_chunk_tokens=chunk, batch=batch, ffn_slots=ffn_slots if gpu else 0,
        )  # fmt: skip
        return plan_for(checkpoint, made, gpu, work)

    return make


SOME = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SOME
@given(plans(), st.booleans())
def test_loads_and_evictions_are_those_of_a_run_without_a_gpu(checkpoint: Path, make: Callable[[Path, bool], Plan], wrap: bool) -> None:
    plan = make(checkpoint, False)
    cache, acted = run(plan, wrap).dram.cache.stats, simulated(plan, wrap).cache
    assert acted.log == cache.log
    for name in ("accesses", "hits", "misses", "loads", "evictions_out_of_window", "evictions_in_window", "shrinks"):
        assert getattr(acted, name) == getattr(cache, name), name


@SOME
@given(plans(), st.booleans())
def test_loads_and_evictions_are_those_of_a_run_on_a_card(checkpoint: Path, make: Callable[[Path, bool], Plan], wrap: bool) -> None:
    """At its end the ring runs ahead of compute, so far as it has come; what both have done by then is the same."""
    plan = make(checkpoint, True)
    ran, acted = run(plan, wrap, HostCopier()).dram.cache.stats, simulated(plan, wrap).cache
    shared = min(len(ran.log), len(acted.log))
    assert ran.log[:shared] == acted.log[:shared]
    assert shared >= needed(plan, wrap)


def needed(plan: Plan, wrap: bool) -> int:
    """Loads and evictions until the last layer of the last pass was asked for."""
    policy, work = make_policy(plan.placement, wrap), plan.workload
    passes = -(-work.prompt_tokens // plan.decisions.prefill_chunk_tokens) + work.new_tokens - 1
    done = len(policy.preload())
    for _ in range(passes * work.requests // plan.decisions.batch):
        done += sum(len(policy.access(layer).actions) for layer in plan.placement.dram_layers)
    return done


@pytest.mark.parametrize("case", [(40, 45, 60), (3, 4, 6)])
def test_a_window_that_is_too_wide_does_the_same_damage_to_both(checkpoint: Path, case: tuple[int, int, int]) -> None:
    cap, hwm, distance = (min(n, limit) for n, limit in zip(case, (2, 3, 5), strict=True))
    made = decisions(policy=CachePolicy.rolling, cap=cap, hwm=hwm, distance=distance)
    plan = plan_for(checkpoint, made, work=workload(prompt_tokens=4, new_tokens=5))
    cache, acted = run(plan, True).dram.cache.stats, simulated(plan).cache
    assert acted.log == cache.log and acted.evictions_in_window == cache.evictions_in_window > 0


def test_spilled_kv_is_read_and_given_up_in_the_order_of_a_run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, four of six layers' KV on the SSD."""
    made = decisions(prefill_chunk_tokens=8)
    plan = plan_for(checkpoint, made, work=workload(prompt_tokens=40, new_tokens=6, kv_spill=True))
    kv = plan.decisions.kv
    page = kv.dram_pages // LAYERS
    plan = replace(plan, decisions=replace(plan.decisions, kv=replace(kv, dram_pages=2 * page, ssd_pages=4 * page, page_tokens=64)))
    homes: list[SpillHome] = []
    begin = SpillHome.__init__

    def noted(self: SpillHome, *args: object) -> None:
        begin(self, *args)
        self._cache._slots._keep_log = True
        homes.append(self)

    monkeypatch.setattr(SpillHome, "__init__", noted)
    run(plan, True)
    simulation = Simulation(plan, Options(skip=False))
    opened: list[object] = []
    batch = simulation._batch
    simulation._batch = lambda n: (batch(n), opened.append(simulation.engine._kv))
    simulation.run()
    ran, acted = homes[-1]._cache.stats, opened[-1]._home._slots.stats
    assert (acted.loads, acted.accesses, acted.evictions_out_of_window) == (ran.loads, ran.accesses, ran.evictions_out_of_window)
    assert ran.accesses == 4 * (5 + 5)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_simulated_trace_has_the_tracks_of_a_real_one(checkpoint: Path, tmp_path: Path, on_a_card: Desk, gpu: bool) -> None:
    (tmp_path / "cpu").mkdir()
    here = on_a_card if gpu else desk(tmp_path / "cpu", plan_for(checkpoint, decisions()))
    real, paper = tmp_path / "real.json", tmp_path / "paper.json"
    here.run(trace=str(real))
    simulate_verb(SimulateConfig(plan=str(here.plan), trace=str(paper)))
    ran, acted = tracks(real), tracks(paper)
    assert set(acted) == {name for name in ran if not name.startswith("SSD reader")}
    for track in ("passes", "compute"):
        assert worked(acted[track]) == worked(ran[track])


def worked(names: list[str]) -> list[str]:
    """Of a track's spans, those of work, in a row only once: what comes before a unit that is waited for counts as its own."""
    work = [name for name in names if not name.startswith(("wait", "head", "embedding"))]
    return [name for name, _ in itertools.groupby(work)]


def tracks(path: Path) -> dict[str, list[str]]:
    """Track -> names of its spans in the order of their beginning."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[str]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found.setdefault(titles[event["tid"]].partition(" (")[0], []).append(event["name"])
    return found


def test_what_is_skipped_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    plan = plan_for(checkpoint, decisions(pages=640), work=workload(new_tokens=400))
    write_plan(plan, tmp_path / "plan.yaml")
    brief, whole = simulated(plan), simulated(plan, skip=False)
    assert brief.acted_passes < whole.acted_passes / 3
    assert (brief.cache, brief.record.counts, brief.total_ns) == (whole.cache, whole.record.counts, whole.total_ns)


@pytest.mark.parametrize("policy", [ExpertPolicyName.lru, ExpertPolicyName.mix])
def test_with_a_runs_own_routings_a_simulation_finds_as_many_experts(tmp_path: Path, policy: ExpertPolicyName) -> None:
    """Nothing is fetched ahead here: what arrives in time is a matter of time."""
    mixtral = save_tiny(tmp_path / "mixtral", "mixtral")
    slots = ExpertSlots(0, 15, policy, prefetch=0, chunk_bytes=1 << 16)
    plan = plan_for(mixtral, decisions(experts=slots), work=workload(prompt_tokens=1, new_tokens=40))
    here, routed = desk(tmp_path, plan), tmp_path / "routed.jsonl"
    ran = here.run(moe=ExpertsConfig(record=str(routed)))
    out = tmp_path / "told.json"
    simulate_verb(SimulateConfig(plan=str(here.plan), routings=str(routed), out=str(out)))
    told = json.loads(out.read_text(encoding="utf-8"))
    found, acted = ran["experts"]["dram"], told["experts"]["dram"]
    assert (acted["hits"], acted["misses"]) == (found["hits"], found["misses"])
    assert acted["misses"] > 0 < acted["hits"]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_experts_of_a_batch_pass_whatever_slots_there_are(tmp_path: Path, gpu: bool, prefetch: int) -> None:
    mixtral = save_tiny(tmp_path / "mixtral", "mixtral")
    for vram, dram in ((5, 5), (9, 12), (24, 0), (5, 24)):
        slots = ExpertSlots(vram if gpu else 0, dram if gpu else max(dram, 5), prefetch=prefetch, chunk_bytes=1 << 14)
        made = decisions(experts=slots, gpu=gpu, batch=2)
        plan = plan_for(mixtral, made, gpu, workload(prompt_tokens=6, new_tokens=9, batch=2, requests=4))
        acted = simulated(plan)
        used = acted.experts["vram" if gpu else "dram"]
        assert used.hits + used.misses >= 2 * LAYERS * (4 + 8 * 2) and len(acted.record.step_ns) == 16
