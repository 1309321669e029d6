"""What `planner solve` prints of a plan."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.given.hardware import SsdPoint
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.render.plan_text import print_plan
from penstock.planner.render.summary import summary
from penstock.planner.solver.notes.kept_notes import reuse_notes
from penstock.planner.solver.program import solve
from tests.planner.small import GB, MB, machine, model, work


def said_of(hardware, decoder, asked, force=None) -> str:
    decisions = solve(hardware, decoder, asked, force)
    plan = Plan(hardware, decoder, asked, decisions, predict(hardware, decoder, asked, decisions))
    out = io.StringIO()
    print_plan(replace(plan, notes=tuple(reuse_notes(plan, force or Force()))), Console(width=80, file=out, highlight=False))
    return " ".join(out.getvalue().split())


def test_reuse_is_told_with_where_pages_lie_and_from_when_restoring_pays() -> None:
    slow = machine(vram=0, ssd_read=(SsdPoint(2**22, 4, 0.001),))
    asked = work(prompt_tokens=2000, shared_prefix_tokens=1600, kept_tokens=16000)
    said = said_of(slow, replace(model(), kv_width=8192), asked, Force(page_tokens=64))
    assert "Of a prompt of 2000 tokens: restoring from DRAM pays from 64 tokens on, restoring from SSD never pays." in said
    assert "KV kept 250 in DRAM files" in said and "250 of 250 wanted pages" in said and "restoring 1600 tokens takes" in said
    assert "KV pages of 64 tokens" in said and "the size was forced" in said
    both = said_of(machine(), model(), asked, Force(page_tokens=64))
    assert "restoring from VRAM or DRAM or SSD pays from 64 tokens on." in both


@pytest.mark.parametrize(
    "change, words",
    [
        ({"shared_prefix_tokens": 10, "kept_tokens": 10}, "no KV is kept: workload.shared_prefix_tokens=10, kept_tokens=10 fill no page"),
        ({"prompt_tokens": 20, "shared_prefix_tokens": 16, "kept_tokens": 16}, "no head is restored sooner than it is computed"),
        ({}, "no KV is kept: restoring pays from 1024 tokens on, workload.shared_prefix_tokens=64 are computed as fast"),
        ({"shared_prefix_tokens": 1600, "kept_tokens": 10**9}, "of 15625000 pages are kept: no tier has room for more"),
    ],
)
def test_what_is_not_kept_is_explained(change, words) -> None:
    asked = work(**{"prompt_tokens": 2000, "shared_prefix_tokens": 64, "kept_tokens": 64} | change)
    small = Force(page_tokens=16 if asked.prompt_tokens < 64 else 64, vram_ffn_slots=0)
    assert words in said_of(machine(vram=GB), model(16), asked, small)


def test_nothing_is_said_of_reuse_without_a_set_to_keep() -> None:
    said = said_of(machine(), model(), work(shared_prefix_tokens=500))
    assert "estor" not in said and "kept: " not in said and "KV kept" not in said


def test_a_tier_with_every_item_is_drawn() -> None:
    asked = work(batch=8, prompt_tokens=4096, kv_spill=True, shared_prefix_tokens=2000, kept_tokens=20000)
    said = said_of(machine(vram=1300 * MB, dram=4 * GB), replace(model(12), kv_width=1024), asked)
    assert all(item in said for item in ("kv ring", "kv bounce", "kv reuse", "norms", "workspace", "embedding"))


@pytest.mark.parametrize("dram", [733_300_000, 48_333_000_000])
def test_what_a_tier_holds_is_told_whole_beside_its_bar(dram: int) -> None:
    said = said_of(machine(vram=0, dram=dram), model(), work())
    filled = re.search(r"DRAM [^ ]+ ([\d.]+)/([\d.]+) GB", said)
    assert filled and float(filled[1]) <= float(filled[2]), said
    assert len(filled[1].partition(".")[2]) == len(filled[2].partition(".")[2])


def test_seconds_of_a_pass_are_not_called_those_of_a_token() -> None:
    drafts = Speculation(Drafter.lookup, tokens=7, acceptance=0.5)
    hardware, decoder, asked = machine(), model(), work()
    plain = solve(hardware, decoder, asked)
    for decisions, words in ((plain, "a token bound by"), (replace(plain, speculation=drafts), "a pass {} tokens a sequence, bound by")):
        plan = Plan(hardware, decoder, asked, decisions, predict(hardware, decoder, asked, decisions))
        out = io.StringIO()
        print_plan(plan, Console(width=80, file=out, highlight=False))
        said = " ".join(out.getvalue().split())
        assert words.format(f"{plan.prediction.tokens_a_pass:.3g}") in said
        assert ("drafts by lookup" in said) == (decisions is not plain) and "by none" not in said


@pytest.mark.parametrize("columns", [80, 40])
def test_notes_are_printed_whole(columns: int) -> None:
    notes = ("WSM_PAIR_AHEAD=2 is ignored: " + "units are copied in forward order, " * 5 + "and so on", "kept in /a/path/" + "x" * 90)
    hardware, decoder, asked = machine(), model(), work()
    decisions = solve(hardware, decoder, asked)
    plan = Plan(hardware, decoder, asked, decisions, predict(hardware, decoder, asked, decisions), notes)
    out = io.StringIO()
    print_plan(plan, Console(width=columns, file=out, highlight=False))
    said = out.getvalue()
    told = said[said.index("note:") :].splitlines()
    assert all(len(line) <= columns or " " not in line.strip() for line in told)
    assert " ".join(" ".join(told).split()) == " ".join(f"note: {note}" for note in notes)


def decided_rows(hardware, decoder, asked, force=None) -> dict[str, str]:
    """Row -> what the table "Decided" says of it; no line of it is cut or longer than 80 columns."""
    decisions = solve(hardware, decoder, asked, force)
    plan = Plan(hardware, decoder, asked, decisions, predict(hardware, decoder, asked, decisions))
    out = io.StringIO()
    print_plan(plan, Console(width=80, file=out, highlight=False))
    lines = out.getvalue().split("Decided\n")[1].split("\n\n")[0].splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines), lines
    rows: dict[str, str] = {}
    row = ""
    for line in lines:
        row = line[:14].strip() or row
        rows[row] = " ".join(f"{rows.get(row, '')} {line[14:]}".split())
    return rows


def test_experts_are_told_apart_from_the_layers_around_them_with_their_bytes() -> None:
    rows = decided_rows(machine(vram=900 * MB, dram=GB), model(12, experts=64), work())
    assert rows["policy"].startswith("pinned layers without experts, ") and "12 in VRAM, 0 in DRAM, 0 from SSD" in rows["policy"]
    assert " in VRAM, " in rows["kept"] and "on the SSD alone" in rows["kept"] and "B on the SSD alone" in rows["bytes"]
    assert "DRAM cache" not in rows
    dense = decided_rows(machine(vram=GB), model(16), work())
    assert "layers in VRAM" in dense["policy"] and "DRAM cache" in dense and "kept" not in dense


def test_the_json_line_counts_experts_by_where_they_lie() -> None:
    hardware, decoder, asked = machine(vram=900 * MB, dram=GB), model(12, experts=64), work()
    decisions = solve(hardware, decoder, asked)
    told = summary(Plan(hardware, decoder, asked, decisions, predict(hardware, decoder, asked, decisions)), "plan.yaml")
    experts, nbytes = told["experts"], told["expert_bytes"]
    assert decoder.experts and sum(experts.values()) == decoder.experts.units and experts["ssd"] > 0
    assert nbytes == {tier: n * decoder.experts.expert_bytes for tier, n in experts.items()}
    assert sum(told["layers"].values()) == 12 and sum(told["layer_bytes"].values()) == sum(decoder.attn_bytes) + sum(decoder.ffn_bytes)


def test_a_first_token_is_not_said_to_come_before_its_prefill() -> None:
    hardware, decoder, asked = machine(vram=GB), model(16), work()
    decisions = solve(hardware, decoder, asked)
    found = predict(hardware, decoder, asked, decisions)
    out = io.StringIO()
    print_plan(Plan(hardware, decoder, asked, decisions, replace(found, ttft_s=2.23, prefill_s=2.26)), Console(width=80, file=out))
    assert re.search(r"first token 2.23 s +2.26 s behind another batch, bound by", out.getvalue())


def test_a_narrow_terminal_cuts_no_figure_off() -> None:
    hardware, decoder, asked = machine(), model(), work()
    decisions = solve(hardware, decoder, asked)
    plan = Plan(hardware, decoder, asked, decisions, predict(hardware, decoder, asked, decisions))

    def figures(columns: int) -> set[str]:
        out = io.StringIO()
        print_plan(plan, Console(width=columns, file=out, highlight=False))
        return {word for word in out.getvalue().split() if word[0].isdigit()}

    assert figures(80) <= figures(40)
