"""The one list of coded formats that the runtime computes with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.fp8 import Fp8
from penstock.runtime.formats.mxfp4 import Mxfp4
from penstock.runtime.formats.nvfp4 import Nvfp4

CODINGS: Mapping[str, Coding] = MappingProxyType(
    {
        "FP8": Fp8((128, 128)),
        "FP8-row": Fp8((1, 0)),
        "FP8-tensor": Fp8((0, 0)),
        "MXFP4": Mxfp4(),
        "NVFP4": Nvfp4(),
    }
)
"""By the names of ``planner.contract.given.formats``, of all that run."""
