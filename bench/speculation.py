"""What drafted tokens give: the price of longer passes, and tokens a second at an acceptance that is played.

    python bench/speculation.py work=/dev/shm/penstock out=speculation.json cases=price,played vram=6GiB
    python bench/speculation.py work=bench-work cases=price,played model=demo quick=true

One process opens the plan once. `price`: a pass with 7 and 15 drafts over one without. `played`: a drafter that knows what will be said,
each token right with the probability 0.6, 0.8, 0.9; chains as long as pays. Its limit is E(a, k) / (seconds of a pass with k drafts), the
best k, by the passes that this process measured.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.hybrid import Hybrid, play  # noqa: E402
from bench.worker import Trial  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.speculation.acceptance import Acceptance  # noqa: E402
from penstock.planner.contract.speculation.chain_length import ChainLength  # noqa: E402
from penstock.planner.contract.speculation.drafting import expected_tokens  # noqa: E402

CASES = ("price", "played")
LONG = (7, 15)
ACCEPTANCES = (0.6, 0.8, 0.9)
MOST, PROMPT = 15, 128
PRICES = {7: "<= 1.05", 15: "<= 1.1"}


class Played:
    """Knows what will be said; each token that it drafts is right with the probability ``right``."""

    def __init__(self, said: Sequence[int], prompt_tokens: int, right: float, vocab: int):
        self._said, self._prompt_tokens, self._right, self._vocab = said, prompt_tokens, right, vocab
        self._draw = random.Random(0)

    def propose(self, number: int, tokens: Sequence[int], most: int) -> Sequence[int]:
        coming = self._said[len(tokens) - self._prompt_tokens :][:most]
        return [token if self._draw.random() < self._right else (token + 1) % self._vocab for token in coming]

    def forget(self, number: int) -> None:
        """Nothing is remembered."""


class Fixed(ChainLength):
    """As many drafts as may be."""

    def choose(self) -> int:
        return self.most


def measure_chains(trial: Trial) -> dict[str, Any]:
    """In a process of its own: seconds of passes by their drafts, and of replies by the acceptance."""
    import torch

    from penstock.runtime.asked.prompts import random_ids
    from penstock.runtime.engine.generate import Batch
    from penstock.runtime.engine.sampling import Sampler, Sampling
    from penstock.runtime.engine.session import open_session
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, open_cuda
    from penstock.runtime.memory.ground import OpenCard
    from penstock.runtime.speculate.chains import Chains

    plan, vocab = trial.plan, trial.plan.model.vocab
    device = find_device(Budget.of(plan))
    (prompt,) = random_ids(1, plan.workload.prompt_tokens, vocab, trial.seed)
    batch = Batch([prompt], trial.steps, plan.decisions.prefill_chunk_tokens)
    with open_session(plan, trial.checkpoint, OpenCard(open_cuda(Budget.of(plan), device), device)) as session:
        session.load(batch)

        def reply(right: float, length: ChainLength | None) -> tuple[list[int], list[float], float, dict[str, Any]]:
            session.chains = None if length is None else Chains("played", Played(said, len(prompt), right, vocab), length)
            begun = time.perf_counter()
            made = session.generate(batch, Sampler(Sampling(), device))
            seconds = time.perf_counter() - begun - made.prefill_s
            return made.tokens[0], made.step_s, seconds, session.chains.facts() if session.chains else {}

        said: list[int] = []
        said, *_ = reply(0, None)
        plain, steps, _, _ = reply(0, None)
        passes = {0: median(steps[2:])}
        for drafts in dict.fromkeys((1, 3, *LONG)):
            passes[drafts] = median(reply(0, Fixed(drafts, lambda k: 1.0, Acceptance(0.5)))[1][1:])
        replies = {}
        for right in ACCEPTANCES:
            length = ChainLength(MOST, lambda k: passes[min(passes, key=lambda known: abs(known - k))], Acceptance(0.5))
            tokens, steps, seconds, facts = reply(right, length)
            spent = sum(steps)
            alike = next((k for k, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b), len(plain))
            replies[right] = {"tokens_per_s": (len(tokens) - 1) / spent, "host_s": (seconds - spent) / len(steps), "alike": alike, **facts}
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return {"passes_s": passes, "replies": replies, "tokens": trial.steps}


class Drafting(Hybrid):
    """The cases over one checkpoint, all measured when the first one is asked for."""

    @cached_property
    def found(self) -> tuple[Plan, dict[str, Any]]:
        checkpoint, steps = self.checkpoint("bf16"), int(self.given.get("steps", "96"))
        layers = int(json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"])
        share = () if self.card else (f"force.cap_layers={layers * 2 // 5}",)
        plan = self.solve("speculation", checkpoint, *share, prompt=PROMPT, new=steps)
        return plan, self.worker(measure_chains, Trial(plan, checkpoint, steps, 0))

    def drafting_row(self, case: str, what: str, result: float, limit: float, unit: str, target: str) -> Row:
        said = self.found[0].prediction
        return Row(case, what, result, limit, unit, result / limit, target, None, said.vram_bytes / 1e9, said.dram_bytes / 1e9)

    def price(self) -> Iterator[Row]:
        passes = self.found[1]["passes_s"]
        for drafts in LONG:
            what = "a pass over one of one row"
            yield self.drafting_row(f"{drafts + 1} rows", what, passes[drafts], passes[0], "s", PRICES[drafts])

    def played(self) -> Iterator[Row]:
        passes, tokens = self.found[1]["passes_s"], self.found[1]["tokens"]
        for right, reply in self.found[1]["replies"].items():
            best = max(passes, key=lambda k: expected_tokens(right, k) / passes[k])
            bound = expected_tokens(right, best) / passes[best]
            what = f"{reply['tokens_a_pass']:.2f} tokens a pass, {reply['kept']} of {reply['drafted']} kept; best {best} drafts"
            yield self.drafting_row(f"played, a = {right}", what, reply["tokens_per_s"], bound, "tok/s", ">= 0.93")
            alike = f"first {reply['alike']} of {tokens} tokens alike"
            yield self.drafting_row(f"played, a = {right}, over plain", alike, reply["tokens_per_s"], 1 / passes[0], "tok/s", "")


if __name__ == "__main__":
    play(Drafting, CASES, ",".join(CASES))
