"""What a motor tells of itself while it works, and at its end: predicted beside measured.

Keys of ``Vital.stats``:

* ``rows``, ``waiting``; ``pages`` with ``total``, ``used``, ``kept``;
* ``tokens_per_s`` (of replies) and ``prompt_tokens_per_s`` since the last vital;
* ``pass``: of the last one ``rows``, ``context``, ``prompt_tokens``, ``before``, ``seconds`` and ``predicted_s``; null where none was;
* ``idle_share``: of the seconds since the last vital in which there was work, those between passes;
* ``binds``: the stage that was busy longest; ``busy``: stage -> share of the seconds;
* ``tiers``: tier -> ``bytes`` planned and ``limit_bytes``;
* ``totals``: the fields of ``Totals``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.session import Session

EVERY_S = 1.0


@dataclass(frozen=True)
class PassShape:
    """What one pass carried."""

    rows: int
    """That decode."""
    context: float
    """Their tokens, on average."""
    prompt_tokens: int
    before: float
    """Tokens that a prompt token follows, on average."""


@dataclass
class Totals:
    """Since the start."""

    requests: int = 0
    tokens: int = 0
    """Of replies."""
    prompt_tokens: int = 0
    """That were computed."""
    restored_tokens: int = 0
    passes: int = 0
    pass_s: float = 0.0
    idle_s: float = 0.0
    """Between passes while there was work."""
    given_up: int = 0
    """Rows whose pages others needed."""
    refused: int = 0
    errors: int = 0
    compared: int = 0
    """Passes whose seconds were predicted, too."""
    compared_s: float = 0.0
    compared_predicted_s: float = 0.0


@dataclass
class _Since:
    """Counters at the last vital."""

    at_s: float = field(default_factory=time.perf_counter)
    totals: Totals = field(default_factory=Totals)
    busy: Mapping[str, float] = field(default_factory=dict)


class Vitals:
    """``predicted_s`` says how long a pass takes by the plan; asked once a vital, since it may cost milliseconds."""

    def __init__(self, session: Session, predicted_s: Callable[[PassShape], float | None]):
        self._session, self._predicted_s = session, predicted_s
        self.totals = Totals()
        self._last: tuple[PassShape, float] | None = None
        self._since = _Since(busy=self._busy())
        self._begun = time.perf_counter()
        self._work_s = 0.0

    def passed(self, shape: PassShape, seconds: float, idle_s: float) -> None:
        """A pass is over, that began ``idle_s`` after the last one or after work came."""
        self._last = shape, seconds
        self.totals.passes += 1
        self.totals.pass_s += seconds
        self.totals.idle_s += idle_s
        self.totals.prompt_tokens += shape.prompt_tokens

    @property
    def due(self) -> bool:
        """Whether a second has gone by."""
        return time.perf_counter() - self._since.at_s >= EVERY_S

    def take(self, rows: int, waiting: int, pages: Mapping[str, int]) -> dict[str, Any]:
        """What happened since the last one."""
        before, now = self._since, _Since(totals=Totals(**vars(self.totals)), busy=self._busy())
        self._since = now
        seconds = now.at_s - before.at_s
        pass_s, idle_s = now.totals.pass_s - before.totals.pass_s, now.totals.idle_s - before.totals.idle_s
        busy = {stage: max(0.0, s - before.busy.get(stage, 0.0)) / seconds for stage, s in now.busy.items()} if seconds else {}
        return {
            "rows": rows,
            "waiting": waiting,
            "pages": dict(pages),
            "tokens_per_s": (now.totals.tokens - before.totals.tokens) / seconds if seconds else 0.0,
            "prompt_tokens_per_s": (now.totals.prompt_tokens - before.totals.prompt_tokens) / seconds if seconds else 0.0,
            "pass": self._compared() if now.totals.passes > before.totals.passes else None,
            "idle_share": idle_s / (pass_s + idle_s) if pass_s + idle_s else 0.0,
            "binds": max(busy, key=busy.__getitem__) if any(busy.values()) else None,
            "busy": busy,
            "tiers": tiers(self._session.plan),
            "totals": asdict(now.totals),
        }

    def report(self) -> dict[str, Any]:
        """At the end, after the last pass."""
        totals, plan = self.totals, self._session.plan
        predicted = totals.compared_predicted_s / totals.compared if totals.compared else None
        measured = totals.compared_s / totals.compared if totals.compared else None
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

    def _compared(self) -> dict[str, Any] | None:
        if self._last is None:
            return None
        shape, seconds = self._last
        predicted = self._predicted_s(shape)
        if predicted is not None:
            self.totals.compared += 1
            self.totals.compared_s += seconds
            self.totals.compared_predicted_s += predicted
        return asdict(shape) | {"seconds": seconds, "predicted_s": predicted}


def tiers(plan: Plan) -> dict[str, dict[str, int]]:
    """Tier -> bytes that the plan takes, and the machine's."""
    made, machine = plan.prediction, plan.hardware
    found = {"dram": (made.dram_bytes, machine.dram_bytes), "ssd": (made.ssd_bytes, machine.ssd_bytes)}
    if machine.gpu is not None:
        found = {"vram": (made.vram_bytes, machine.vram_bytes)} | found
    return {tier: {"bytes": taken, "limit_bytes": limit} for tier, (taken, limit) in found.items()}
