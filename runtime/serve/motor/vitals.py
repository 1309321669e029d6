"""What a motor tells of itself while it works, and at its end: predicted beside measured.

Keys of ``Vital.stats``; one that is not known is left out:

* ``rows``, ``rows_limit``, ``waiting``, ``queue_limit``: now; ``pages``, ``pages_used``, ``pages_kept``, ``page_tokens``: of the pool;
* of the last pass ``pass_tokens``, ``prompt_tokens``, ``decode_rows``, ``pass_s``, ``predicted_pass_s``; ``pass_tokens_limit``;
* since the last vital ``tokens_per_s`` (of replies), ``predicted_tokens_per_s`` (of passes like the last), ``prompt_tokens_per_s``;
  ``idle_share``: of the seconds in which there was work, those between passes; ``busy``: stage -> share of the seconds; ``binds``: the
  stage that was busy longest;
* since the start ``requests``, ``passes``, ``generated_tokens``, ``prompt_tokens_total`` (computed), ``restored_tokens``, ``preempted``
  (rows), ``drafted_tokens``, ``accepted_tokens``, ``draft_s`` (drafting, and reading for it: a part of ``busy_s``), ``idle_s``, ``busy_s``;
* ``kinds``: ``decode`` or ``prompt`` (passes with any of one) -> since the start ``passes``, ``seconds``, ``predicted_s``, ``longest_s``;
* ``tiers``: tier -> ``capacity`` and bytes by item, as the plan has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import dram_use, ssd_use, vram_use
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.runtime.engine.session import Session

EVERY_S = 1.0


@dataclass
class Passes:
    """Of one kind, since the start."""

    passes: int = 0
    seconds: float = 0.0
    predicted_s: float = 0.0
    longest_s: float = 0.0


@dataclass
class Totals:
    """Since the start."""

    requests: int = 0
    tokens: int = 0
    """Of replies."""
    prompt_tokens: int = 0
    """That were computed."""
    restored_tokens: int = 0
    drafted: int = 0
    """Tokens that passes verified."""
    kept: int = 0
    """Of these."""
    draft_s: float = 0.0
    """Of drafting, and of reading for it."""
    passes: int = 0
    pass_s: float = 0.0
    idle_s: float = 0.0
    """Between passes while there was work."""
    given_up: int = 0
    """Rows whose pages others needed."""
    refused: int = 0
    errors: int = 0
    kinds: dict[str, Passes] = field(default_factory=lambda: {"decode": Passes(), "prompt": Passes()})
    """Those that carry no token of a prompt, and those that do: measured beside predicted."""


@dataclass
class _Since:
    """Counters at the last vital."""

    at_s: float = field(default_factory=time.perf_counter)
    totals: Totals = field(default_factory=Totals)
    busy: Mapping[str, float] = field(default_factory=dict)


class Vitals:
    """``predicted_s`` says how long a pass takes by the plan: a tenth of a millisecond, 0.3 with routed experts."""

    def __init__(self, session: Session, limits: ServeLimits, predicted_s: Callable[[MixedPass], float]):
        self._session, self._limits, self._predicted_s = session, limits, predicted_s
        self._tiers = tiers(session.own)
        self.totals = Totals()
        self._expected_s = 0.0
        self._last: tuple[MixedPass, int, float, float] | None = None
        self._since = _Since(busy=self._busy())
        self._begun = time.perf_counter()
        self._work_s = 0.0

    def expect(self, shape: MixedPass) -> None:
        """Such a pass is under way: it is predicted while a card computes it."""
        self._expected_s = self._predicted_s(shape)

    def passed(self, shape: MixedPass, gave: int, seconds: float, idle_s: float) -> None:
        """A pass that was expected is over. It began ``idle_s`` after the last one or after work came, and gave rows that decode ``gave``
        tokens."""
        self._last = shape, gave, seconds, self._expected_s
        kind = self.totals.kinds["prompt" if shape.tokens else "decode"]
        kind.passes += 1
        kind.seconds += seconds
        kind.predicted_s += self._expected_s
        kind.longest_s = max(kind.longest_s, seconds)
        self.totals.passes += 1
        self.totals.pass_s += seconds
        self.totals.idle_s += idle_s
        self.totals.prompt_tokens += shape.tokens

    @property
    def due(self) -> bool:
        """Whether a second has gone by."""
        return time.perf_counter() - self._since.at_s >= EVERY_S

    def take(self, rows: int, waiting: int, pages_used: int, pages_kept: int) -> dict[str, Any]:
        """What happened since the last one."""
        before, limits = self._since, self._limits
        last = self._last_pass() if self.totals.passes > before.totals.passes else {}
        now = _Since(totals=Totals(**vars(self.totals)), busy=self._busy())
        self._since = now
        seconds = now.at_s - before.at_s
        pass_s, idle_s = now.totals.pass_s - before.totals.pass_s, now.totals.idle_s - before.totals.idle_s
        busy = {stage: max(0.0, s - before.busy.get(stage, 0.0)) / seconds for stage, s in now.busy.items()} if seconds else {}
        totals = now.totals
        return {
            "rows": rows,
            "rows_limit": limits.rows,
            "waiting": waiting,
            "queue_limit": limits.queue,
            "pages": limits.pages,
            "pages_used": pages_used,
            "pages_kept": pages_kept,
            "page_tokens": limits.page_tokens,
            "pass_tokens_limit": limits.pass_tokens,
            "tokens_per_s": (totals.tokens - before.totals.tokens) / seconds if seconds else 0.0,
            "prompt_tokens_per_s": (totals.prompt_tokens - before.totals.prompt_tokens) / seconds if seconds else 0.0,
            "idle_share": idle_s / (pass_s + idle_s) if pass_s + idle_s else 0.0,
            "busy": busy,
            "requests": totals.requests,
            "passes": totals.passes,
            "generated_tokens": totals.tokens,
            "prompt_tokens_total": totals.prompt_tokens,
            "restored_tokens": totals.restored_tokens,
            "preempted": totals.given_up,
            "drafted_tokens": totals.drafted,
            "accepted_tokens": totals.kept,
            "draft_s": totals.draft_s,
            "idle_s": totals.idle_s,
            "busy_s": totals.pass_s,
            "kinds": {name: asdict(kind) for name, kind in totals.kinds.items() if kind.passes},
            "tiers": self._tiers,
            **({"binds": max(busy, key=busy.__getitem__)} if any(busy.values()) else {}),
            **last,
        }

    def report(self) -> dict[str, Any]:
        """At the end, after the last pass."""
        totals, plan = self.totals, self._session.plan
        predicted_s = sum(kind.predicted_s for kind in totals.kinds.values())
        predicted, measured = (s / totals.passes if totals.passes else None for s in (predicted_s, totals.pass_s))
        return {
            "seconds": time.perf_counter() - self._begun,
            "totals": asdict(totals),
            "predicted": {
                "pass_s": predicted,
                "tokens_per_s": plan.prediction.decode_tokens_per_s,
                "dram_bytes": plan.prediction.dram_bytes,
                "vram_bytes": plan.prediction.vram_bytes,
            },
            "measured": {
                "pass_s": measured,
                "tokens_per_s": totals.tokens / totals.pass_s if totals.pass_s else None,
                "dram_bytes": self._session.peak_dram_bytes,
                "vram_bytes": self._session.vram.peak_bytes(),
            },
            "ratio": {"pass_s": predicted / measured if predicted and measured else None},
            "kv_reuse": self._session.kept_facts(),
        }

    def _busy(self) -> dict[str, float]:
        return {stage: busy_s for stage, (_, busy_s) in self._session.engine.stage_totals().items()}

    def _last_pass(self) -> dict[str, Any]:
        if self._last is None:
            return {}
        shape, gave, seconds, predicted = self._last
        return {
            "pass_tokens": shape.all_tokens,
            "prompt_tokens": shape.tokens,
            "decode_rows": shape.rows,
            "pass_s": seconds,
            "predicted_pass_s": predicted,
            "predicted_tokens_per_s": gave / predicted,
        }


def tiers(plan: Plan) -> dict[str, dict[str, int]]:
    """Tier -> the machine's ``capacity``, and bytes that the plan takes, by item."""
    asked = plan.hardware, plan.model, plan.workload, plan.decisions
    found = {
        "vram": (plan.hardware.vram_bytes, vram_use(*asked)),
        "dram": (plan.hardware.dram_bytes, dram_use(*asked)),
        "ssd": (plan.hardware.ssd_bytes, ssd_use(*asked)),
    }
    return {tier: {"capacity": capacity} | {item: n for item, n in use.items() if n} for tier, (capacity, use) in found.items() if use}
