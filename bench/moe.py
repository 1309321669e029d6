"""Mixture of experts: each case beside the bound of its own process, and what hits buy.

    python bench/moe.py work=/data/penstock out=moe.json [cases=none,hits,ahead,prefill,three,three_ahead,three_again,peer]
        [model=mixtral8x7b] [layers=16] [vram=16GiB] [share=0.6] [slots=2] [new_tokens=96]
    python bench/moe.py work=bench-work out=moe.json cases=cpu

The checkpoint has random weights and a router with a stated skew (bench/moe_routing.py): ``share`` of all uses go to ``slots`` experts a
layer. `none`: no expert is kept in VRAM, all pass through. `hits`: as many as fit; a row tells what the hits bought of what their bytes
say, where `none` ran before. `ahead`: the same with the coming layers' routers asked beforehand, which here are always right, since they
look at nothing that blocks change: what foresight could gain at most. `three`: DRAM has slots for half of the experts; `three_ahead`:
asked beforehand, too; `three_again`: `three` planned anew by what the runs before taught, since drives give less for minutes than for
the seconds of a probe or of loading. `peer`: accelerate under the same budget. `cpu`: SSD and DRAM, a small geometry. Hits are predicted
from routings that an earlier run of other prompts recorded; each case teaches the rates that the next one is planned with
(calibrate=true). Tokens are sampled, since the greedy ones of random weights repeat. Every run is a process of its own; means over
steps, which differ by what they miss.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import Bench, bound_row, limit_of, limits_of, link_limit, machine  # noqa: E402
from bench.moe_routing import favour  # noqa: E402
from bench.peers.run import Request, compare  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.experts.expert_slots import fewest_slots  # noqa: E402

PROMPT, RECORDED = 128, 128
"""Tokens of a request; new ones of a request whose routings are recorded."""
FORESIGHT = ("moe.policy=lookahead", "moe.prefetch=2")
KEYS = ("work", "out", "cases", "model", "layers", "vram", "share", "slots", "new_tokens")
SMALL = ("model.hidden=1024", "model.heads=16", "model.kv_heads=4", "model.head_dim=64", "model.expert_ffn=3584", "model.layers=8")
"""Mixtral's shape with experts of 22 MB: 1.5 GB in all, for a machine without a GPU."""


def favoured(bench: Bench, name: str, overrides: Sequence[str], share: float, slots: int) -> Path:
    """A random checkpoint whose routers have favourites, made once under the bench's directory."""
    fresh = not (bench.work / name).exists()
    checkpoint = bench.checkpoint(name, *overrides)
    if fresh:
        favour(checkpoint, share, slots, seed=0)
    return checkpoint


class Cases:
    """Runs over one checkpoint, made once under the bench's directory."""

    def __init__(self, bench: Bench, overrides: list[str], vram: str, share: float, slots: int, new_tokens: int):
        self._bench, self._vram, self._share, self._new = bench, vram, share, new_tokens
        self.checkpoint = favoured(bench, "moe", overrides, share, slots)
        self._spec = spec_from_checkpoint(self.checkpoint)
        self._experts = self._spec.experts
        self._reports: dict[str, dict] = {}

    def none(self) -> Iterator[Row]:
        passing = fewest_slots(self._experts)
        yield from self._decode("none", "no expert kept in VRAM", f"force.expert_vram_slots={passing}", *self._all_in_dram())

    def hits(self) -> Iterator[Row]:
        yield from self._decode("hits", "as many as fit", *self._all_in_dram())
        yield from self._bought("hits", "what hits buy")

    def ahead(self) -> Iterator[Row]:
        yield from self._decode("ahead", "routers asked beforehand", *self._all_in_dram(), *FORESIGHT)
        yield from self._bought("ahead", "what hits and foresight buy")

    def three(self) -> Iterator[Row]:
        yield from self._decode("three", "half of the experts in DRAM", self._half_in_dram())

    def three_ahead(self) -> Iterator[Row]:
        yield from self._decode("three_ahead", "half in DRAM, routers asked", self._half_in_dram(), *FORESIGHT)

    def three_again(self) -> Iterator[Row]:
        yield from self._decode("three_again", "half in DRAM, as runs taught", self._half_in_dram())

    def prefill(self) -> Iterator[Row]:
        """The median of four, and the first of a process."""
        report = self._run("prefill", 2048, 4, *self._all_in_dram(), requests=4)
        row = bound_row("prefill 2048", f"VRAM {self._vram}", report, "prefill_s", "<= 1.1")
        first_s = report["prefill_each_s"][0]
        yield row
        yield replace(row, case="  the first of a process", result=first_s, ratio=first_s / row.limit, target="", predicted=None)

    def peer(self) -> Iterator[Row]:
        """accelerate's decode step in units of ours; every token costs it all of the weights, so its tokens need no sampling."""
        ours = self._reports["hits"]
        out = self._bench.work / "moe-peer.json"
        keys = {"checkpoint": self.checkpoint, "vram_bytes": self._vram, "prompt_tokens": PROMPT, "new_tokens": 4, "out": out}
        asked = [f"{key}={value}" for key, value in (keys | {"work": self._bench.work / "peers", "limit_s": 420}).items()]
        (theirs,) = compare(Request.read([*asked, "systems=accelerate_dram"]))["rows"]
        if theirs["message"]:
            print(f"accelerate: {theirs['message']}", flush=True)
            return
        seconds = theirs["decode_s"]
        yield Row("accelerate's step over ours", "rest in DRAM", seconds, mean_s(ours), "s", seconds / mean_s(ours), ">= 8", None, 0, 0)

    def cpu(self) -> Iterator[Row]:
        for share in (2, 4):
            slots = self._experts.units * share // self._experts.count + fewest_slots(self._experts)
            case = f"SSD -> CPU, {share} of {self._experts.count} in DRAM"
            for name, what, more in (("", "1.5 GB", ()), ("_ahead", "1.5 GB, routers asked beforehand", FORESIGHT)):
                report = self._run(f"cpu{share}{name}", PROMPT, self._new, f"force.expert_dram_slots={slots}", *more)
                yield from self._rows(case, what, report, "<= 1.08")

    def _decode(self, name: str, what: str, *solve: str) -> Iterator[Row]:
        report = self._run(name, PROMPT, self._new, *solve)
        yield from self._rows(f"decode, {what}", f"VRAM {self._vram}", report, "<= 1.08")

    def _rows(self, case: str, what: str, report: dict, target: str) -> Iterator[Row]:
        tiers = {name: report["experts"][name] for name in ("vram", "dram") if report["experts"][name]}
        found = ", ".join(f"{name} {facts['hit_rate']:.1%}" for name, facts in tiers.items() if facts["hit_rate"] is not None)
        yield bound_row(case, f"{what}; hits: {found}", report, "decode_s_per_token", target, step=mean_s)
        yield self._step_by_step(report)
        yield one_after_the_other(report)
        policy_us, slots_us = (max(facts[f"{k}_s_per_visit"] for facts in tiers.values()) * 1e6 for k in ("policy", "decide"))
        decided = sum(facts["decide_s_per_visit"] for facts in tiers.values()) * len(self._experts.layers)
        what = f"the policy of a tier; with its slots {slots_us:.0f} us"
        yield Row("  deciding, a layer", what, policy_us, 20, "us", policy_us / 20, "<= 1", None, 0, 0)
        what = "share of the step, policies and slots"
        yield Row("  deciding, a step", what, decided, mean_s(report), "s", decided / mean_s(report), "< 0.01", None, 0, 0)

    def _step_by_step(self, report: dict) -> Row:
        """What an engine can do that knows of a token's experts when the token is there, and not before: each step takes as long as the
        slowest stage of that step."""
        steps = len(report["step_s"])
        rates = {stage: link_limit(report, stage)[0] for stage in ("ssd", "h2d") if any(report["step_bytes"].get(stage, ()))}
        links = [[nbytes / 1e9 / gbps for nbytes in report["step_bytes"][stage]] for stage, gbps in rates.items()]
        bounds = [max(times) for times in zip(*links, [limit_of(report, "decode_s")] * steps, strict=True)]
        idle = sum(not nbytes for nbytes in report["step_bytes"].get("ssd", ()))
        what = f"{idle} of {steps} steps read nothing" if "ssd" in rates else ""
        total = fmean(bounds)
        return Row("  of each step's slowest stage", what, mean_s(report), total, "s", mean_s(report) / total, "", None, 0, 0)

    def _bought(self, name: str, case: str) -> Iterator[Row]:
        """Seconds that ``name`` saved over those that its fewer bytes take at the link's rate; none where `none` did not run before."""
        none, hits = self._reports.get("none"), self._reports.get(name)
        if none is None or hits is None:
            return
        moved = [report["measured"]["h2d_bytes_per_token"] for report in (none, hits)]
        said = (moved[0] - moved[1]) / 1e9 / ((link_limit(none, "h2d")[0] + link_limit(hits, "h2d")[0]) / 2)
        saved = mean_s(none) - mean_s(hits)
        what = f"{1 - moved[1] / moved[0]:.1%} fewer bytes"
        yield Row(case, what, saved, said, "s", saved / said, ">= 0.92", None, 0, 0)

    def _half_in_dram(self) -> str:
        return f"force.expert_dram_slots={self._experts.units // 2}"

    def _all_in_dram(self) -> list[str]:
        return [f"force.expert_dram_slots={self._experts.units}"]

    def _run(self, name: str, prompt: int, new: int, *solve: str, requests: int = 2) -> dict:
        routed = [f"moe.routings={self._routings}", f"workload.requests={requests}", *solve]
        self._reports[name] = self._made(name, prompt, new, routed, ["calibrate=true"])
        return self._reports[name]

    @cached_property
    def _routings(self) -> Path:
        """Routings of prompts that are not measured, recorded once under the bench's directory."""
        path = self._bench.work / "moe-routings.jsonl.gz"
        if not path.exists():
            everything = [f"force.expert_dram_slots={self._experts.units}", "workload.requests=2"]
            self._made("record", PROMPT, RECORDED, everything, ["seed=1", f"moe.record={path}"])
        return path

    def _made(self, name: str, prompt: int, new: int, solve: list[str], run: list[str]) -> dict:
        work = [f"workload.prompt_tokens={prompt}", f"workload.new_tokens={new}", "workload.context_tokens=0"]
        budget = f"hardware.vram_bytes={self._vram}"
        return self._bench.run(f"moe-{name}", self.checkpoint, [budget, *work, *solve], ["temperature=1.0", "top_k=0", *run])


def one_after_the_other(report: dict, case: str = "  of their sum", target: str = "", expert_bytes: int = 0) -> Row:
    """What batch 1 allows without foresight: an expert is fetched when its router has spoken, and nothing else is done meanwhile; what
    comes from the SSD crosses the link as it arrives. The SSD's rate is that of a stream, with as many in flight as the plan has; what one
    expert at a time takes is told beside. With ``expert_bytes`` experts that steps fetched ahead are left out."""
    stages, steps, compute_s = report["stages"]["decode"], len(report["step_s"]), limit_of(report, "decode_s")
    tiers = {"ssd": report["experts"]["dram"], "h2d": report["experts"]["vram"]}
    ahead = {name: (tier["ahead"] - tier["prompt_ahead"]) * expert_bytes if tier else 0 for name, tier in tiers.items()}
    moved = {name: stages.get(name, {}).get("bytes") or 0 for name in tiers}
    gb = {name: max(0, nbytes - ahead[name]) / steps / 1e9 for name, nbytes in moved.items()}
    read, copied = gb["ssd"], gb["h2d"]
    read_s = read / link_limit(report, "ssd")[0] if read else 0.0
    copy_s = max(0.0, copied - read) / link_limit(report, "h2d")[0] if copied else 0.0
    total = compute_s + read_s + copy_s
    what = f"computing {compute_s:.4f}, SSD {read_s:.4f}, from DRAM {copy_s:.4f} s"
    if read and limits_of(report, "ssd_one_gbps"):
        what += f"; SSD with one expert in flight {read / limit_of(report, 'ssd_one_gbps'):.4f} s"
    return Row(case, what, mean_s(report), total, "s", mean_s(report) / total, target, None, 0, 0)


def mean_s(report: dict) -> float:
    """Of all decode steps, whose bytes the report counts."""
    return fmean(report["step_s"])


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
    except UserError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    where = machine(bench.probe())
    names = given.get("cases", "none,hits,ahead,prefill,three,three_ahead,three_again,peer").split(",")
    shape = [f"model={given.get('model', 'mixtral8x7b')}", *(SMALL if names == ["cpu"] else [f"model.layers={given.get('layers', '16')}"])]
    vram = given.get("vram", "0" if names == ["cpu"] else "16GiB")
    whole = {key: int(given.get(key, default)) for key, default in (("slots", "2"), ("new_tokens", "96"))}
    cases = Cases(bench, shape, vram, float(given.get("share", "0.6")), **whole)
    in_vram, half = (cases.none, cases.hits, cases.ahead, cases.prefill), (cases.three, cases.three_ahead, cases.three_again)
    known = {f.__name__: partial(bench.and_starts, f) for f in (*in_vram, *half, cases.peer, cases.cpu)}
    run_cases(chosen(",".join(names), known), where, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
