"""gpt-oss in MXFP4 beyond the card's memory: each case beside what its own process says that it must take.

    python bench/gpt_oss.py work=/data/penstock out=gpt-oss.json [cases=resident,dram,half,peer]
        [model=gpt-oss-120b] [layers=20] [vram=8GiB] [peer_vram=16GiB] [new_tokens=96] [hidden=N] [experts=N] [vocab=N]
    python bench/gpt_oss.py work=bench-work out=gpt-oss.json cases=cpu layers=8 hidden=512 experts=32 vocab=4000

Random weights route at random, which nobody can read ahead: an expert that is missed is fetched when its router has spoken. So the limit of
a step is the sum over layers of (missed bytes / rate of the link or the SSD + the layer's own time with its experts resident), all of them
measured by the process that ran. `dram`: all experts in DRAM. `half`: half of them, the rest on the SSD. `cpu`: the same without a card.
`resident`: as many layers as fit in VRAM with all their experts, which nothing is fetched for: what a layer costs the host. `peer`:
accelerate beside `dram`, all in DRAM. Without the `kernels` package transformers decodes MXFP4 to BF16 when it loads. A layer is then
6.4 GB, four times ours, and does not pass through the budget of the other cases; so accelerate has `peer_vram`. Hits are predicted from
routings that an earlier run of other prompts recorded. Tokens are sampled, since the greedy ones of random weights repeat; means over
steps, which differ by what they miss.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.gpt_oss_synth import KEYS, gpt_oss_config, write_gpt_oss  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import Bench, bound_row, limit_of, machine  # noqa: E402
from bench.moe import mean_s, one_after_the_other  # noqa: E402
from bench.peers.run import Request, compare  # noqa: E402
from bench.probed import profile_of  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.common.measures import parse_bytes  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.given.model import ModelSpec  # noqa: E402
from penstock.planner.contract.published.config_spec import spec_from_config  # noqa: E402

PROMPT, RECORDED = 128, 96
"""Tokens of a prompt; new ones of a request whose routings are recorded."""
PEER_S = 150
"""Longest life of accelerate's process."""
HOST_US = 300
"""What a MoE layer may take of the host."""


class Cases:
    """Runs over checkpoints that are made once under the bench's directory."""

    def __init__(self, bench: Bench, given: Mapping[str, str]):
        self._bench, self._given = bench, {"layers": "20", **given}
        self._vram, self._peer_vram = given.get("vram", "8GiB"), given.get("peer_vram", "16GiB")
        self._reports: dict[str, dict] = {}

    def resident(self) -> Iterator[Row]:
        """Layers for three quarters of the budget: the rest is for the head, the KV and the card's own."""
        config = gpt_oss_config({**self._given, "layers": "1"})
        one = spec_from_config(config, "one layer", "gpt-oss/config.json", dict)
        whole = sum(unit.stored_bytes * unit.count for unit in one.units if unit.layer is not None)
        room = 0.75 * (parse_bytes(self._vram) or 0) - one.embed_bytes - one.head_bytes
        layers = max(1, min(int(self._given["layers"]), int(room // whole)))
        report = self._run("resident", {"layers": str(layers)}, f"hardware.vram_bytes={self._vram}")
        yield self._limited(f"{layers} layers, all in VRAM", report, one)
        yield self._host(report, layers)

    def dram(self) -> Iterator[Row]:
        yield from self._streamed("dram", "all experts in DRAM", 1, f"hardware.vram_bytes={self._vram}")

    def half(self) -> Iterator[Row]:
        """Attention and LM head lie in VRAM. With few new tokens a plan may stream them instead, for more experts: prompts are faster, and
        no step is recorded."""
        dense = f"force.resident_attn={spec_from_checkpoint(self.checkpoint({})).layers}"
        yield from self._streamed("half", "half of the experts in DRAM", 2, f"hardware.vram_bytes={self._vram}", dense)

    def peer(self) -> Iterator[Row]:
        """accelerate's decode step in units of ours, and the most VRAM that it took."""
        name = next((name for name in ("dram", "cpu") if name in self._reports), None)
        ours = mean_s(self._reports[name] if name else self._run("beside-peer", {}, f"hardware.vram_bytes={self._vram}"))
        keys = {"checkpoint": self.checkpoint({}), "vram_bytes": self._peer_vram, "prompt_tokens": PROMPT, "new_tokens": 3}
        places = {"out": self._bench.work / "gpt-oss-peer.json", "work": self._bench.work}
        asked = [f"{key}={value}" for key, value in (keys | places | {"systems": "accelerate_dram", "limit_s": PEER_S}).items()]
        (theirs,) = compare(Request.read(asked))["rows"]
        if theirs["message"]:
            print(f"accelerate: {theirs['message']}", flush=True)
            return
        seconds, vram_gb, dram_gb = theirs["decode_s"], theirs["vram_bytes"] / 1e9, theirs["dram_bytes"] / 1e9
        what = f"all in DRAM, VRAM {self._peer_vram}, ours {self._vram}"
        yield Row("accelerate's step over ours", what, seconds, ours, "s", seconds / ours, "", None, vram_gb, dram_gb)

    def cpu(self) -> Iterator[Row]:
        yield from self._streamed("cpu", "half of the experts in DRAM", 2, "hardware.vram_bytes=0")

    def _streamed(self, name: str, what: str, share: int, *solve: str) -> Iterator[Row]:
        spec = spec_from_checkpoint(self.checkpoint({}))
        experts = spec.experts
        assert experts is not None
        known = f"moe.routings={self._routings(experts.units, *solve)}"
        report = self._reports[name] = self._run(name, {}, known, f"force.expert_dram_slots={experts.units // share}", *solve)
        yield self._limited(what, report, spec)
        yield bound_row("  of the slowest stage", what, report, "decode_s_per_token", "", step=mean_s)
        if report["experts"]["vram"]:
            yield self._host(report, len(experts.layers))

    def _routings(self, units: int, *solve: str) -> Path:
        """Of prompts that are not measured, recorded once under the bench's directory."""
        path = self.checkpoint({}).with_suffix(".routings.jsonl.gz")
        if not path.exists():
            work = [f"workload.{key}={value}" for key, value in {"prompt_tokens": PROMPT, "new_tokens": RECORDED, "requests": 2}.items()]
            everything = [*work, "workload.context_tokens=0", f"force.expert_dram_slots={units}", *solve]
            sampled = ["temperature=1.0", "top_k=0", "seed=1", f"moe.record={path}"]
            self._bench.run("gpt-oss-record", self.checkpoint({}), everything, sampled, limits=False)
        return path

    def _limited(self, what: str, report: dict, spec: ModelSpec) -> Row:
        tiers = {name: report["experts"][name] for name in ("vram", "dram") if report["experts"][name]}
        found = [f"{name} {facts['hit_rate'] or 0.0:.1%}, {facts['ahead']} ahead" for name, facts in tiers.items()]
        print(f"{what}; hits: {'; '.join(found)}", flush=True)
        assert spec.experts is not None
        return one_after_the_other(report, f"decode, {what}", "<= 1.1", spec.experts.expert_bytes)

    def _host(self, report: dict, layers: int) -> Row:
        """Processor time of the thread that issues, from a layer's routing to its output; and of a whole layer with its attention, when
        nothing moves."""
        spent = report["experts"]["host_s_per_visit"] * 1e6
        whole = limit_of(report, "decode_s") / layers * 1e6
        what = f"a layer with its attention, nothing moved: {whole:.0f} us"
        return Row("  host, a MoE layer", what, spent, HOST_US, "us", spent / HOST_US, "<= 1", None, 0, 0)

    def _run(self, name: str, changed: Mapping[str, str], *solve: str) -> dict:
        new = self._given.get("new_tokens", "96")
        work = {"prompt_tokens": PROMPT, "new_tokens": new, "context_tokens": 0, "requests": 2}
        asked = [f"workload.{key}={value}" for key, value in work.items()]
        return self._bench.run(f"gpt-oss-{name}", self.checkpoint(changed), [*asked, *solve], ["temperature=1.0", "top_k=0"])

    def checkpoint(self, changed: Mapping[str, str]) -> Path:
        given = {key: value for key, value in {**self._given, **changed}.items() if key in KEYS}
        path = self._bench.work / "-".join(["gpt-oss", *(f"{key}{value}" for key, value in sorted(given.items()))])
        if not path.exists():
            write_gpt_oss(gpt_oss_config(given), path)
            os.sync()
        return path


def main() -> None:
    try:
        given = given_of(sys.argv[1:], ("work", "out", "cases", "vram", "peer_vram", "new_tokens", "quick", *KEYS))
    except UserError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    where = machine(profile_of(bench, given.get("quick", "true")))
    cases = Cases(bench, given)
    known: dict[str, Callable[[], Iterator[Row]]] = {f.__name__: f for f in (cases.resident, cases.dram, cases.half, cases.cpu, cases.peer)}
    run_cases(chosen(given.get("cases", "resident,dram,half"), known), where, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
