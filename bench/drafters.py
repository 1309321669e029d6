"""What drafters give on trained models and real text: tokens a second over plain decoding's.

    python bench/drafters.py work=bench-work out=drafters.json cases=small quick=true models=../shared/models
    python bench/train_python.py out=/dev/shm/penstock/python
    python bench/drafters.py work=/dev/shm/penstock out=drafters.json cases=real models=/dev/shm/penstock/python

`experts`: routed experts, `tiny-mixtral` or with `model=mixtral` that geometry drawn at random, by lookup: as `auto` decides and as asked.
`small`: `tiny-llama` drafts for `tiny-mixtral`, which has the same tokens; one process, pairs of replies with and without drafts in turns.
`real`: the models of `bench/train_python.py` on files that they were not trained on. Each drafter is held against plain streaming with the
same VRAM: what a run takes beside weights, and 30 % of these, for the copy in 4 bits 50 %. `continuation` has the head of a file as its
prompt; `edit` the file with one name changed, and then its head as it was. Before each comparison one run with `calibrate=true` over other
files of the kind tells the plan how many drafts are kept. Texts in which eight tokens repeat more than three times are left out, and
counted.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.draft_ties import first_differences, partings  # noqa: E402
from bench.hybrid import KEYS, WHOLE, Hybrid, play  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.prices.memory_law import vram_use  # noqa: E402

CASES = ("small", "experts", "real")
PAIRS = 7
PROMPT, NEW = 512, 192
SMALL_NEW = 64
TEXTS = 10
TAUGHT = 6
"""Other texts of the kind, of the calibrating run."""
SPOKEN = ("Once upon a time there was a little girl", "The old man went to the sea and", "One day, a cat and a dog")
OF_WEIGHTS = frozenset({"residents", "ring", "embedding", "drafter", "experts"})
"""Items of VRAM that a budget for weights is shared by."""
DRAFTERS = {
    "lookup": (0.3, {"continuation": ">= 1.3", "edit": ">= 2"}),
    "draft": (0.3, {"continuation": ">= 2"}),
    "self": (0.5, {"continuation": ">= 3"}),
}
"""Drafter -> the share of the weights that VRAM has room for, and what it must reach by the kind of text."""


@dataclass(frozen=True)
class Replies:
    """What one process measured of ``plan``: seconds and tokens of each reply, and what drafting counted."""

    seconds: list[float]
    tokens: list[list[int]]
    facts: dict[str, Any]


def measure_replies(plan: Plan, checkpoint: Path, prompts: Sequence[Sequence[int]], both: bool) -> dict[str, Replies]:
    """In a process of its own: a reply to each of ``prompts`` with the plan's drafts; with ``both`` in turns with plain decoding
    by the same plan."""
    from penstock.runtime.engine.generate import Batch
    from penstock.runtime.engine.open_session import open_session
    from penstock.runtime.engine.sampling import Sampler, Sampling
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, open_cuda
    from penstock.runtime.memory.ground import OpenCard

    device = find_device(Budget.of(plan))
    made: dict[str, Replies] = {}
    chunk, draw = plan.decisions.prefill_chunk_tokens, random.Random(0)
    with open_session(plan, checkpoint, OpenCard(open_cuda(Budget.of(plan), device), device)) as session:  # type: ignore[arg-type]
        session.load(Batch([(0,) * plan.workload.prompt_tokens], 2, chunk))
        chains = session.chains

        def reply(name: str, prompt: Sequence[int]) -> None:
            session.chains = chains if name == "drafted" else None
            said = session.generate(Batch([prompt], plan.workload.new_tokens - 2, chunk), Sampler(Sampling(), device))
            one = made.setdefault(name, Replies([], [], {}))
            one.seconds.append(said.decode_s)
            one.tokens.append(said.tokens[0])

        names = ["drafted", "plain"] if both else ["drafted"]
        for name in names:
            reply(name, prompts[0])
        made.clear()
        for prompt in prompts:
            for name in draw.sample(names, len(names)):
                reply(name, prompt)
        if chains is not None:
            made["drafted"].facts.update(chains.facts())
    return made


def repeats(tokens: Sequence[int]) -> bool:
    """Whether eight tokens in a row occur more than three times."""
    return max(Counter(tuple(tokens[k : k + 8]) for k in range(len(tokens) - 7)).values(), default=0) > 3


def edited(text: str) -> str:
    """``text`` with its most frequent long name changed."""
    names = Counter(re.findall(r"\b[a-z_]{5,}\b", text)).most_common(1)
    return re.sub(rf"\b{names[0][0]}\b", "renamed", text) if names else text


class Drafters(Hybrid):
    """The cases over trained models."""

    @property
    def models(self) -> Path:
        return Path(self.given.get("models", "../shared/models")).expanduser().resolve()

    def small(self) -> Iterator[Row]:
        checkpoint, drafter = self.models / "tiny-mixtral", self.models / "tiny-llama"
        prompts = self.tokens(checkpoint, [SPOKEN[k % len(SPOKEN)] for k in range(PAIRS)])
        for asked, target in (("auto", ">= 0.98"), ("draft", "")):
            keys = f"speculate={asked}", f"draft={drafter}"
            plan = self.solve(f"tiny-{asked}", checkpoint, *keys, vram=WHOLE, prompt=64, new=SMALL_NEW)
            made = self.worker(measure_replies, plan, checkpoint, prompts, True)
            yield self.over(made, plan, f"drafts by {plan.decisions.speculation.drafter}", f"small, speculate={asked}", target)
            yield from self.ties(made, f"tiny-{asked}-plain", checkpoint, prompts, vram=WHOLE, prompt=64, new=SMALL_NEW)

    def experts(self) -> Iterator[Row]:
        drawn = "model" in self.given
        checkpoint = self.checkpoint() if drawn else self.models / "tiny-mixtral"
        vocab = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
        draw = random.Random(0)
        prompts = [[draw.randrange(vocab) for _ in range(64)] for _ in range(PAIRS)]
        for asked, target in (("auto", ">= 0.98"), ("lookup", "")):
            vram = self.vram if drawn else WHOLE
            plan = self.solve(f"experts-{asked}", checkpoint, f"speculate={asked}", vram=vram, prompt=64, new=SMALL_NEW)
            made = self.worker(measure_replies, plan, checkpoint, prompts, True)
            yield self.over(made, plan, f"drafts by {plan.decisions.speculation.drafter}", f"experts, speculate={asked}", target)

    def over(self, made: dict[str, Replies], plan: Plan, what: str, case: str, target: str) -> Row:
        """Drafted over plain, pair by pair."""
        rates = {name: [len(t) / s for t, s in zip(one.tokens, one.seconds, strict=True)] for name, one in made.items()}
        ratio = median(mine / its for mine, its in zip(rates["drafted"], rates["plain"], strict=True))
        alike = sum(mine == its for mine, its in zip(made["drafted"].tokens, made["plain"].tokens, strict=True))
        facts, count = made["drafted"].facts, len(made["plain"].tokens)
        share = facts["kept"] / facts["drafted"] if facts.get("drafted") else 0.0
        said = f"{what}; {share:.0%} of {facts.get('drafted', 0)} drafts kept, {alike} of {count} texts alike"
        mine, its, used = median(rates["drafted"]), median(rates["plain"]), plan.prediction
        predicted = used.decode_tokens_per_s / mine
        return Row(case, said, mine, its, "tok/s", ratio, target, predicted, used.vram_bytes / 1e9, used.dram_bytes / 1e9)

    def ties(self, made: dict[str, Replies], name: str, checkpoint: Path, prompts: Sequence[Sequence[int]], **solve: Any) -> Iterator[Row]:
        """Texts that part from plain decoding's where that was no tie; each that parts is told."""
        mine, its = made["drafted"].tokens, made["plain"].tokens
        at = first_differences(mine, its)
        found = self.worker(partings, self.solve(name, checkpoint, **solve), checkpoint, prompts, its, at) if at else []
        for parting in found:
            print(f"  {parting}", flush=True)
        total, wrong = sum(map(len, its)), sum(not parting.is_tie for parting in found)
        what = f"{len(found)} of {len(its)} texts part, {total} tokens; 1 in 2,000 may"
        yield Row("  texts that part at no tie", what, wrong, 0, "", float(wrong), "= 0", None, 0, 0)

    def tokens(self, checkpoint: Path, texts: Sequence[str]) -> list[list[int]]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        return [tokenizer.encode(text).ids for text in texts]

    def real(self) -> Iterator[Row]:
        target, copy = self.models / "target", self.bench.work / "python-int4"
        if not copy.exists():
            self.bench.call("runtime", "pack", f"checkpoint={target}", f"out={copy}", "format=int4")
        held = [json.loads(line)["text"] for line in (self.models / "held.jsonl").read_text().splitlines()]
        kinds = {"continuation": self.tokens(target, held), "edit": self.tokens(target, [edited(t) + "\n\n" + t for t in held])}
        heads = self.tokens(target, held)
        prompts = {"continuation": [t[:PROMPT] for t in kinds["continuation"] if len(t) > PROMPT + NEW]}
        pairs = [(t, h) for t, h in zip(kinds["edit"], heads, strict=True) if 300 < len(h) < 900]
        prompts["edit"] = [t[: len(t) - len(h) + 48] for t, h in pairs]
        places = {"draft": self.models / "draft", "self": copy}
        for who, (share, targets) in DRAFTERS.items():
            vram = self.budget(target, share)
            for kind, wanted in targets.items():
                asked = [f"speculate={who}", *([f"draft={places[who]}"] if who in places else [])]
                shown, others = prompts[kind][:TEXTS], prompts[kind][TEXTS : TEXTS + TAUGHT]
                longest = max(map(len, [*shown, *others]))
                name = f"real-{who}-{kind}"
                plain = self.solve(f"{name}-plain", target, vram=vram, prompt=longest, new=NEW)
                drafted = self.taught(name, target, [*asked, f"workload.name=python-{kind}"], vram, longest, others)
                mine = self.worker(measure_replies, drafted, target, shown, False)["drafted"]
                its = self.worker(measure_replies, plain, target, shown, False)["drafted"]
                fresh = [k for k, text in enumerate(its.tokens) if not repeats(text)]
                some = [Replies([one.seconds[k] for k in fresh], [one.tokens[k] for k in fresh], one.facts) for one in (mine, its)]
                if not fresh:
                    print(f"{kind}, by {who}: all {len(its.tokens)} texts repeat themselves; train longer", flush=True)
                    continue
                made = dict(zip(("drafted", "plain"), some, strict=True))
                row = self.over(made, drafted, f"by {who}", f"real, {kind}", wanted)
                yield replace(row, what=f"{row.what}, {len(its.tokens) - len(fresh)} left out")
                left = [shown[k] for k in fresh]
                yield from self.ties(made, f"{name}-plain", target, left, vram=vram, prompt=longest, new=NEW)

    def taught(self, name: str, target: Path, keys: Sequence[str], vram: str, longest: int, others: Sequence[Sequence[int]]) -> Plan:
        """The plan that is solved once a run over ``others`` has told what becomes of drafts."""
        first = self.solve(f"{name}-first", target, *keys, vram=vram, prompt=longest, new=NEW)
        if not others:
            print(f"{name}: no further texts to calibrate by; hold more files out", flush=True)
            return first
        asked = self.bench.work / f"{name}.jsonl"
        asked.write_text("".join(json.dumps({"tokens": list(tokens), "max_new_tokens": NEW}) + "\n" for tokens in others))
        files = (f"plan={self.bench.work / f'hybrid-{name}-first.yaml'}", f"prompts={asked}", f"out={self.bench.work / f'{name}.json'}")
        self.bench.call("runtime", "run", *files, "calibrate=true")
        return self.solve(f"{name}-drafted", target, *keys, vram=vram, prompt=longest, new=NEW)

    def budget(self, checkpoint: Path, share: float) -> str:
        """VRAM with room for a ``share`` of the weights beside what every run takes; all of it without a card."""
        if not self.card:
            return WHOLE
        plan = self.solve("budget", checkpoint, vram=WHOLE, prompt=2 * PROMPT + NEW, new=NEW)
        use = vram_use(plan.hardware, plan.model, plan.workload, plan.decisions)
        return str(round(sum(n for item, n in use.items() if item not in OF_WEIGHTS) + share * plan.model.weight_bytes))


if __name__ == "__main__":
    play(Drafters, CASES, "small", (*KEYS, "models"))
