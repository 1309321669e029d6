"""Steps of models with routed experts that CPU and link share, beside their bound and beside copying alone.

    python bench/hybrid_routed.py work=/dev/shm/penstock out=mixtral.json cases=mixtral      # one case a command
    python bench/hybrid_routed.py work=bench-work cases=mixtral,mixtral_traces,gpt_oss       # without a card: small geometries

`mixtral`, `mixtral_traces`: 16 layers at 13 GiB, routed at random and with favourites. `gpt_oss`: 20 layers of the 120b at 8 GiB. `layers`
and `vram` change them: a quarter of both is a case of a minute. Each case runs `moe.host=copied` and `split` in turns, in one process,
`pairs` times; a row is printed as soon as it is known. Experts' bytes differ by what is missed, so a bound takes them from the run
itself. Plans know the routers: from routings that an earlier run recorded, behind another prompt. Keys as in bench/hybrid.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.beside_rates import Rates, measure_rates  # noqa: E402
from bench.cases import Row  # noqa: E402
from bench.gpt_oss_synth import gpt_oss_config, write_gpt_oss  # noqa: E402
from bench.hybrid import BUSY_S, KEYS, SHORT_S, Hybrid  # noqa: E402
from bench.moe_routing import favour  # noqa: E402
from bench.probed import play  # noqa: E402
from bench.routed_worker import RoutedRun, measure_routed  # noqa: E402
from bench.worker import Trial, measure  # noqa: E402
from penstock.planner.contract.given.unit_spec import UnitKind  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402

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
SMALL_GPT_OSS = {"layers": "4", "hidden": "512", "experts": "16", "vocab": "4000"}
WAYS = ("copied", "split")
MOST_LEFT = 1.15
RECORDED, OTHER_SEED = 128, 99
"""Steps whose routings plans are made from, and the seed of their prompt, which no measured run has."""


class Routed(Hybrid):
    """The cases of routed experts."""

    def mixtral(self) -> Iterator[Row]:
        yield from self.routed("Mixtral, random routing", "mixtral", self.mixtral_files(), "13GiB")

    def mixtral_traces(self) -> Iterator[Row]:
        """The files of `mixtral`, whose routers are given favourites in place."""
        path = self.bench.work / "mixtral-traces"
        if not path.exists():
            os.rename(self.mixtral_files(), path)
            favour(path, 0.6, 2, seed=0)
        with self.dropped(path):
            yield from self.routed("Mixtral, routed like traces", "traces", path, "13GiB")

    def mixtral_files(self) -> Path:
        shape = ("model=mixtral8x7b", f"model.layers={self.layers or 16}") if self.card else SMALL_MIXTRAL
        return self.bench.checkpoint("mixtral", *shape)

    def gpt_oss_files(self) -> Path:
        path = self.bench.work / "gpt-oss"
        if not path.exists():
            write_gpt_oss(gpt_oss_config({"layers": self.layers or "20"} if self.card else SMALL_GPT_OSS), path)
        return path

    def gpt_oss(self) -> Iterator[Row]:
        path = self.gpt_oss_files()
        with self.dropped(path):
            yield from self.routed("gpt-oss", "gpt-oss", path, "8GiB")

    def routings(self, name: str, checkpoint: Path, vram: str) -> str:
        """The key that tells a plan what ``checkpoint``'s routers choose: recorded now, as a user would."""
        path = self.bench.work / f"{name}.routings.jsonl.gz"
        path.unlink(missing_ok=True)
        plan = self.solve(f"{name}-record", checkpoint, vram=vram, new=RECORDED)
        self.worker(measure, Trial(plan, checkpoint, RECORDED, OTHER_SEED, path))
        return f"moe.routings={path}"

    def routed(self, case: str, name: str, checkpoint: Path, usual_vram: str) -> Iterator[Row]:
        """Each way's mean step over max(bus, CPU, link, chain) of the bytes that its experts took; then one over the other."""
        vram = self.given.get("vram", usual_vram)
        known = self.routings(name, checkpoint, vram)
        ways = {way: f"moe.host={way if self.card else WAYS[0]}" for way in WAYS}
        plans = {way: self.solve(f"{name}-{way}", checkpoint, known, key, vram=vram) for way, key in ways.items()}
        spec = plans["split"].model.of_kind(UnitKind.expert)[0]
        host = plans["split"].hardware.host
        threads, seconds = host.threads_of(plans["split"].model.ffn_formats) if host else self.cores, BUSY_S if self.card else SHORT_S
        rates = self.worker(measure_rates, [spec.format.name], threads, seconds)
        runs: dict[str, list[RoutedRun]] = {way: [] for way in WAYS}
        for pair in range(self.pairs):
            for way in WAYS if pair % 2 == 0 else WAYS[::-1]:
                found = self.worker(measure_routed, Trial(plans[way], checkpoint, self.steps, pair))
                runs[way].append(found)
                yield self._over_bound(f"{case}, {way}", plans[way], found, rates, spec.format.name)
        copied, split = (fmean(run.step_s for run in runs[way]) for way in WAYS)
        what = f"means of {self.pairs} pairs; the plans say {self._said(plans['split']) / self._said(plans['copied']):.3f}"
        yield self._row(f"{case}, split over copied", what, plans["split"], split, copied, "<= 1")
        own = self.solve(f"{name}-own", checkpoint, known, vram=vram)
        experts = own.decisions.experts
        chosen = "" if experts is None else str(experts.host)
        yield self._row(
            f"{case}, regret", f"the plan chose {chosen}", own, {"split": split}.get(chosen, copied), min(copied, split), "<= 1.03"
        )

    def _over_bound(self, case: str, plan: Plan, run: RoutedRun, rates: Rates, format: str) -> Row:
        cpu_s, link_s = run.computed_gb / rates.cpu_gbps[format], run.copied_gb / rates.link_gbps if rates.link_gbps else 0.0
        parts = {
            "CPU": cpu_s,
            "link": link_s,
            "bus": (run.copied_gb + run.computed_gb) / rates.bus_gbps(format),
            "chain": run.resident_s + max(cpu_s, link_s),
        }
        slowest = max(parts, key=parts.__getitem__)
        said = ", ".join(f"{part} {s * 1e3:.1f}" for part, s in parts.items())
        moved = f"{run.computed_gb:.2f} GB on the CPU, {run.copied_gb:.2f} copied, {run.missed:.0%} missed"
        what = f"{moved}, host {run.host_us:.0f} us; {said} ms"
        return self._row(case, what, plan, run.step_s, parts[slowest], f"<= {MOST_LEFT}")

    def _row(self, case: str, what: str, plan: Plan, seconds: float, limit: float, target: str) -> Row:
        said = plan.prediction
        predicted = said.decode_s_per_token / seconds
        return Row(case, what, seconds, limit, "s", seconds / limit, target, predicted, said.vram_bytes / 1e9, said.dram_bytes / 1e9)

    @staticmethod
    def _said(plan: Plan) -> float:
        return plan.prediction.decode_s_per_token


if __name__ == "__main__":
    play(Routed, CASES, "mixtral", KEYS)
