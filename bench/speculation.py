"""What drafted tokens give: the price of longer passes, and tokens a second at an acceptance that is played.

    python bench/speculation.py work=/dev/shm/penstock out=speculation.json cases=price vram=6GiB
    python bench/speculation.py work=/dev/shm/penstock out=speculation-played.json cases=played layers=8 vram=4GiB quick=true
    python bench/speculation.py work=/dev/shm/penstock out=speculation-seventy.json cases=seventy model=llama70b vram=16GiB steps=24
    python bench/speculation.py work=bench-work cases=price,played,seventy model=demo quick=true

One process opens the plan once. `price`: a pass with 7 and 15 drafts over one without, streaming alone and, where it differs, as the plan
is solved, with units on the CPU. `played`: each draft is kept with the probability 0.6, 0.8, 0.9, whatever it is; chains as long as pays.
Its limit is E(a, k) / (seconds of a pass with k drafts), the best k, by the passes that this process measured. A reply has `steps` passes:
thirty are luck. Fewer layers make them quick; the host's share of each is the larger, so that is the harder case. `seventy`: a played 0.8
and few passes, for those that take seconds, as the plan is solved and streaming alone. Of every fifty draws exactly that share is right, in
an order drawn beforehand: so few passes are not luck.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.hybrid import ALONE, KEYS, Hybrid, Point  # noqa: E402
from bench.probed import play  # noqa: E402
from bench.worker import Trial  # noqa: E402
from penstock.planner.contract.bills.cost import verify_s  # noqa: E402
from penstock.planner.contract.decided.decisions import Decisions  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.speculation.acceptance import Acceptance  # noqa: E402
from penstock.planner.contract.speculation.chain_length import ChainLength  # noqa: E402
from penstock.planner.contract.speculation.drafting import expected_tokens  # noqa: E402

if TYPE_CHECKING:
    from penstock.runtime.engine.passes.generate import Generation
    from penstock.runtime.kv.batch.kv_sequence import KvSequence
    from penstock.runtime.speculate.drafter import Drafts

CASES = ("price", "played", "seventy")
LONG = (7, 15)
ACCEPTANCES = (0.6, 0.8, 0.9)
MOST, PROMPT = 15, 128
FEW = 24
"""Passes whose median is a pass's price."""
LEAST = 4
"""Of them that any machine waits for."""
REPLY_S = 60.0
"""A reply is broken off behind so many seconds: three of them and the prices end before bench/hybrid.py takes it for a hang."""
PRICES = {7: "<= 1.05", 15: "<= 1.1"}
BESIDE = {7: "<= 1.1", 15: "<= 1.2"}
"""With units on the CPU."""
DECK = 50
"""Draws of which the right ones are as many as the probability says."""

SEVENTY_S = 0.54, 0.3
"""A token of 70B may take, streaming alone and with the CPU."""


@dataclass(frozen=True)
class Asked:
    """What is measured: passes with so many ``drafts`` beside those with none, ``few`` of each, behind ``warm`` that do not count; replies
    by each of ``acceptances``."""

    drafts: tuple[int, ...] = (1, 3, *LONG)
    acceptances: tuple[float, ...] = ACCEPTANCES
    few: int = FEW
    warm: int = FEW


class Anything:
    """Drafts what costs nothing."""

    def read(self, rows: Sequence[KvSequence]) -> None:
        """Nothing is remembered."""

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        return [[1 + k for k in range(room)] for room in most]

    def forget(self, number: int) -> None:
        """Nothing is remembered."""


class Drawn:
    """Keeps each draft with the probability ``right``, whatever it is, and chooses the likeliest token behind those. Texts of random
    weights part by rounding: a drafter that knew them would be wrong from there on."""

    def __init__(self, right: float):
        self._right, self._order, self._deck = round(right * DECK), random.Random(0), list[bool]()

    def kept(self, drafts: int) -> int:
        """Of so many drafts of a chain."""
        return next((k for k in range(drafts) if not self._is_right()), drafts)

    def _is_right(self) -> bool:
        if not self._deck:
            self._deck = [k < self._right for k in range(DECK)]
            self._order.shuffle(self._deck)
        return self._deck.pop()

    def begin(self, prompts: Sequence[Sequence[int]]) -> Drawn:
        return self

    def __call__(self, logits: Any, numbers: Sequence[int]) -> Any:
        return logits.argmax(-1)

    def keep(self, logits: Any, numbers: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        picked, said, first = logits.argmax(-1).tolist(), [], 0
        for draft in drafts:
            kept = self.kept(len(draft))
            said.append([*draft[:kept], picked[first + kept]])
            first += len(draft) + 1
        return said


class Fixed(ChainLength):
    """As many drafts as may be."""

    def choose(self) -> int:
        return self.most


def passes_by(right: float, drafts: int, tokens: int) -> int:
    """That a reply of ``tokens`` takes by the draws that it was played with, had every chain ``drafts``."""
    drawn, passes = Drawn(right), 0
    while tokens > 0:
        tokens -= 1 + drawn.kept(min(drafts, tokens - 1))
        passes += 1
    return passes


def measure_chains(trial: Trial, asked: Asked) -> dict[str, Any]:
    """In a process of its own: seconds of passes by their drafts, and replies by the acceptance, each of ``trial.steps`` passes or more."""
    import torch

    from penstock.runtime.asked.prompts import random_ids
    from penstock.runtime.engine.open_session import open_session
    from penstock.runtime.engine.passes.generate import Batch
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, open_cuda
    from penstock.runtime.memory.ground import OpenCard
    from penstock.runtime.speculate.chains import Chains

    plan = trial.plan
    device = find_device(Budget.of(plan))
    (prompt,) = random_ids(1, plan.workload.prompt_tokens, plan.model.vocab, trial.seed)
    batch = Batch([prompt], plan.workload.new_tokens, plan.decisions.prefill_chunk_tokens)
    with open_session(plan, trial.checkpoint, OpenCard(open_cuda(Budget.of(plan), device), device)) as session:
        session.load(batch)

        def reply(right: float, length: ChainLength | None, passes: float) -> Generation:
            """Of about as many passes, and of fewer where they take longer than :data:`REPLY_S`."""
            session.chains = None if length is None else Chains("played", Anything(), length)
            each = expected_tokens(right, 0 if length is None else length.most)
            until = time.perf_counter() + REPLY_S
            short = replace(batch, max_new_tokens=min(batch.max_new_tokens, math.ceil(passes * each) + 1))
            return session.generate(short, Drawn(right), lambda said: [len(said[0]) > LEAST * each and time.perf_counter() > until])

        if asked.warm:
            reply(0, None, asked.warm)
        passes = {0: median(reply(0, None, asked.few).step_s[2:])}
        for drafts in asked.drafts:
            passes[drafts] = median(reply(1, Fixed(drafts, lambda k: 1.0, Acceptance(0.5)), asked.few).step_s[1:-1])
        replies = {}
        for right in asked.acceptances:
            planned = [passes[min(passes, key=lambda known: abs(known - k))] for k in range(MOST + 1)]
            made = reply(right, ChainLength(MOST, planned.__getitem__, Acceptance(0.5)), trial.steps)
            replies[right] = {"stepped": made.stepped, "seconds": sum(made.step_s), **session.chains.facts()}
        graphs = session.engine.facts()["graphs"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return {"passes_s": passes, "replies": replies, "graphs": graphs}


class Drafting(Hybrid):
    """The cases over one checkpoint, all measured when the first one is asked for."""

    @cached_property
    def found(self) -> tuple[Plan, dict[str, Any]]:
        return self.chains("speculation", Asked())

    def chains(self, name: str, asked: Asked, *keys: str) -> tuple[Plan, dict[str, Any]]:
        plan = self.plan_for(name, asked, *keys)
        return plan, self.measured(plan, asked)

    def plan_for(self, name: str, asked: Asked, *keys: str) -> Plan:
        checkpoint = self.checkpoint("bf16")
        layers = int(json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"])
        share = () if self.card else (f"force.cap_layers={layers * 2 // 5}",)
        drafts = ("speculate=lookup", f"force.speculate_tokens={MOST}")
        replies = math.ceil(self.passes * expected_tokens(max(asked.acceptances, default=0), MOST))
        return self.solve(name, checkpoint, *share, *drafts, *keys, prompt=PROMPT, new=max(asked.few * (MOST + 1), replies) + 1)

    def measured(self, plan: Plan, asked: Asked) -> dict[str, Any]:
        return self.worker(measure_chains, Trial(plan, self.checkpoint("bf16"), self.passes, 0), asked)

    @property
    def passes(self) -> int:
        return int(self.given.get("steps", "400"))

    def drafting_row(self, case: str, what: str, result: float, limit: float, unit: str, target: str) -> Row:
        said = self.found[0].prediction
        return Row(case, what, result, limit, unit, result / limit, target, None, said.vram_bytes / 1e9, said.dram_bytes / 1e9)

    def price(self) -> Iterator[Row]:
        alone = None
        for which, keys, prices in (("alone", ALONE, PRICES), ("as solved", (), BESIDE))[0 if self.card else 1 :]:
            asked = Asked(LONG, ())
            plan = self.plan_for(f"price-{which[:5]}", asked, *keys)
            if alone is not None and plan.decisions == alone.decisions:
                return
            alone, found = plan, self.measured(plan, asked)
            for drafts in LONG:
                recorded = (found["graphs"] or {}).get("verify")
                how = ", recorded" if recorded and recorded["steps"] else ""
                yield self.longer_row(
                    which, f"{self.where(Point(plan, ()))}; over one row{how}", plan, found["passes_s"], drafts, prices[drafts]
                )

    def longer_row(self, which: str, what: str, plan: Plan, passes: Mapping[int, float], drafts: int, target: str) -> Row:
        """A pass with so many drafts over one with none."""
        gb = plan.prediction.vram_bytes / 1e9, plan.prediction.dram_bytes / 1e9
        speculation = replace(plan.decisions.speculation, tokens=drafts)
        said = verify_s(plan.hardware, plan.model, plan.workload, replace(plan.decisions, speculation=speculation))
        took, one = passes[drafts], passes[0]
        return Row(f"{which}, {drafts + 1} rows over one", what, took, one, "s", took / one, target, said / took, *gb)

    def played(self) -> Iterator[Row]:
        """Over what is expected; over what the best chain makes of the same draws, which leaves luck out and what learning costs in; over
        what was kept for the price of a pass, which leaves time alone; over plain decoding."""
        passes = self.found[1]["passes_s"]
        for right, reply in self.found[1]["replies"].items():
            case, rate = f"played, a = {right}", reply["stepped"] / reply["seconds"]
            best = max(passes, key=lambda k: expected_tokens(right, k) / passes[k])
            of_these = passes_by(right, best, reply["stepped"])
            found = f"{reply['passes']} passes of {reply['tokens_a_pass']:.2f} tokens, {reply['kept']} of {reply['drafted']} kept"
            bounds = (
                ("", f"{found}; best {best} drafts", expected_tokens(right, best) / passes[best], ">= 0.93"),
                (", same draws", f"best chains take {of_these} passes", reply["stepped"] / of_these / passes[best], ">= 0.93"),
                (", by what was kept", "seconds of a pass alone", reply["tokens_a_pass"] / passes[best], ""),
                (", over plain", "tokens a second", 1 / passes[0], ""),
            )
            for which, what, bound, target in bounds:
                yield self.drafting_row(case + which, what, rate, bound, "tok/s", target)

    def seventy(self) -> Iterator[Row]:
        """Seconds a token; a pass of one row with the CPU over one without; a pass with all drafts over one with none."""
        right, alone = 0.8, None
        for which, keys, most_s in zip(("alone", "as solved"), (ALONE, ()), SEVENTY_S, strict=True):
            plan, found = self.chains(f"seventy-{which[:5]}", Asked(LONG, (right,), few=6, warm=0), *keys)
            passes, reply = found["passes_s"], found["replies"][right]
            best = max(passes, key=lambda k: expected_tokens(right, k) / passes[k])
            each_s, expected_s = reply["seconds"] / reply["stepped"], passes[best] / expected_tokens(right, best)
            by_best = passes_by(right, best, reply["stepped"])
            of_these = f"{reply['passes']} passes of {reply['tokens_a_pass']:.2f} tokens, {by_best} by the best chains"
            what = f"{self.where(Point(plan, ()))}; {of_these}"
            gb = plan.prediction.vram_bytes / 1e9, plan.prediction.dram_bytes / 1e9
            yield Row(f"{which}, played, a = {right}", what, each_s, most_s, "s", each_s / most_s, "<= 1", None, *gb)
            what = f"{best} drafts, {passes[best]:.3f} s a pass, {expected_tokens(right, best):.2f} tokens"
            yield Row(f"{which}, by E(k, a)", what, expected_s, most_s, "s", expected_s / most_s, "<= 1", None, *gb)
            what, said = f"a pass of one row: {passes[0]:.3f} s", verify_s(plan.hardware, plan.model, plan.workload, none_of(plan))
            over = passes[0] if alone is None else alone
            yield Row(
                f"{which}, x alone", what, over, passes[0], "s", over / passes[0], ">= 1.8" if keys == () else "", said / passes[0], *gb
            )
            alone = passes[0] if alone is None else alone
            yield self.longer_row(which, self.where(Point(plan, ())), plan, passes, MOST, (PRICES if keys else BESIDE)[MOST])


def none_of(plan: Plan) -> Decisions:
    """What ``plan`` decides, with no token drafted."""
    return replace(plan.decisions, speculation=replace(plan.decisions.speculation, tokens=0))


if __name__ == "__main__":
    play(Drafting, CASES, ",".join(CASES), KEYS)
