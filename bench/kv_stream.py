"""KV outside VRAM while it decodes, against the link's limit and against transformers' own offloaded cache.

    python bench/kv_stream.py work=/data/penstock out=results.json cases=resident,streamed,peer [model=llama8b] [batch=16] [prompt=8192]

`resident`: weights in VRAM, half of the KV in DRAM. `streamed`: weights and KV move. `peer`: `DynamicCache(offloading=True)` over the same
model, prompts and steps, the whole model in VRAM; its row is its step against `resident`'s. Every run is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, chosen, run_cases  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import Bench, bound_row, machine, step_s, stream_row  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.plan.planfile import read_plan  # noqa: E402

NEW = 10
KEYS = ("work", "out", "cases", "model", "batch", "prompt", "resident", "streamed")

PEER = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM, DynamicCache
from penstock.planner.common.outside.cache_name import cache_name
from penstock.runtime.asked.prompts import random_ids
path, batch, prompt, new, chunk = sys.argv[1], *map(int, sys.argv[2:6])
torch.backends.cuda.enable_cudnn_sdp(False)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map="cuda" if torch.cuda.is_available() else "cpu").eval()
ids = torch.tensor(random_ids(batch, prompt, model.config.vocab_size, 0), device=model.device)
cache, steps, tokens = DynamicCache(config=model.config, offloading=True), [], []
with torch.inference_mode():
    for start in range(0, prompt, chunk):
        logits = model(ids[:, start:start + chunk], use_cache=True, **{cache_name(model.forward): cache}, logits_to_keep=1).logits
    for _ in range(new):
        chosen = logits[:, -1].argmax(-1)
        tokens.append(chosen.tolist())
        begun = time.perf_counter()
        logits = model(chosen[:, None], use_cache=True, **{cache_name(model.forward): cache}, logits_to_keep=1).logits
        logits[0, 0, 0].item()
        steps.append(time.perf_counter() - begun)
print(json.dumps({"step_s": steps, "tokens": [list(t) for t in zip(*tokens)]}))
"""


class Cases:
    """``batch`` random prompts of ``prompt`` tokens; VRAM budgets of the two cases as hardware.vram_bytes takes them."""

    def __init__(self, bench: Bench, model: str, batch: int, prompt: int, resident: str, streamed: str):
        self._bench, self._batch, self._prompt = bench, batch, prompt
        self._budgets = {"resident": resident, "streamed": streamed}
        self._checkpoint = bench.checkpoint("kv-model", f"model={model}")
        self._reports: dict[str, dict] = {}
        self.tokens: dict[str, list] = {}

    def resident(self) -> Iterator[Row]:
        layers = json.loads((self._checkpoint / "config.json").read_text())["num_hidden_layers"]
        report = self._run("resident", f"force.resident_attn={layers}", f"force.resident_ffn={layers}")
        yield stream_row("KV from DRAM, weights resident", self._what("resident"), report, "h2d", ">= 0.92")

    def streamed(self) -> Iterator[Row]:
        report = self._run("streamed")
        yield bound_row("KV and weights stream", self._what("streamed"), report, "decode_s_per_token", "<= 1.06")

    def peer(self) -> Iterator[Row]:
        """The steps of transformers' offloaded cache in units of ours."""
        ours = self._reports["resident"]
        chunk = read_plan(self._bench.work / "kv-resident.yaml").decisions.prefill_chunk_tokens
        arguments = (self._checkpoint, self._batch, self._prompt, NEW, chunk)
        done = subprocess.run(
            [sys.executable, "-c", PEER, *map(str, arguments)], env=self._bench.env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"peer failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
            return
        theirs = json.loads(done.stdout.strip().splitlines()[-1])
        alike = [sum(x == y for x, y in zip(a, b, strict=False)) for a, b in zip(theirs["tokens"], ours["tokens"], strict=True)]
        seconds = median(theirs["step_s"][1:])
        what = f"DynamicCache(offloading=True); {sum(alike)} of {NEW * len(alike)} tokens alike"
        yield Row("peer's step over ours", what, seconds, step_s(ours), "s", seconds / step_s(ours), ">= 2", None, 0, 0)

    def _run(self, name: str, *solve: str) -> dict:
        work = {
            "prompt_tokens": self._prompt,
            "new_tokens": NEW,
            "context_tokens": 0,
            "batch": self._batch,
            "requests": self._batch,
            "kv_spill": "true",
        }
        budget = f"hardware.vram_bytes={self._budgets[name]}"
        keys = [f"workload.{key}={value}" for key, value in work.items()]
        report = self._bench.run(f"kv-{name}", self._checkpoint, [budget, *keys, *solve], [])
        self._reports[name] = report
        return report

    def _what(self, name: str) -> str:
        kv = read_plan(self._bench.work / f"kv-{name}.yaml").decisions.kv
        outside = 1 - kv.vram_pages / kv.pages
        return f"batch {self._batch}, {self._prompt} tokens, {outside:.0%} of KV outside VRAM"


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
    except UserError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(Path(given.get("work", "bench-work")).resolve())
    where = machine(bench.probe())
    budgets = given.get("resident", "28GiB"), given.get("streamed", "12GiB")
    cases = Cases(bench, given.get("model", "llama8b"), int(given.get("batch", "16")), int(given.get("prompt", "8192")), *budgets)
    known: dict[str, Callable[[], Iterator[Row]]] = {f.__name__: f for f in (cases.resident, cases.streamed, cases.peer)}
    run_cases(chosen(given.get("cases", "resident,streamed,peer"), known), where, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
