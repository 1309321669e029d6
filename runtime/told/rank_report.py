"""What one rank says of itself when a run is over."""

from __future__ import annotations

import os
from typing import Any

from penstock.runtime.engine.session import Session
from penstock.runtime.told.stage_clock import StageClock


def rank_report(session: Session, clock: StageClock) -> dict[str, Any]:
    """Stages by phase as in the report, hops since the rank was opened, memory in bytes."""
    engine, rank = session.engine, session.rank
    return {
        "rank": 0 if rank is None else rank.number,
        "process": os.getpid(),
        "device": str(engine.device),
        "layers": session.own.model.layers,
        "part_tokens": session.own.decisions.prefill_part_tokens,
        "stages": clock.as_json(),
        "waited_s": {phase: {stage: use.waited_s for stage, use in stages.items()} for phase, stages in clock.phases.items()},
        "seconds": clock.seconds,
        "hops": None if rank is None else rank.hops.facts(),
        "experts": None if engine.experts is None else engine.experts.facts(),
        "graphs": engine.recording.facts(),
        "prompts": engine.prompts.facts(),
        "launching": engine.launching_facts,
        "handed": engine.handed_facts,
        "kv_reuse": session.kept_facts(),
        "arena_bytes": engine.arena.nbytes,
        "page_locked_bytes": engine.arena.locked_bytes,
        "dram_bytes": session.peak_dram_bytes,
        "vram_bytes": session.vram.peak_bytes(),
    }
