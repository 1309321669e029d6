"""Which pages of a batch's prompts are there, and how many of them it pays to restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.pages.page_tiers import Tiers
from penstock.runtime.kv.pages.prompt_pages import OtherRanks, Tokens
from penstock.runtime.kv.pages.worth import Worth


class Found(NamedTuple):
    keys: list[Sequence[bytes]]
    """What each prompt begins with, as far as it is there without a gap. The last token of a prompt is always computed."""
    tiers: dict[bytes, Tier]
    """Where each page lies."""


class Chosen(NamedTuple):
    wanted: list[Sequence[bytes]]
    """The pages of each prompt that are to be brought."""
    seconds: float = 0.0
    """Predicted of the batch with these; 0 where nothing was predicted."""
    all_seconds: float = 0.0
    """With all that was found."""


def look_up(tiers: Tiers, prompts: Tokens, keys: Sequence[Sequence[bytes]]) -> Found:
    """``keys`` are those of the prompts' full pages. A few microseconds a page."""
    where: dict[bytes, Tier] = {}
    there: list[Sequence[bytes]] = []
    for prompt, own in zip(prompts, keys, strict=True):
        own = own[: (len(prompt) - 1) // tiers.shape.page_tokens]
        for i, key in enumerate(own):
            tier = where.get(key) or tiers.nearest(key)
            if tier is None:
                own = own[:i]
                break
            where[key] = tier
        there.append(own)
    return Found(there, where)


def agreed(found: Found, others: OtherRanks, tiers: Tiers) -> Found:
    """Of what was found here, what ``others`` have, too: each prompt's pages before the first one that somebody lacks, each in the farthest
    tier of all. What somebody lacks is computed, so it leaves DRAM here and is kept anew. One message to the others."""
    asked = [key for key in dict.fromkeys(key for own in found.keys for key in own) if found.tiers[key] is not Tier.vram]
    if not asked:
        return found
    there, order = others.find(asked), list(Tier)
    for key in asked:
        if key not in there:
            tiers.dram.slots.drop(key)
    everywhere = {
        key: tier if tier is Tier.vram else max(tier, there[key], key=order.index)
        for key, tier in found.tiers.items()
        if tier is Tier.vram or key in there
    }
    keys = [own[: next((i for i, key in enumerate(own) if key not in everywhere), len(own))] for own in found.keys]
    return Found(keys, everywhere)


def choose(found: Found, worth: Worth, lengths: Sequence[int], page_tokens: int) -> Chosen:
    """The pages of each prompt with which the batch is predicted to be fastest: those in VRAM, which cost nothing, those of the two nearest
    tiers, or all. Nothing is predicted if VRAM has all that was found."""

    def seconds(wanted: Sequence[Sequence[bytes]]) -> float:
        brought = Counter(found.tiers[key] for key in {key for own in wanted for key in own})
        return worth.restore_s(brought) + worth.prefill_s(lengths, [len(own) * page_tokens for own in wanted])

    options = [_within(found, tiers) for tiers in ({Tier.vram}, {Tier.vram, Tier.dram}, set(Tier))]
    if options[0] == options[-1]:
        return Chosen(options[0])
    costs = [seconds(option) for option in options]
    best = costs.index(min(costs))
    return Chosen(options[best], costs[best], costs[-1])


def _within(found: Found, tiers: set[Tier]) -> list[Sequence[bytes]]:
    """Of each prompt the pages before the first one that lies elsewhere."""
    return [own[: next((i for i, key in enumerate(own) if found.tiers[key] not in tiers), len(own))] for own in found.keys]
