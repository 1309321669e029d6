"""The host's time between two passes of drafted decoding: propose, schedule, choose, roll back. No model computes: its logits are given.

    python bench/host_between.py out=host.json

Runs where torch runs, without a checkpoint. Replies repeat themselves, so that `lookup` drafts at each pass, and half of what it drafts is
kept. `vocab` is that of the logits: choosing reads rows x (k + 1) x vocab of them, on a card by one kernel. With a card it is the time on
the wall, without one the thread's own, which other processes do not lengthen.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from penstock.planner.contract.speculation.acceptance import Acceptance  # noqa: E402
from penstock.planner.contract.speculation.chain_length import ChainLength  # noqa: E402
from penstock.runtime.engine.passes.generate import Batch, generate  # noqa: E402
from penstock.runtime.engine.passes.sampling import Sampler, Sampling  # noqa: E402
from penstock.runtime.kv.batch.page_pool import PagePool  # noqa: E402
from penstock.runtime.model.rows import Step  # noqa: E402
from penstock.runtime.speculate.chains import Chains  # noqa: E402
from penstock.runtime.speculate.lookup_drafter import LookupDrafter  # noqa: E402

PROMPT, NEW, PAGE = 4096, 256, 16
LIMIT_S = 2e-3


class Given:
    """Passes that take no time: the token behind ``t`` is ``after[t]``, and now and then another. Notes the host's seconds between them."""

    def __init__(self, rows: int, vocab: int, device: torch.device):
        self.pages = PagePool(rows * -(-(PROMPT + NEW) // PAGE), PAGE)
        self._vocab, self._device, self._chance = vocab, device, random.Random(0)
        self._now = time.perf_counter if device.type == "cuda" else time.thread_time
        self._left_s = 0.0
        self.between_s: list[float] = []

    @property
    def pool(self) -> Given:
        return self

    def run(self, step: Step) -> torch.Tensor:
        begun = self._now()
        if not step.has_prompt:
            self.between_s.append(begun - self._left_s)
        right = [(token + 1) % 64 for row in step.rows for token in row.tokens[len(row.tokens) - row.wanted :]]
        chosen = [token if self._chance.random() < 0.85 else 63 - token for token in right]
        logits = torch.zeros(len(chosen), self._vocab, device=self._device)
        logits[torch.arange(len(chosen)), torch.tensor(chosen)] = 1.0
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._left_s = self._now()
        return logits

    def forget(self, sequence: int) -> None:
        """Nothing is kept."""

    def make_way(self) -> None:
        """Nothing is recorded."""


class Longest(ChainLength):
    """Chooses as it does, and drafts as many as there is room for."""

    def choose(self) -> int:
        super().choose()
        return self.most


def between(rows: int, drafts: int, drawn: bool, vocab: int, device: torch.device) -> Iterator[Row]:
    given, draw = Given(rows, vocab, device), random.Random(1)
    prompts = [[draw.randrange(64) for _ in range(PROMPT - 64)] + list(range(64)) for _ in range(rows)]
    chains = Chains("lookup", LookupDrafter(), Longest(drafts, lambda k: 1.0 + 0.01 * k, Acceptance(0.6)))
    keys = Sampling(temperature=0.1, seed=1) if drawn else Sampling()
    generate(given, Batch(prompts, NEW, PROMPT), Sampler(keys, device), chains=chains)  # type: ignore[arg-type]
    spent = median(given.between_s[4:])
    facts = chains.counts
    said = f"{rows} rows, k = {drafts}, {'drawn' if drawn else 'greedy'}, {facts.kept / facts.drafted:.0%} kept, vocabulary {vocab}"
    yield Row("host between passes", said, spent * 1e3, LIMIT_S * 1e3, "ms", spent / LIMIT_S, "<= 1", None, 0, 0)


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocab = int(given.get("vocab", "128256" if device.type == "cuda" else "1024"))
    asked = [(rows, k, drawn) for rows in (1, 8, 32) for k in (7, 15) for drawn in (False, True)]
    cases = {f"{rows}-{k}-{drawn}": partial(between, rows, k, drawn, vocab, device) for rows, k, drawn in asked}
    torch.set_num_threads(1)  # what runs on a card beside takes no threads of torch
    with torch.inference_mode():
        run_cases(cases, {"device": str(device), "torch": torch.__version__}, Path(given["out"]) if "out" in given else None)
