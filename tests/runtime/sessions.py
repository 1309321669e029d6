"""Sessions of plans made by hand, on a card that a test plays."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.run_schema import CpuProduct
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.session import Session
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.memory.ground import OpenCard

CPU = torch.device("cpu")


def opened(
    plan: Plan, checkpoint: Path, copier: CopyDevice | None = None, device: torch.device = CPU, **options: Any
) -> AbstractContextManager[Session]:
    """``checkpoint`` by ``plan``, not loaded. ``copier`` is None for two tiers; ``options`` are those of the engine; unless they say
    otherwise, the CPU decodes coded matrices first, to the bits of the unstreamed model."""
    return open_session(plan, checkpoint, OpenCard(copier, device), EngineOptions(**{"cpu_product": CpuProduct.decode} | options))
