"""What the reuse of prefixes did, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.planner.common.measures import show_seconds
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
    """Pages that were not, because the next batch wanted their slots."""
    late: int = 0
    """Pages that were not, because the run ended and `kv.flush_s` was over."""
    flush_s: float = 0.0
    """Waited for pages to be copied out, between batches and at the end."""
    declined_s: tuple[float, float] | None = None
    """Predicted of the first batch that left some of what was found: seconds as it was computed, and with all of it."""
    demoted: int = 0
    """Pages that were pushed out of VRAM and copied to DRAM."""
    failed_checks: int = 0
    """Pages in DRAM whose bytes had changed."""

    _folded: Reused = field(default_factory=lambda: Reused(0, _per_tier({}), 0, _per_tier({}), False))
    """Sums over requests that are no more in ``requests``."""
    _folded_declined: int = 0

    def fold(self) -> None:
        """Keep sums alone of the requests so far."""
        every = self._every()
        self._folded_declined += sum(r.declined for r in self.requests)
        self._folded = Reused(
            sum(r.found_tokens for r in every),
            {str(tier): sum(r.restored_tokens[tier] for r in every) for tier in Tier},
            sum(r.computed_tokens for r in every),
            {str(tier): sum(r.restored_bytes[tier] for r in every) for tier in Tier},
            False,
        )
        self.requests.clear()

    def _every(self) -> list[Reused]:
        return [self._folded, *self.requests]

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
        every = self._every()
        restored = {str(tier): sum(r.restored_tokens[tier] for r in every) for tier in Tier}
        computed = sum(r.computed_tokens for r in every)
        prompt = sum(restored.values()) + computed
        found = sum(r.found_tokens for r in every)
        kept = counters.get("written", 0) + counters.get("already_there", 0)
        not_kept = {"slots": self.skipped, "late": self.late + counters.get("skipped_late", 0)}
        not_kept |= {"full": counters.get("skipped_disk_full", 0), "error": counters.get("skipped_write_error", 0)}
        not_kept["queue"] = counters.get("skipped_queue_full", 0)
        return {
            "found_tokens": found,
            "declined_tokens": found - sum(restored.values()),
            "declined_s": self.declined_s,
            "kept_pages": kept,
            "not_kept_pages": not_kept,
            "flush_s": self.flush_s,
            "restored_tokens": restored,
            "computed_tokens": computed,
            "hit_rate": sum(restored.values()) / prompt if prompt else None,
            "restored_bytes": _per_tier({tier: count * self._copied_bytes(tier) for tier, count in self.pages.items()}),
            "page_bytes": self.page_bytes,
            "restore_s": self.restore_s,
            "capture_s": self.capture_s,
            "declined_requests": self._folded_declined + sum(r.declined for r in self.requests),
            "pages_captured": self.captured,
            "pages_demoted": self.demoted,
            "pages_written": counters.get("written", 0),
            "pages_skipped": sum(not_kept.values()),
            "failures": self.failed_checks + sum(n for name, n in counters.items() if name.startswith("failed")),
            "requests": [asdict(r) for r in self.requests],
            "disk": disk,
        }


WHY_NOT = {
    "slots": "the next batch took their memory",
    "late": "kv.flush_s was over",
    "full": "the disk is full",
    "error": "the disk failed",
    "queue": "the disk's queue was full",
}
"""Why a page was not kept, for people."""


def told(facts: Mapping[str, Any]) -> list[str]:
    """``facts`` in a line of what was there, and, of a directory, one of what is there for the next run."""
    restored, found = facts["restored_tokens"], facts["found_tokens"]
    brought = sum(restored.values())
    prompt = brought + facts["computed_tokens"]
    lines = [
        f"KV reuse: {brought} of {prompt} prompt tokens restored ({facts['hit_rate'] or 0:.1%}), {facts['computed_tokens']} computed;"
        f" {found} found: {restored['vram']} from VRAM, {restored['dram']} from DRAM, {restored['ssd']} from disk in"
        f" {show_seconds(facts['restore_s'])}, {facts['declined_tokens']} declined"
    ]
    if facts["declined_s"]:
        chosen, everything = map(show_seconds, facts["declined_s"])
        lines[0] += f": with them a prefill is predicted to take {everything}, without them {chosen}"
    if facts["failures"]:
        lines[0] += f"; {facts['failures']} pages failed their check"
    if facts["disk"] is not None:
        tokens = facts["page_tokens"]
        left = [f"{count * tokens} not: {WHY_NOT[why]}" for why, count in facts["not_kept_pages"].items() if count]
        there = facts["kept_pages"] - facts["pages_written"]
        kept = f"KV kept: {facts['kept_pages'] * tokens} tokens ({facts['pages_written']} pages written, {there} were there)"
        lines.append("; ".join([kept, *left]))
    return lines


def _per_tier(counts: Mapping[Tier, int]) -> PerTier:
    return {str(tier): counts.get(tier, 0) for tier in Tier}
