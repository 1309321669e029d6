"""Several cards beside one: what their links carry together, and what of it reaches a step.

    python bench/ranks.py work=/dev/shm/penstock out=ranks.json counts=1,2                    # 24 layers of 70B geometry, 41 GB
    python bench/ranks.py work=/dev/shm/penstock out=short.json counts=1,2 layers=8 steps=12  # two minutes in all
    python bench/ranks.py work=/dev/shm/penstock out=parts.json counts=1,2 layers=24 vram=12GiB prompt=32768 steps=4   # computing binds
    python bench/ranks.py work=/dev/shm/penstock out=batch.json counts=1,2 vram=12GiB prompt=512 batch=32   # 32 sequences
    python bench/ranks.py work=/dev/shm/penstock out=moe.json model=mixtral8x7b layers=16 vram=8GiB share=0.6 slots=2   # routed experts
    python bench/ranks.py work=/dev/shm/penstock out=kept.json counts=2 kept=true     # and the same prompt once more, restored
    python bench/ranks.py work=/dev/shm/penstock out=words.json counts=2 model=llama8b layers=32 vram= words=1.5e-5  # recorded with hops
    python bench/ranks.py work=/dev/shm/penstock out=beside.json counts=2 layers=8 steps=12 cpu=true   # and the CPU computes
    python bench/ranks.py work=/dev/shm/penstock out=8b.json counts=1,2,4 model=llama8b layers=32 vram= rounds=4 parts=512,256  # in VRAM
    python bench/ranks.py work=/dev/shm/penstock out=8b.json counts=1,2,4 model=llama8b layers=32 vram= rounds=4 launched=true
    python bench/ranks.py work=/dev/shm/penstock out=ring.json counts=1,2 layers=24 ring=4,1  # and one slot of four for FFN units
    python bench/ranks.py work=/dev/shm/penstock out=kv.json counts=1,2 model=llama8b layers=32 prompt=8192 batch=16 spill=true  # and KV
    python bench/ranks.py work=bench-work out=cpu.json counts=1,2 model=demo layers=8 vram= hardware=cpu     # without cards: it runs

Makes one checkpoint of random weights and probes the machine once for all commands over `work`, all cards' links and the CPU's products
included: a minute and a half. Then it solves and runs one plan for each of `counts` ranks (`runtime run limits=true`). The ranks of a
run measure their links when it is over, each alone and all at once, and a hop of one token's hidden state beside them. Rows:

    decode: bytes that all links carry for a token / seconds, over what the links carry at once
    prefill: the same of a prompt of `prompt` tokens
    x one: seconds of a step by the first of `counts` over seconds by this one
    hops: layers * the median hop, of a step
    launching: host seconds of a layer's part of a prompt on rank 0, over the probe's `layer_launch_s`
    kept: the prefill of a prompt whose pages every rank has on its drive, over the same prompt computed

With `cpu` the program may leave units and experts to the CPU, else it leaves none, so that bytes are those of the links. Then besides:

    beside the CPU: seconds of a step, over the longest of what links, the CPU and the bus take for their bytes

Steps are recorded with their hops, with `cpu` as well with their units of the CPU, where the probe knows what such a hop takes. `words` are
other seconds of it; words=0 has steps launched.

With `rounds` a prompt is run so many times, and the first time is set beside the others. With `parts` the same is done once more for each
of these tokens of a part, as nobody solved for: what parts of a prompt cost the host.

With `launched`, each plan that has a prompt's layers recorded around attention is solved and run once more, with prompts launched kernel
by kernel. Both beside the first of `counts` are rows.

With `ring` each count is solved and run once more by a ring of so many slots, and of these for FFN units. Its steps and prompts are set
beside those of the plan as it is solved.

With `spill` the KV of some layers may lie in DRAM or on the drive, so that links bring it beside the weights.

With `share` the checkpoint's routers have favourites, as bench/moe.py makes them: so much of all uses goes to `slots` experts a layer.
Routings of another prompt are recorded by one rank first, and all plans are made for them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.keys import given_of, told_keys  # noqa: E402
from bench.link import Bench, machine  # noqa: E402
from bench.moe import favoured  # noqa: E402
from bench.probed import profile_of  # noqa: E402
from penstock.planner.contract.ranks.rank_parts import parts_of  # noqa: E402

KEYS = (
    "work",
    "out",
    "counts",
    "model",
    "layers",
    "vram",
    "prompt",
    "steps",
    "hardware",
    "share",
    "slots",
    "kept",
    "words",
    "cpu",
    "batch",
    "rounds",
    "parts",
    "launched",
    "ring",
    "spill",
)
REACHED = {"decode": {1: ">= 0.95", 2: ">= 0.95", 4: ">= 0.92"}, "prefill": {count: ">= 0.92" for count in (1, 2, 4)}}
FASTER = {"decode": {2: ">= 1.85", 4: ">= 2.9"}, "prefill": {2: ">= 1.8", 4: ">= 2.85"}}
FASTER_BATCHED = dict.fromkeys(FASTER, {2: ">= 1.8", 4: ">= 2.85"})
FASTER_ROUTED = dict.fromkeys(FASTER, {4: ">= 2.5"})
FASTER_COMPUTED = {2: ">= 1.7", 4: ">= 3.0"}
"""Of a prompt whose computing binds: it goes round in parts. Steps over weights in VRAM have no target."""
HOPS, HOP_US = "<= 0.015", 90.0
BESIDE = "<= 1.1"
SAMPLED = ("temperature=1.0", "top_k=0")
"""Greedy tokens of random weights repeat, and so would their routings."""


class Ranks:
    """Runs of one checkpoint by plans of several counts; ``given`` are the command's keys."""

    def __init__(self, bench: Bench, given: Mapping[str, str], profile: Mapping[str, Any]):
        self.bench, self.given, self.profile = bench, given, profile
        self.layers = int(given.get("layers", "24"))
        self.first: dict[str, float] = {}
        """Seconds by the first of the counts."""

    def checkpoint(self) -> Path:
        model, share = self.given.get("model", "llama70b"), self.given.get("share")
        words = f"{model}-{self.layers}", f"model={model}", f"model.layers={self.layers}"
        if share is None:
            return self.bench.checkpoint(*words)
        return favoured(self.bench, f"{words[0]}-{share}", words[1:], float(share), int(self.given.get("slots", "2")))

    @cached_property
    def routings(self) -> Path:
        """Of a prompt that is not measured."""
        path = self.bench.work / "ranks-routings.jsonl.gz"
        if not path.exists():
            self.made("record", 1, [], ["seed=1", f"moe.record={path}", *SAMPLED])
        return path

    def run(self, count: int) -> dict[str, Any]:
        if "share" not in self.given:
            return self.made(f"ranks-{count}", count, [], [])
        return self.made(f"ranks-{count}", count, [f"moe.routings={self.routings}"], SAMPLED)

    def kept(self, count: int) -> Iterator[Row]:
        """The prompt twice, each by processes of its own."""
        keep = [f"kv.dir={self.bench.work / 'kept'}"]
        cold, warm = (self.made(f"kept-{count}-{name}", count, [], keep) for name in ("cold", "warm"))
        restored = sum(warm["kv_reuse"]["restored_tokens"].values())
        again_s, first_s = (report["measured"]["prefill_s"] for report in (warm, cold))
        what = f"kept: {restored} tokens restored, {warm['kv_reuse']['computed_tokens']} computed"
        yield Row(f"{count} ranks", what, again_s, first_s, "s", again_s / first_s, "", None, 0, 0)

    def made(self, name: str, count: int, more: Sequence[str], run: Sequence[str]) -> dict[str, Any]:
        vram, hardware = self.given.get("vram", "6GiB"), self.given.get("hardware", "local")
        steps, prompt = self.given.get("steps", "24"), self.given.get("prompt", "2048")
        batch = self.given.get("batch", "1")
        work = {"prompt_tokens": prompt, "new_tokens": steps, "context_tokens": 0, "batch": batch, "requests": batch}
        spill = self.given.get("spill", "false") == "true"
        work |= {"kv_spill": "true"} if spill else {}
        solve = [f"hardware={hardware}", f"ranks={count}", *(f"workload.{key}={value}" for key, value in work.items())]
        vram_bytes = [f"hardware.vram_bytes={vram}"] if vram else []
        words = [f"hardware.links.word_hop_s={self.given['words']}"] if "words" in self.given and count > 1 else []
        routed = ["moe.host=copied"] if "share" in self.given and count == 1 else []
        links_alone = [] if "cpu" in self.given else ["force.host_ffn=0", *routed]
        links_alone += ["force.host_attention=0"] if spill and "cpu" not in self.given else []
        rounds = [f"rounds={self.given['rounds']}"] if "rounds" in self.given else []
        return self.bench.run(name, self.checkpoint(), [*solve, *vram_bytes, *words, *links_alone, *more], [*run, *rounds])

    def beside(self, count: int, report: Mapping[str, Any]) -> Iterator[Row]:
        """A step of which the CPU computes units; nothing where it computes none, or where its rates are not those of this machine."""
        steps, host = int(self.given.get("steps", "24")) - 1, self.profile.get("host")
        stages = [each["stages"]["decode"] for each in report["ranks"]] if report["ranks"] else [report["stages"]["decode"]]
        copied, computed = (sum(one.get(stage, {"bytes": 0})["bytes"] for one in stages) / steps for stage in ("h2d", "cpu"))
        if not computed or not host:
            return
        step_s, links = _step_s(report, False), sum(_links(report))
        rates = links, host["products"]["BF16"][0][1], self.profile["dram"]["bus_gbps"]
        bound_s = max(nbytes / gbps / 1e9 for nbytes, gbps in zip((copied, computed, copied + computed), rates, strict=True) if gbps)
        what = f"beside the CPU: {computed / 1e9:.3g} of {(copied + computed) / 1e9:.3g} GB a token"
        predicted = report["predicted"]["decode_s_per_token"] / step_s
        taken = report["measured"]["vram_bytes"] / 1e9, report["measured"]["dram_bytes"] / 1e9
        yield Row(f"{count} ranks", what, step_s, bound_s, "s", step_s / bound_s, BESIDE, predicted, *taken)

    def rows(self, count: int) -> Iterator[Row]:
        report = self.run(count)
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report["start_s"].items())
        print(f"  {count} ranks, until the first token: {phases}", flush=True)
        faster = FASTER_ROUTED if "share" in self.given else FASTER_BATCHED if "batch" in self.given else FASTER
        links, made = _links(report), report["measured"]
        (self.bench.work / f"ranks-{count}.links.json").write_text(json.dumps(report["limits"]))
        taken = made["vram_bytes"] / 1e9, made["dram_bytes"] / 1e9
        case, ranks = f"{count} ranks", report["ranks"] or []
        copied = sum(each["stages"]["prefill"].get("h2d", {"bytes": 0})["bytes"] for each in ranks) if ranks else _prefilled(report)
        prefill = copied / len(report["prefill_each_s"])
        for what, nbytes, seconds, key in (
            ("decode", made["h2d_bytes_per_token"], _step_s(report, "share" in self.given), "decode_s_per_token"),
            ("prefill", prefill, made["prefill_s"], "prefill_s"),
        ):
            gbps = nbytes / seconds / 1e9
            computed = report["predicted"][f"bottleneck_{what}"] == "card"
            by_links = links and "share" not in self.given and not computed and not ("cpu" in self.given and what == "decode")
            target = REACHED[what].get(count, "") if by_links else ""
            limit = sum(links) or gbps or 1.0
            yield Row(
                case,
                f"{what}: {seconds:.4f} s",
                gbps,
                limit,
                "GB/s",
                gbps / limit,
                target,
                report["predicted"][key] / seconds,
                *taken,
                _spread(report),
            )
            reached = FASTER_COMPUTED if computed and what == "prefill" else faster[what] if links and "cpu" not in self.given else {}
            first = self.first.setdefault(what, seconds)
            if first != seconds:
                yield Row(case, f"{what} x one", first, seconds, "s", first / seconds, reached.get(count, ""), None, *taken)
        if ranks:
            hop, step = report["limits"]["links"]["hop_s"], made["decode_s_per_token"]
            yield Row(case, "hops of a step", self.layers * hop, step, "s", self.layers * hop / step, HOPS if links else "", None, *taken)
            yield Row(case, "one hop, links busy", hop * 1e6, HOP_US, "us", hop * 1e6 / HOP_US, "<= 1.0", None, *taken)
        yield from self.launching(case, report)
        first, *later = report["prefill_each_s"]
        if later:
            yield Row(case, "the first prefill over later ones", first, median(later), "s", first / median(later), "<= 1.05", None, *taken)
        if "cpu" in self.given:
            yield from self.beside(count, report)
        if "kept" in self.given:
            yield from self.kept(count)
        yield from self.recorded(count, report)
        if "ring" in self.given:
            yield from self.in_ring(count, report)
        if ranks:
            for tokens in filter(None, self.given.get("parts", "").split(",")):
                yield from self.in_parts(count, tokens, made["prefill_s"])

    def recorded(self, count: int, report: Mapping[str, Any]) -> Iterator[Row]:
        """A prompt whose layers were recorded, over the same prompt launched kernel by kernel. That one's is predicted/measured. Nothing
        where the plan has none recorded."""
        found = (report["ranks"] or [report])[0]["prompts"]
        if "launched" not in self.given or found is None:
            return
        if found["refused"] is not None:
            raise SystemExit(f"{count} ranks: prompts were not recorded: {found['refused']}")
        launched = self.made(f"launched-{count}", count, ["force.recorded_prompt_tokens=0"], [])
        took_s, seconds = (median(one["prefill_each_s"][1:] or one["prefill_each_s"]) for one in (report, launched))
        made, predicted_s = launched["measured"], launched["predicted"]["prefill_s"]
        what, taken = f"prefill recorded for {found['tokens']} tokens, over launched", (made["vram_bytes"] / 1e9, made["dram_bytes"] / 1e9)
        yield Row(f"{count} ranks", what, took_s, seconds, "s", took_s / seconds, "", predicted_s / seconds, *taken)
        first = self.first["prefill"]
        yield Row(f"{count} ranks", "prefill launched, x one", first, seconds, "s", first / seconds, "", None, *taken)
        yield from self.launching(f"{count} ranks, launched", launched)

    def in_ring(self, count: int, solved: Mapping[str, Any]) -> Iterator[Row]:
        """The forced ring, over the ring that the program chose."""
        slots, ffn = self.given["ring"].split(",")
        report = self.made(f"ring-{count}", count, [f"force.vram_slots={slots}", f"force.vram_ffn_slots={ffn}"], [])
        taken = report["measured"]["vram_bytes"] / 1e9, report["measured"]["dram_bytes"] / 1e9
        for what, key in (("decode", "decode_s_per_token"), ("prefill", "prefill_s")):
            seconds, before_s = (one["measured"][key] for one in (report, solved))
            ring = f"{what}: {slots} slots, {ffn} of FFN, over the ring that was solved"
            yield Row(f"{count} ranks", ring, seconds, before_s, "s", seconds / before_s, "", report["predicted"][key] / seconds, *taken)

    def in_parts(self, count: int, tokens: str, solved_s: float) -> Iterator[Row]:
        """The prompt in parts of so many ``tokens``, over the parts that the program chose."""
        report = self.made(f"parts-{count}-{tokens}", count, [f"force.prefill_part_tokens={tokens}"], [])
        made, predicted = report["measured"], report["predicted"]["prefill_s"]
        taken = made["vram_bytes"] / 1e9, made["dram_bytes"] / 1e9
        seconds = median(report["prefill_each_s"][1:] or report["prefill_each_s"])
        what = f"prefill in parts of {tokens}, over those that were solved"
        yield Row(f"{count} ranks", what, seconds, solved_s, "s", seconds / solved_s, "", predicted / seconds, *taken)
        yield from self.launching(f"{count} ranks", report)

    def launching(self, case: str, report: Mapping[str, Any]) -> Iterator[Row]:
        """What a layer's part of a prompt takes the host of rank 0, over the probe's layer. Nothing without a card, or where a prompt waits
        for what streams: that is no launching."""
        one = (report["ranks"] or [report])[0]
        if one["launching"] is None or one["launching"]["prompts"] is None or report["predicted"]["bottleneck_prefill"] != "card":
            return
        parts = parts_of(int(self.given.get("prompt", "2048")), one.get("part_tokens", 0))
        each_s = one["launching"]["prompts"]["median_s"] / one.get("layers", self.layers) / parts
        probed_s = self.profile["layer_launch_s"]
        what = f"launching a layer's part, {parts} of a pass"
        yield Row(case, what, each_s * 1e6, probed_s * 1e6, "us", each_s / probed_s, "", None, 0, 0)


def _step_s(report: Mapping[str, Any], routed: bool) -> float:
    """Of a step. Those of routed experts differ by what they miss, so their mean counts."""
    return fmean(report["step_s"]) if routed else report["measured"]["decode_s_per_token"]


def _links(report: Mapping[str, Any]) -> list[float]:
    """GB/s of each rank's link, measured while all copied; none where nothing streams."""
    limits = report["limits"]
    found = limits["links"]["together_gbps"] if "links" in limits else [limits["after"].get("h2d_gbps")]
    return [gbps for gbps in found if gbps]


def _spread(report: Mapping[str, Any]) -> str:
    limits = report["limits"]
    return "" if "links" not in limits else f"alone {' '.join(f'{x or 0:.1f}' for x in limits['links']['alone_gbps'])}"


def _prefilled(report: Mapping[str, Any]) -> int:
    """Bytes that the link carried in the prefills of a run of one rank."""
    return int(report["stages"]["prefill"].get("h2d", {"bytes": 0})["bytes"])


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    played = given.get("hardware", "local") != "local"
    profile = {"gpu": None, "cpu": {"cores": 0}, "dram_bytes": 0} if played else profile_of(bench, "false")
    ranks = Ranks(bench, given, profile)
    counts = sorted(given.get("counts", "1,2").split(","), key=int)
    cases = {f"{count} ranks": partial(ranks.rows, int(count)) for count in counts}
    run_cases(cases, machine(profile) | {"keys": told_keys(given)}, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
