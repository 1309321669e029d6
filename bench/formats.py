"""Checkpoints in 4, 8 and 12 bits a weight: what streaming, residents, prompts and starts take, beside BF16 and beside each link's limit.

    python bench/formats.py work=/data/penstock out=formats.json cases=int4,fp8,q4_k,lossless,resident,lossless_resident,prefill,start
    python bench/formats.py work=/data/penstock out=formats-ssd.json cases=lossless_ssd
    python bench/formats.py work=bench-work out=formats-cpu.json cases=cpu [model=demo] [layers=N]

Coded checkpoints are random (bench/coded_synth.py), of `model`, Llama-3.1-8B's geometry unless it is named; the lossless one is packed from
the BF16 one. All are made under `work` when a case needs them and stay there. Every run is a process of its own, and has its own limits.

`int4`, `fp8`, `q4_k`: VRAM 3, 6, 3 GiB, the rest in DRAM: stored bytes a token over seconds beside the link. `lossless`: beside BF16 with
VRAM 6 GiB, logits compared bit by bit. `lossless_ssd`: both packed, from the drive, in turns, `pairs` of them, within `vram` GiB and
`dram`; `layers` of the same size are written sooner. `resident`: all weights in VRAM, kernels by the profiler (bench/step_kernels.py).
`lossless_resident`: decoded and stored. `prefill`: 2048 tokens in every format, VRAM 6 GiB, the median of five prompts behind one that
warms up. `start`: warm, beside BF16, with its parts; what is predicted there is loading.
`cpu`: two tiers, 40 % in DRAM. Without a GPU each case runs on SSD and DRAM, so that all can be tried anywhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.coded_synth import FORMATS, config_of, write_coded  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import Bench, limit_of, link_limit, machine, step_s, stream_row  # noqa: E402
from bench.probed import profile_of  # noqa: E402
from bench.worker import Trial, Worker, measure  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402

KEYS = ("work", "out", "cases", "model", "layers", "new_tokens", "formats", "pairs", "vram", "dram")
ENOUGH = 24
"""GiB of VRAM in which every format of 8B is resident with its caches."""
HANG_S = 600.0


@dataclass(frozen=True)
class Formats:
    """The cases over one geometry. ``card``: whether the machine has one; without it 40 % of the layers stay in DRAM instead."""

    bench: Bench
    card: bool
    model: str
    layers: int | None
    new_tokens: int
    formats: tuple[str, ...]
    pairs: int
    vram: float
    """GiB, and of DRAM below: of what comes from the SSD to a card."""
    dram: str

    # ---- checkpoints

    def checkpoint(self, form: str) -> Path:
        """Of ``form``, made once."""
        path = self.bench.work / f"{self.model}-{form}"
        if path.exists():
            return path
        if form == "bf16":
            more = [] if self.layers is None else [f"model.layers={self.layers}"]
            return self.bench.checkpoint(path.name, f"model={self.model}", *more)
        if form in ("lossless", "packed"):
            how = ["format=lossless"] if form == "lossless" else []
            self.bench.call("runtime", "pack", f"checkpoint={self.checkpoint('bf16')}", f"out={path}", *how)
            return path
        write_coded(form, config_of(self.model, self.layers), path)
        return path

    def run(self, name: str, form: str, vram_gib: float, prompt: int, new: int, *more: str, requests: int = 3, limits: bool = True) -> dict:
        """The report of a run of ``form`` within ``vram_gib`` of VRAM, or 40 % of its bytes in DRAM."""
        checkpoint = self.checkpoint(form)
        work = [
            f"workload.prompt_tokens={prompt}",
            f"workload.new_tokens={new}",
            f"workload.requests={requests}",
            "workload.context_tokens=0",
        ]
        return self.bench.run(name, checkpoint, [*self.budget(checkpoint, vram_gib), *work, *more], [], limits=limits)

    def budget(self, checkpoint: Path, vram_gib: float) -> list[str]:
        if self.card:
            return [f"hardware.vram_bytes={vram_gib}GiB"]
        if vram_gib >= ENOUGH:
            return []
        kept = spec_from_checkpoint(checkpoint).layers * 4 // 10
        return [f"force.cap_layers={kept}", f"force.hwm_layers={kept + 3}"]

    @property
    def stage(self) -> str:
        return "h2d" if self.card else "ssd"

    def where(self, gib: float) -> str:
        return f"{self.model}, VRAM {gib} GiB" if self.card else f"{self.model}, DRAM 40 %"

    # ---- cases

    def stream(self, form: str, gib: float) -> Iterator[Row]:
        """Stored bytes a token over seconds, and how well that was predicted."""
        report = self.run(form, form, gib, 512, self.new_tokens)
        row = stream_row(f"{form} decode", self.where(gib), report, self.stage, ">= 0.96" if self.card else ">= 0.9")
        yield row
        assert row.predicted is not None
        yield self._prediction(row, "prediction", row.predicted, "<= 1.053")
        if not self.card:
            yield self._prediction(row, "prediction at the drive's rate beside the run", at_this_drive(report), "<= 1.1")

    def int4(self) -> Iterator[Row]:
        yield from self.stream("int4", 3)

    def fp8(self) -> Iterator[Row]:
        yield from self.stream("fp8", 6)

    def q4_k(self) -> Iterator[Row]:
        yield from self.stream("q4_k", 3)

    def cpu(self) -> Iterator[Row]:
        yield from self.stream("int4", 3)
        yield from self.stream("lossless", 6)

    def lossless(self) -> Iterator[Row]:
        yield from self._beside("lossless", "bf16", "lossless", 6)

    def lossless_ssd(self) -> Iterator[Row]:
        """Both packed; DRAM so small that the drive binds. In turns in one process, since a shared drive drifts: the median of
        ``pairs``."""
        case, forms = "lossless, SSD", ("packed", "lossless")
        more = [f"hardware.dram_bytes={self.dram}"] if self.card else []
        plans = [self.plan(f"lossless-ssd-{form}", form, self.vram, *more) for form in forms]
        ratios = []
        with closing(Worker(HANG_S)) as worker:
            for pair in range(self.pairs + 1):
                seconds = [0.0, 0.0]
                for k in (0, 1) if pair % 2 else (1, 0):
                    seconds[k] = worker(measure, Trial(plans[k], self.checkpoint(forms[k]), self.new_tokens, pair)).step_s
                print(f"  pair {pair}: BF16 {seconds[0]:.4f} s, lossless {seconds[1]:.4f} s, {seconds[0] / seconds[1]:.3f} x", flush=True)
                ratios += [seconds[0] / seconds[1]] if pair else []  # the first warms up
        found, said = median(ratios), plans[1].prediction
        row = Row(
            f"{case} beside BF16",
            self.where(self.vram),
            found,
            1.0,
            "x",
            found,
            ">= 1.3",
            None,
            said.vram_bytes / 1e9,
            said.dram_bytes / 1e9,
        )
        yield replace(row, what=f"{row.what}, {self.pairs} pairs", spread=f"{min(ratios):.2f}-{max(ratios):.2f}")
        digests = [self.opened(f"lossless-ssd-{form}-logits", form, self.vram, *more)["digest"] for form in forms]
        same = float(digests[0] == digests[1])
        yield replace(row, case=f"{case}, logits bit-identical", result=same, unit="", ratio=same, target="= 1")

    def _beside(self, case: str, plain: str, coded: str, gib: float, *more: str) -> Iterator[Row]:
        """Tokens a second of ``coded`` over those of ``plain`` within the same budgets; whether the logits are the same bits."""
        budget = self.budget(self.checkpoint(plain), gib) if not self.card else []
        reports = [
            self.run(f"{case}-{form}".replace(", ", "-"), form, gib, 512, self.new_tokens, *budget, *more) for form in (plain, coded)
        ]
        rates = [1 / step_s(report) for report in reports]
        yield self._row(f"{case} beside BF16", gib, rates[1], rates[0], "tok/s", ">= 1.3", reports[1])
        digests = [self.opened(f"{case}-{form}-logits".replace(", ", "-"), form, gib, *more)["digest"] for form in (plain, coded)]
        same = float(digests[0] == digests[1])
        yield self._row(f"{case}, logits bit-identical", gib, same, 1.0, "", "= 1", reports[1])

    def resident(self) -> Iterator[Row]:
        """Kernels of a step, and a step by the wall, over BF16's."""
        base = self.opened("resident-bf16", "bf16", ENOUGH)
        targets = {"int4": "<= 0.5", "fp8": "<= 0.75"}
        for form in targets:
            found = self.opened(f"resident-{form}", form, ENOUGH)
            yield self._opened_row(f"{form} resident, kernels", found["kernel_s"], base["kernel_s"], targets[form], found)
            yield self._opened_row(f"{form} resident, wall", found["wall_s"], base["wall_s"], "<= 1.0", found)

    def lossless_resident(self) -> Iterator[Row]:
        base = self.opened("resident-bf16", "bf16", ENOUGH)
        for form, target in (("decoded", "<= 1.0"), ("stored", "<= 3")) if self.card else (("stored", "<= 3"),):
            found = self.opened(f"lossless-{form}", "lossless", ENOUGH, f"force.attn_form={form}", f"force.ffn_form={form}")
            yield self._opened_row(f"lossless residents, {form}, kernels", found["kernel_s"], base["kernel_s"], target, found)
            same = float(found["digest"] == base["digest"])
            yield self._opened_row(f"lossless residents, {form}, bit-identical", same, 1.0, "= 1", found)

    def prefill(self) -> Iterator[Row]:
        """Seconds over the larger of the stream's bound and what BF16 takes to compute with nothing on the way."""
        plain = self.run("prefill-bf16", "bf16", 6, 2048, 2)
        compute_s = limit_of(plain, "prefill_s")
        for form in self.formats:
            report = self.run(f"prefill-{form}", form, 6, 2048, 2, requests=6)
            stage = report["stages"]["prefill"].get(self.stage, {})
            moved = stage.get("bytes", 0) / report["batches"] / 1e9
            stream_s = moved / link_limit(report, self.stage)[0] if moved else 0.0
            seconds, bound = median(report["prefill_each_s"][1:]), max(compute_s, stream_s)
            yield self._row(f"prefill 2048, {form}", 6, seconds, bound, "s", "<= 1.2", report, "prefill_s", seconds)

    def start(self) -> Iterator[Row]:
        """From the process's start to the first token, the second of two runs each; and loading as predicted. Prints where it went."""
        totals, reports = [], []
        for form in ("bf16", "int4"):
            for _ in range(2):
                report = self.run(f"start-{form}", form, 6, 512, 2, requests=1, limits=False)
            for parts in (report["start_s"], report["start_beside_s"]):
                print(form, json.dumps({name: round(seconds, 3) for name, seconds in parts.items()}), flush=True)
            totals.append(sum(report["start_s"].values()))
            reports.append(report)
        load = reports[1]["measured"]["load_s"]
        yield self._row("start of int4 beside BF16's, warm", 6, totals[1], totals[0], "s", "<= 1", reports[1], "load_s", load)

    # ---- rows

    def _prediction(self, row: Row, what: str, predicted: float, target: str) -> Row:
        """Predicted over measured, and how far that is from 1."""
        off = max(predicted, 1 / predicted)
        return replace(row, case=f"{row.case}, {what}", result=predicted, limit=1.0, unit="x", ratio=off, target=target, spread="")

    def plan(self, name: str, form: str, gib: float, *more: str) -> Plan:
        """For ``form`` within the budgets of a run; ``name``.yaml has it."""
        checkpoint, path = self.checkpoint(form), self.bench.work / f"{name}.yaml"
        work = ["workload.prompt_tokens=128", "workload.new_tokens=64", "workload.context_tokens=0", "workload.requests=1"]
        given = ["hardware=local", "model=hf", f"model.checkpoint={checkpoint}", f"out={path}", *self.budget(checkpoint, gib), *work, *more]
        self.bench.call("planner", "solve", *given)
        return read_plan(path)

    def opened(self, name: str, form: str, gib: float, *more: str) -> dict[str, Any]:
        """What bench/step_kernels.py says of a plan for ``form``."""
        self.plan(name, form, gib, *more)
        command = [sys.executable, str(ROOT / "bench" / "step_kernels.py"), f"plan={self.bench.work / f'{name}.yaml'}"]
        done = subprocess.run(command, env=self.bench.env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def _row(
        self,
        case: str,
        gib: float,
        result: float,
        limit: float,
        unit: str,
        target: str,
        report: dict,
        key: str = "decode_s_per_token",
        seconds: float = 0.0,
    ) -> Row:
        vram, dram = (report["measured"][f"{tier}_bytes"] / 1e9 for tier in ("vram", "dram"))
        predicted = report["predicted"][key] / (seconds or step_s(report))
        return Row(case, self.where(gib), result, limit, unit, result / limit, target, predicted, vram, dram)

    def _opened_row(self, case: str, result: float, limit: float, target: str, found: dict[str, Any]) -> Row:
        return Row(case, f"{self.model}, all resident", result, limit, "s", result / limit, target, None, found["vram_bytes"] / 1e9, 0)


def at_this_drive(report: dict) -> float:
    """Predicted over measured seconds of a step, had the drive been probed when the run was: a shared one is two or three times as fast in
    one minute as in the next."""
    stages = report["predicted"]["decode_stages"]
    read_s = report["predicted"]["ssd_bytes_per_token"] / link_limit(report, "ssd")[0] / 1e9
    return max({**stages, "ssd": read_s}.values()) / step_s(report)


CASES = ("int4", "fp8", "q4_k", "lossless", "lossless_ssd", "resident", "lossless_resident", "prefill", "start", "cpu")


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    profile = profile_of(bench, "false" if "cpu" in given.get("cases", "").split(",") else "true")
    known = (*FORMATS, "lossless")
    formats = tuple(given.get("formats", ",".join(known)).split(","))
    for form in formats:
        if form not in known:
            raise SystemExit(f"formats={form}: choose from {', '.join(known)}")
    layers = int(given["layers"]) if "layers" in given else None
    new_tokens, pairs = int(given.get("new_tokens", 24)), int(given.get("pairs", 5))
    vram, dram = float(given.get("vram", 6)), given.get("dram", "4GiB")
    one = Formats(bench, bool(profile["gpu"]), given.get("model", "llama8b"), layers, new_tokens, formats, pairs, vram, dram)
    methods: dict[str, Callable[[], Iterator[Row]]] = {name: partial(getattr(one, name)) for name in CASES}
    run_cases(chosen(given.get("cases", "int4,fp8"), methods), machine(profile), Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
