"""What the pages promise of plans, and the demo's own plan: solved anew, in this process."""

from __future__ import annotations

import re

import pytest

from penstock.planner.cli import PROGRAM
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.render.whereabouts import layers_in
from penstock.planner.solver.planning import make_plan
from tests.cli import ROOT

DESKTOP = ("hardware=rtx5080",)


def solved(*typed: str) -> Plan:
    return make_plan(PROGRAM.configuration("solve", typed))


def text_of(name: str) -> str:
    """A page with its lines joined: what is promised may stand on two of them."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def rate(plan: Plan) -> str:
    return f"{plan.prediction.decode_tokens_per_s:.3g}"


def test_what_the_readme_predicts_of_a_batch_and_of_experts_is_what_is_solved() -> None:
    page = text_of("README.md")
    batch = re.search(r"eight sequences together are predicted at ([0-9.]+) tokens/s \(`([^`]+)`\)", page)
    experts = re.search(r"`(model=qwen3-30b-a3b)` on the same machine is predicted at ([0-9.]+) tokens/s, with (\d+) GB of weights", page)
    assert batch and experts
    assert rate(solved(*DESKTOP, "model=llama70b", *batch[2].split())) == batch[1]
    plan = solved(*DESKTOP, experts[1])
    assert (rate(plan), f"{plan.model.weight_bytes / 1e9:.0f}") == (experts[2], experts[3])


def test_what_a_larger_batch_gives_is_what_is_solved() -> None:
    page = text_of("docs/tuning.md")
    said = re.search(
        r"Batch ([\d, ]+) and (\d+) give ([\d., ]+) and ([\d.]+) tokens/s in all, and ([\d., ]+) and ([\d.]+) s to the first", page
    )
    assert said
    batches, rates, firsts = ([*said[k].split(", "), said[k + 1]] for k in (1, 3, 5))
    plans = [solved(*DESKTOP, "model=llama70b", f"workload.batch={n}", "workload.context_tokens=0") for n in batches]
    assert [rate(plan) for plan in plans] == rates
    assert [f"{plan.prediction.ttft_s:.3g}" for plan in plans] == firsts


@pytest.mark.parametrize("figure", ["107 ms", "210 ms", "148 ms", "227 ms"])
def test_what_hybrid_predicts_of_the_command_before_is_what_is_solved(figure: str) -> None:
    before, said, _ = (ROOT / "docs/hybrid.md").read_text(encoding="utf-8").partition(f"predicted at {figure}")
    assert said
    command = re.findall(r"^    planner solve ((?:.*\\\n)*.*)", before, re.MULTILINE)[-1].replace("\\\n", " ")
    plan = solved(*(word for word in command.split() if not word.startswith("out=")))
    assert f"{1000 * plan.prediction.decode_s_per_token:.3g} ms" == figure


def test_the_demo_has_a_plan_that_streams() -> None:
    """By the Makefile's own command, for a machine without a GPU, with the geometry that the demo's checkpoint is made of."""
    command = re.search(r"planner solve (hardware=demo (?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    share = re.search(r"\$\$\(\(weights \* (\d+) / 100\)\)", command[1]) if command else None
    assert command and share
    weights = solved("hardware=cpu", "model=demo").model.weight_bytes
    line = command[1].replace("\\\n", " ").replace(share[0], str(weights * int(share[1]) // 100))
    line = line.replace("hardware=demo", "hardware=cpu").replace("model=hf model.checkpoint=$(CHECKPOINT)", "model=demo")
    plan = solved(*(word for word in line.split() if not word.startswith("out=")))
    assert layers_in(plan)[Tier.ssd].count > 0, "the demo shows streaming"
