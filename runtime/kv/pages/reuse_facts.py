"""What the reuse of prefixes did, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.planner.contract.decided.decisions import Tier

PerTier = dict[str, int]
"""By tier: vram (L1), dram (L2), ssd (L3)."""


@dataclass
class Reused:
    """What became of one request's prompt."""

    found_tokens: int
    """Leading tokens whose pages were found in some tier, the last token of a prompt apart."""
    restored_tokens: PerTier
    """Those that were not computed, by the tier that they came from."""
    computed_tokens: int
    restored_bytes: PerTier
    """Of its pages that were copied: none of VRAM's, which are shared. What several requests share is counted for each; the total counts it
    once."""
    declined: bool
    """Some of the pages that were found were not brought, since computing is predicted to be faster."""


@dataclass
class Totals:
    """Over all requests, for pages of ``page_bytes``."""

    page_bytes: int
    requests: list[Reused] = field(default_factory=list)
    pages: Counter[Tier] = field(default_factory=Counter)
    """Pages that were brought, by the tier that they came from."""
    restore_s: float = 0.0
    capture_s: float = 0.0
    captured: int = 0
    """Pages that were copied out of the running batch."""
    skipped: int = 0
    """Pages that were not, because their slots were wanted."""
    demoted: int = 0
    """Pages that were pushed out of VRAM and copied to DRAM."""
    failed_checks: int = 0
    """Pages in DRAM whose bytes had changed."""

    def request(self, prompt: int, found: int, parts: Iterable[tuple[Tier, int]], declined: bool) -> None:
        """Note a request of ``prompt`` tokens, of which pages with ``found`` tokens were there. ``parts`` are a tier and tokens of each
        page that was restored."""
        tokens: Counter[Tier] = Counter()
        nbytes: Counter[Tier] = Counter()
        for tier, count in parts:
            tokens[tier] += count
            nbytes[tier] += self._copied_bytes(tier)
        self.requests.append(Reused(found, _per_tier(tokens), prompt - tokens.total(), _per_tier(nbytes), declined))

    def moved(self, tiers: Iterable[Tier]) -> None:
        """Note where the pages of a batch came from."""
        self.pages.update(tiers)

    def _copied_bytes(self, tier: Tier) -> int:
        return 0 if tier is Tier.vram else self.page_bytes

    def facts(self, disk: Mapping[str, int] | None) -> dict[str, Any]:
        """With the disk's own counters, None without one."""
        counters = disk or {}
        restored = {str(tier): sum(r.restored_tokens[tier] for r in self.requests) for tier in Tier}
        computed = sum(r.computed_tokens for r in self.requests)
        prompt = sum(restored.values()) + computed
        return {
            "restored_tokens": restored,
            "computed_tokens": computed,
            "hit_rate": sum(restored.values()) / prompt if prompt else None,
            "restored_bytes": _per_tier({tier: count * self._copied_bytes(tier) for tier, count in self.pages.items()}),
            "page_bytes": self.page_bytes,
            "restore_s": self.restore_s,
            "capture_s": self.capture_s,
            "declined_requests": sum(r.declined for r in self.requests),
            "pages_captured": self.captured,
            "pages_demoted": self.demoted,
            "pages_written": counters.get("written", 0),
            "pages_skipped": self.skipped + sum(n for name, n in counters.items() if name.startswith("skipped")),
            "failures": self.failed_checks + sum(n for name, n in counters.items() if name.startswith("failed")),
            "requests": [asdict(r) for r in self.requests],
            "disk": disk,
        }


def told(facts: Mapping[str, Any]) -> str:
    """``facts`` in one line."""
    restored = facts["restored_tokens"]
    prompt = sum(restored.values()) + facts["computed_tokens"]
    text = (
        f"KV reuse: {sum(restored.values())} of {prompt} prompt tokens restored ({facts['hit_rate'] or 0:.1%}), {facts['computed_tokens']}"
        f" computed; {restored['vram']} from VRAM, {restored['dram']} from DRAM, {restored['ssd']} from disk in {facts['restore_s']:.3g} s;"
        f" {facts['pages_written']} pages written, {facts['pages_skipped']} skipped, {facts['failures']} failed"
    )
    declined = facts["declined_requests"]
    return f"{text}; {declined} requests computed what was there: predicted to be faster" if declined else text


def _per_tier(counts: Mapping[Tier, int]) -> PerTier:
    return {str(tier): counts.get(tier, 0) for tier in Tier}
