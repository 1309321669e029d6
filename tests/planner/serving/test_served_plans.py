"""Plans for a server: rows, tokens of a pass, pages of KV and placement, solved for together."""

import json
from dataclasses import asdict, replace

import pytest

from penstock.planner.asked.verb_schema import PlayedConfig, SimulateConfig
from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import WorkloadConfig
from penstock.planner.contract.config.resolve import workload_from
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.memory_law import vram_use
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.serving.arrivals import Arrivals
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import planned_load, simulate_serving
from penstock.planner.solver.planning import answer
from penstock.planner.solver.terms.problem import Question
from penstock.planner.verbs.simulate_verb import simulate_verb
from tests.planner.small import GB, MB, machine, model, work

SERVED = work(batch=0, prompt_tokens=512, new_tokens=64, clients=16, length_spread=0.5, context_tokens=2048, objective=Objective.throughput)
ASKED = Question(machine(2 * GB, 8 * GB), model(24, 40 * MB, 120 * MB), SERVED)


@pytest.fixture(scope="module")
def plan():
    return answer(ASKED)


def rate(plan, requests=200):
    return simulate_serving(plan, Arrivals.of(plan.workload, requests)).requests_per_s


def test_a_servers_plan_is_no_slower_than_any_other_number_of_rows(plan):
    found = {rows: rate(answer(replace(ASKED, workload=replace(SERVED, batch=rows)))) for rows in (1, 4, 16)}
    assert found[1] < found[4], "further rows are nearly free where weights stream"
    assert rate(plan) >= 0.97 * max(found.values())


@pytest.mark.parametrize("vram", [2 * GB, 0])
def test_the_simulator_finds_the_rate_that_the_program_predicts(vram):
    equal = replace(SERVED, length_spread=0.0, batch=8, clients=8)
    plan = answer(replace(ASKED, hardware=machine(vram, 8 * GB), workload=equal))
    assert rate(plan) == pytest.approx(1 / plan.prediction.total_s, rel=0.1)


def test_rows_are_as_many_as_the_rate_of_requests_asks_for(plan):
    work = replace(SERVED, objective=Objective.latency, clients=64)
    crowd = planned_load(plan, Arrivals.of(work, 200))
    plans = [answer(replace(ASKED, workload=replace(work, arrivals_per_s=share * crowd))) for share in (0.05, 0.5)]
    assert plans[0].decisions.batch < plans[1].decisions.batch
    for one in plans:
        found = simulate_serving(one, Arrivals.of(one.workload, 300))
        seconds = found.ttft_s.mean + (SERVED.new_tokens - 1) * found.between_s.mean
        assert seconds == pytest.approx(one.prediction.total_s, rel=0.25), "what is minimised is what a request takes"


def test_what_a_server_needs_is_within_its_memory_and_its_rules(plan):
    limits, made = ServeLimits.of(plan), plan.decisions
    assert broken_rules(plan.hardware, plan.model, plan.workload, made) == []
    assert limits.rows == made.batch and limits.pass_tokens == made.batch + made.prefill_chunk_tokens
    assert limits.capacity_tokens >= SERVED.context_tokens
    assert limits.pages < made.batch * -(-SERVED.max_tokens // limits.page_tokens), "not all rows are as long as any may be"
    fewer = replace(made, kv=replace(made.kv, vram_pages=made.kv.vram_pages - plan.model.layers))
    assert [rule.name for rule in broken_rules(plan.hardware, plan.model, plan.workload, fewer)] == ["KV pages for the workload"]


def test_longer_passes_take_more_memory_and_are_taken_where_they_are_asked_for(plan):
    longer = answer(replace(ASKED, force=Force(prefill_chunk_tokens=2048)))
    assert ServeLimits.of(longer).pass_tokens == longer.decisions.batch + 2048
    use = [vram_use(p.hardware, p.model, p.workload, replace(plan.decisions, prefill_chunk_tokens=2048)) for p in (plan, longer)]
    assert use[0]["activations"] > vram_use(plan.hardware, plan.model, plan.workload, plan.decisions)["activations"]


@pytest.mark.parametrize("page_tokens", [16, 64, 256, 512])
def test_the_pool_is_as_large_in_pages_of_another_size(plan, page_tokens):
    repaged = Force(page_tokens=page_tokens).apply(plan.decisions, plan.model.layers)
    roomy = replace(plan.hardware, vram_bytes=plan.hardware.vram_bytes * 2)
    assert broken_rules(roomy, plan.model, plan.workload, repaged) == []


def test_a_prompt_takes_one_pass_where_that_costs_little():
    streamed = answer(replace(ASKED, workload=replace(SERVED, objective=Objective.latency, length_spread=0.0)))
    assert streamed.decisions.prefill_chunk_tokens >= SERVED.prompt_tokens
    rows, arrivals = streamed.decisions.batch, Arrivals.of(streamed.workload, 200)
    calm = simulate_serving(streamed, arrivals.at_rate(0.5 * planned_load(streamed, arrivals)))
    assert calm.ttft_s.p50 <= 2.2 * calm.pass_s.p99, f"with {rows} rows a prompt waits for a pass, and is computed in the next"


def test_a_server_that_does_not_fit_is_told_what_would():
    with pytest.raises(UserError, match="no plan fits") as short:
        answer(replace(ASKED, workload=replace(SERVED, batch=256, clients=256, prompt_tokens=20_000)))
    assert "kv_spill" not in str(short.value) and "workload.batch=" in str(short.value)


def test_a_servers_plan_file_says_all_and_runs_as_batches(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert plan.chunk_tokens(plan.decisions.batch) * plan.decisions.batch <= plan.decisions.prefill_chunk_tokens


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"arrivals_per_s": 2.0}, "workload.arrivals_per_s=2.0: is of a server"),
        ({"clients": 4, "kv_spill": True}, "workload.kv_spill=true: a server's KV"),
        ({"clients": 4, "objective": "ttft"}, "workload.objective=ttft: .* latency or throughput"),
        ({"batch": 0}, "workload.batch=0"),
    ],
)
def test_keys_that_say_nothing_together_are_refused(keys, said):
    with pytest.raises(UserError, match=said):
        workload_from(WorkloadConfig(name="x", **keys))


def played(plan, tmp_path, capsys, **keys):
    write_plan(plan, tmp_path / "plan.yaml")
    simulate_verb(SimulateConfig(plan=str(tmp_path / "plan.yaml"), serve=PlayedConfig(requests=150, **keys), json=True))
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_planner_simulate_plays_requests_to_a_servers_plan(plan, tmp_path, capsys):
    told = played(plan, tmp_path, capsys)
    assert told["limits"] == asdict(ServeLimits.of(plan)) and told["arrivals"]["clients"] == SERVED.clients
    assert told["asked"]["requests_per_s"] == pytest.approx(rate(plan, 150), rel=1e-4)
    calm, busy = told["at_load"]["0.3"], told["at_load"]["0.9"]
    assert calm["ttft_s"]["p99"] <= busy["ttft_s"]["p99"]
    assert played(plan, tmp_path, capsys, load=0.3)["asked"] == calm
    with pytest.raises(UserError, match="serve.prompt_tokens=.*: the plan holds KV for"):
        played(plan, tmp_path, capsys, prompt_tokens=10**6)
    with pytest.raises(UserError, match="serve.clients=2, serve.load=0.5: say one"):
        played(plan, tmp_path, capsys, clients=2, load=0.5)
