"""A prompt's layers recorded around attention say what launched ones say."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.prompt_graphs import rows
from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.engine.passes.generate import Batch
from tests.runtime.ranks.played_graphs import Pieces
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")


def test_recorded_layers_say_what_launched_ones_say(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path, "llama")
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(6, 6, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0), gpu=True)
    with opened(plan, checkpoint, HostCopier(), CPU) as session:
        session.load(Batch([[5] * 24], 4, 1 << 20))
        for tokens, behind in ((8, 0), (5, 11)):
            launched, recorded = rows(session, lambda: Pieces(CPU), tokens, behind, passes=2)
            assert launched.what.startswith("launched, host") and recorded.what.startswith("recorded, host")
            assert float(recorded.what.rpartition(" ")[2]) < 0.01
