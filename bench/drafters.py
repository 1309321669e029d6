"""What drafters give on trained models and real text: tokens a second over plain decoding's.

    python bench/drafters.py work=bench-work out=drafters.json cases=small quick=true models=../shared/models
    python bench/train_python.py out=/dev/shm/penstock/python
    python bench/drafters.py work=/dev/shm/penstock out=drafters.json cases=real models=/dev/shm/penstock/python [drafters=draft,self]

`experts`: routed experts, `tiny-mixtral` or with `model=mixtral` that geometry drawn at random, by lookup: as `auto` decides and as asked.
`small`: `tiny-llama` drafts for `tiny-mixtral`, which has the same tokens; one process, pairs of replies with and without drafts in turns.
`real`: the models of `bench/train_python.py` on files that they were not trained on. Each drafter is held against plain streaming with the
same VRAM: what a run takes beside weights, and 30 % of these, for the copy in 4 bits 50 %. `continuation` has the head of a file as its
prompt; `edit` the file with one name changed, and then its head as it was: whole files first, behind them heads of longer ones.

Texts in which eight tokens repeat more than three times are left out, and counted. Which do is looked at first, by plain replies with all
weights in VRAM, text by text until enough do not. The rest tells the plan how many drafts are kept, by one run with `calibrate=true`: so it
learns from other files, of which the same is known. A plain reply that repeats all the same when it is measured is left out then. Below
each comparison stands what a pass took, and gave, beside what its plan said.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row  # noqa: E402
from bench.draft_ties import first_differences, partings  # noqa: E402
from bench.hybrid import KEYS, WHOLE, Hybrid  # noqa: E402
from bench.keys import read_names  # noqa: E402
from bench.probed import play  # noqa: E402
from bench.replies import Replies, look_at, measure_replies, repeats  # noqa: E402
from penstock.planner.contract.bills.cost import drafter_alone, verify_s  # noqa: E402
from penstock.planner.contract.plan.plan import Plan  # noqa: E402
from penstock.planner.contract.prices.memory_law import vram_use  # noqa: E402

CASES = ("small", "experts", "real")
PAIRS = 7
PROMPT, NEW = 512, 128
HEAD = 48
"""Tokens of a file that stand behind the edited one, for the model to go on."""
SMALL_NEW = 64
TEXTS, LEAST = 40, 6
"""That are measured, every second one of those that do not repeat themselves, and so many also where none are left to calibrate by. Texts
differ: four kept 94 % of drafts where six others kept 54, and 24 gave 7.44 tokens a pass where nine others gave 5.34."""
PLAIN = 12
"""Of these, whose plain replies are measured beside."""
LOOKED = 200
"""Texts of a kind that are looked at, at most."""
SPOKEN = ("Once upon a time there was a little girl", "The old man went to the sea and", "One day, a cat and a dog")
OF_WEIGHTS = frozenset({"residents", "ring", "embedding", "drafter", "experts"})
"""Items of VRAM that a budget for weights is shared by."""
DRAFTERS = {
    "lookup": (0.3, {"continuation": ">= 1.3", "edit": ">= 2"}),
    "draft": (0.3, {"continuation": ">= 2"}),
    "self": (0.5, {"continuation": ">= 3"}),
}
"""Drafter -> the share of the weights that VRAM has room for, and what it must reach by the kind of text."""


def dealt(texts: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Of ``texts`` those that are measured, and those of the calibrating run: every second one, as far as there are enough."""
    shown = texts[: max(LEAST, min(2 * TEXTS, len(texts)))]
    return (shown[::2], shown[1::2]) if len(shown) >= 2 * LEAST else (shown[:LEAST], shown[LEAST:])


def edited(text: str) -> str:
    """``text`` with its most frequent long name changed."""
    names = Counter(re.findall(r"\b[a-z_]{5,}\b", text)).most_common(1)
    return re.sub(rf"\b{names[0][0]}\b", "renamed", text) if names else text


def rows_of(plan: Plan) -> int:
    """Of a text, in a pass of ``plan`` with all its drafts."""
    return plan.decisions.speculation.tokens + 1


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
            yield from self.ties(made, rows_of(plan), f"tiny-{asked}-plain", checkpoint, prompts, vram=WHOLE, prompt=64, new=SMALL_NEW)

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
        """Drafted over plain, pair by pair, as far as there are plain ones; what is predicted, over all that is drafted."""
        rates = {name: [len(t) / s for t, s in zip(one.tokens, one.seconds, strict=True)] for name, one in made.items()}
        ratio = median(mine / its for mine, its in zip(rates["drafted"], rates["plain"], strict=False))
        mine, its, used = made["drafted"], made["plain"], plan.prediction
        alike = sum(one == other for one, other in zip(mine.tokens, its.tokens, strict=False))
        drafted = mine.counted("drafted")
        share = mine.counted("kept") / drafted if drafted else 0.0
        said = f"{what}; {share:.0%} of {drafted:.0f} drafts kept, {alike} of {len(its.tokens)} texts alike"
        predicted = used.decode_tokens_per_s / mine.tokens_per_s
        gb = used.vram_bytes / 1e9, used.dram_bytes / 1e9
        return Row(case, said, median(rates["drafted"]), median(rates["plain"]), "tok/s", ratio, target, predicted, *gb)

    def a_pass(self, drafted: Replies, plan: Plan) -> Row:
        """What a pass and its drafts took, the reading of prompts left out, and gave, beside what ``plan`` says of as many drafts."""
        passes, drafts = drafted.counted("passes"), drafted.counted("drafted")
        decided, alone = plan.decisions.speculation, plan.drafter
        mean = replace(plan.decisions, speculation=replace(decided, tokens=round(drafts / passes)))
        took, given = (sum(drafted.seconds) - drafted.counted("read_s")) / passes, (plan.hardware, plan.model, plan.workload, mean)
        said = verify_s(*given, drafter_alone(*given))
        tokens = drafted.counted("tokens") / passes
        what = f"{drafts / passes:.1f} drafts of {decided.tokens}; {tokens:.2f} tokens for {plan.prediction.tokens_a_pass:.2f}"
        if alone is not None and drafts:
            each_ms, price_ms = drafted.counted("draft_s") / drafts * 1e3, alone.prediction.decode_s_per_token * 1e3
            what += f"; {each_ms:.2f} ms a draft for {decided.step_s * 1e3 or price_ms:.2f}, by its price {price_ms:.2f}"
        return Row("  a pass", what, took, said, "s", took / said, "", said / took, 0, 0)

    def ties(
        self, made: dict[str, Replies], rows: int, name: str, checkpoint: Path, prompts: Sequence[Sequence[int]], **solve: Any
    ) -> Iterator[Row]:
        """Texts that part from plain decoding's where that was no tie, by passes of up to ``rows`` a text; each that parts is told."""
        mine, its = made["drafted"].tokens[: len(made["plain"].tokens)], made["plain"].tokens
        at = first_differences(mine, its)
        found = self.worker(partings, self.solve(name, checkpoint, **solve), checkpoint, prompts, its, at, rows) if at else []
        for parting in found:
            print(f"  {parting}", flush=True)
        total, wrong = sum(map(len, its)), sum(not parting.is_tie for parting in found)
        what = f"{len(found)} of {len(its)} texts part, {total} tokens; 1 in 2,000 may"
        yield Row("  texts that part at no tie", what, wrong, 0, "", float(wrong), "= 0", None, 0, 0)

    def tokens(self, checkpoint: Path, texts: Sequence[str]) -> list[list[int]]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        return [one.ids for one in tokenizer.encode_batch(list(texts))]

    def real(self) -> Iterator[Row]:
        names = read_names(self.given, "drafters", tuple(DRAFTERS)).get("drafters", tuple(DRAFTERS))
        target, copy = self.models / "target", self.bench.work / "python-int4"
        if "self" in names and not copy.exists():
            self.bench.call("runtime", "pack", f"checkpoint={target}", f"out={copy}", "format=int4")
        kinds = dict.fromkeys(kind for name in names for kind in DRAFTERS[name][1])
        known = self.prompts(target)
        prompts = {kind: known[kind][:LOOKED] for kind in kinds}
        looked = self.worker(look_at, self.whole, target, prompts, 2 * TEXTS)
        places, plain = {"draft": self.models / "draft", "self": copy}, dict[tuple[str, str], Replies]()
        for who, (share, targets) in {name: DRAFTERS[name] for name in names}.items():
            vram = self.budget(share)
            for kind, wanted in targets.items():
                shown, others = dealt([prompts[kind][k] for k in looked[kind].fresh])
                name, all_left = f"real-{who}-{kind}", f"all {looked[kind].texts} texts repeat themselves; train longer"
                if not shown:
                    print(f"{kind}, by {who}: {all_left}", flush=True)
                    continue
                asked = [f"speculate={who}", *([f"draft={places[who]}"] if who in places else [])]
                solve = {"vram": vram, "prompt": max(map(len, [*shown, *others])), "new": NEW}
                if (kind, vram) not in plain:
                    alone = self.solve(f"{name}-plain", target, **solve)
                    plain[kind, vram] = self.worker(measure_replies, alone, target, shown[:PLAIN], False)["drafted"]
                drafted = self.taught(name, target, [*asked, f"workload.name=python-{kind}"], solve, others)
                mine, its = self.worker(measure_replies, drafted, target, shown, False)["drafted"], plain[kind, vram]
                fresh = [k for k, text in enumerate(its.tokens) if not repeats(text)]
                if not fresh:
                    print(f"{kind}, by {who}: {all_left}", flush=True)
                    continue
                others_too = [*fresh, *range(len(its.tokens), len(shown))]
                made = {"drafted": mine.only(others_too), "plain": its.only(fresh)}
                left = looked[kind].texts - len(looked[kind].fresh) + len(its.tokens) - len(fresh)
                row = self.over(made, drafted, f"by {who}", f"real, {kind}", wanted)
                yield replace(row, what=f"{row.what}, {left} of {looked[kind].texts} left out")
                yield self.a_pass(made["drafted"], drafted)
                yield from self.ties(made, rows_of(drafted), f"{name}-plain", target, [shown[k] for k in fresh], **solve)

    @cached_property
    def context(self) -> int:
        """Tokens that the models were trained on at once: prompt and reply stay within them."""
        return int(json.loads((self.models / "train.json").read_text())["context"])

    def prompts(self, target: Path) -> dict[str, list[list[int]]]:
        """Kind -> prompts of all files that were held out and are long enough."""
        held = [json.loads(line)["text"] for line in (self.models / "held.jsonl").read_text().splitlines()]
        files = self.tokens(target, held)
        heads = [text[: len(text) * self.context // (2 * len(own))] for text, own in zip(held, files, strict=True)]
        heads = [head.rpartition("\n")[0] for head in heads]
        both = list(zip(self.edits(target, held), self.edits(target, heads), strict=True))
        return {
            "continuation": [own[:PROMPT] for own in files if len(own) > PROMPT + NEW],
            "edit": [*(file for file, _ in both if file), *(head for file, head in both if head and not file)],
        }

    def edits(self, target: Path, texts: Sequence[str]) -> list[list[int]]:
        """Each text with one name changed, and its head as it was; nothing where prompt or reply have no room."""
        behind = [own[:HEAD] if len(own) >= HEAD + NEW else [] for own in self.tokens(target, texts)]
        before = self.tokens(target, [f"{edited(text)}\n\n" for text in texts])
        made = [[*text, *head] if head else [] for text, head in zip(before, behind, strict=True)]
        return [prompt if len(prompt) <= self.context - NEW else [] for prompt in made]

    def taught(self, name: str, target: Path, keys: Sequence[str], solve: Mapping[str, Any], others: Sequence[Sequence[int]]) -> Plan:
        """The plan that is solved once a run over ``others`` has told what becomes of drafts."""
        first = self.solve(f"{name}-first", target, *keys, **solve)
        if not others:
            print(f"{name}: no further texts to calibrate by; hold more files out", flush=True)
            return first
        asked = self.bench.work / f"{name}.jsonl"
        asked.write_text("".join(json.dumps({"tokens": list(tokens), "max_new_tokens": NEW}) + "\n" for tokens in others))
        files = (f"plan={self.bench.work / f'hybrid-{name}-first.yaml'}", f"prompts={asked}", f"out={self.bench.work / f'{name}.json'}")
        self.bench.call("runtime", "run", *files, "calibrate=true")
        plan = self.solve(f"{name}-drafted", target, *keys, **solve)
        print(*(f"  {note}" for note in plan.notes if note.startswith(("calibrated", "drafts"))), sep="\n", flush=True)
        return plan

    @cached_property
    def whole(self) -> Plan:
        """All weights of the trained model in VRAM."""
        return self.solve("whole", self.models / "target", vram=WHOLE, prompt=self.context - NEW, new=NEW)

    def budget(self, share: float) -> str:
        """VRAM with room for a ``share`` of the weights beside what every run takes; all of it without a card."""
        if not self.card:
            return WHOLE
        plan = self.whole
        use = vram_use(plan.hardware, plan.model, plan.workload, plan.decisions)
        return str(round(sum(n for item, n in use.items() if item not in OF_WEIGHTS) + share * plan.model.weight_bytes))


if __name__ == "__main__":
    play(Drafters, CASES, "small", (*KEYS, "models", "drafters"))
