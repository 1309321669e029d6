"""Steps of models with routed experts that CPU and link share, beside their bound and beside copying alone.

    python bench/hybrid_routed.py work=/dev/shm/penstock out=mixtral.json cases=mixtral      # one case a command
    python bench/hybrid_routed.py work=bench-work cases=mixtral,mixtral_traces,gpt_oss       # without a card: small geometries

`mixtral`, `mixtral_traces`: 16 layers at 13 GiB, routed at random and with favourites. `gpt_oss`: 20 layers of the 120b at 8 GiB. Each run
is a process of its own. Experts' bytes differ by what is missed, so a bound takes them from the run's report. Keys as in bench/hybrid.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import gpt_oss  # noqa: E402
from bench.cases import Row  # noqa: E402
from bench.hybrid import SHORT, Hybrid, play  # noqa: E402
from bench.link import limit_of, link_limit  # noqa: E402
from bench.moe import mean_s  # noqa: E402
from bench.moe_routing import favour  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402

CASES = ("mixtral", "mixtral_traces", "gpt_oss")
SMALL_MIXTRAL = (
    "model=mixtral8x7b",
    "model.layers=2",
    "model.hidden=512",
    "model.heads=8",
    "model.kv_heads=2",
    "model.head_dim=64",
    "model.expert_ffn=1792",
)


class Routed(Hybrid):
    """The cases of routed experts."""

    def mixtral(self) -> Iterator[Row]:
        checkpoint = self._mixtral()
        yield from self.routed("Mixtral, random routing", "mixtral", checkpoint, "13GiB")

    def mixtral_traces(self) -> Iterator[Row]:
        """The files of `mixtral`, whose routers are given favourites in place."""
        path = self.bench.work / "mixtral-traces"
        if not path.exists():
            os.rename(self._mixtral(), path)
            favour(path, 0.6, 2, seed=0)
        with self.dropped(path):
            yield from self.routed("Mixtral, routed like traces", "traces", path, "13GiB")

    def _mixtral(self) -> Path:
        return self.bench.checkpoint("mixtral", *(("model=mixtral8x7b", "model.layers=16") if self.card else SMALL_MIXTRAL))

    def gpt_oss(self) -> Iterator[Row]:
        given = {"layers": "20"} if self.card else {"layers": "4", "hidden": "512", "experts": "16", "vocab": "4000"}
        cases = gpt_oss.Cases(self.bench, given)
        yield from cases.dram() if self.card else cases.cpu()
        path = cases.checkpoint({})
        with self.dropped(path):
            yield from self.routed("gpt-oss", "gpt-oss", path, "8GiB")

    def routed(self, case: str, name: str, checkpoint: Path, vram: str) -> Iterator[Row]:
        """A run's mean step over max(bus, CPU, link, chain) of the bytes that its experts took."""
        budget = [f"hardware.vram_bytes={vram}"] if self.card else []
        work = {"prompt_tokens": SHORT, "new_tokens": 64 if self.card else 8, "context_tokens": 0, "requests": 2}
        asked = [*(f"workload.{key}={value}" for key, value in work.items()), *budget]
        sampled = ["temperature=1.0", "top_k=0"]
        copied_alone = self.bench.run(f"hybrid-{name}-copied", checkpoint, [*asked, "moe.host=copied"], sampled, limits=False)
        shared = ["moe.host=split"] if self.card else []
        report = self.bench.run(f"hybrid-{name}", checkpoint, [*asked, *shared], sampled)
        plan = read_plan(self.bench.work / f"hybrid-{name}.yaml")
        stages, steps = report["stages"]["decode"], len(report["step_s"])
        copied, computed = (stages.get(track, {}).get("bytes", 0) / steps / 1e9 for track in ("h2d", "cpu"))
        rates = self.rates(plan)
        format = next(iter(rates.cpu_gbps))
        link = link_limit(report, "h2d")[0] if copied else 1.0
        cpu_s = computed / rates.cpu_gbps[format]
        parts = {
            "CPU": cpu_s,
            "link": copied / link,
            "bus": (copied + computed) / rates.bus_gbps(format),
            "chain": limit_of(report, "decode_s") + max(cpu_s, copied / link),
        }
        slowest = max(parts, key=parts.__getitem__)
        seconds = mean_s(report)
        what = f"{computed:.2f} GB on the CPU, {copied:.2f} copied; bound by {slowest}"
        predicted = report["predicted"]["decode_s_per_token"] / seconds
        vram_gb, dram_gb = (report["measured"][f"{tier}_bytes"] / 1e9 for tier in ("vram", "dram"))
        limit = parts[slowest]
        yield Row(f"{case} over its bound", what, seconds, limit, "s", seconds / limit, "<= 1.15", predicted, vram_gb, dram_gb)
        alone = mean_s(copied_alone)
        yield Row(
            f"{case} over copying alone", "moe.host=copied", seconds, alone, "s", seconds / alone, "<= 1", predicted, vram_gb, dram_gb
        )


if __name__ == "__main__":
    play(Routed, CASES, "mixtral")
