"""The one list of coded formats that the runtime computes with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.planner.contract.given.formats import BITS, GROUPS
from penstock.runtime.formats.awq import Awq
from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.fp8 import Fp8
from penstock.runtime.formats.gguf.gguf_blocks import UNPACK, GgufBlocks
from penstock.runtime.formats.gguf.plain_rows import PlainRows
from penstock.runtime.formats.gptq import Gptq
from penstock.runtime.formats.mxfp4 import Mxfp4
from penstock.runtime.formats.nvfp4 import Nvfp4
from penstock.runtime.formats.pack_quantized import PackQuantized
from penstock.runtime.formats.twelve.lossless import Lossless

_SIZES = (0, *GROUPS)

_ALL: dict[str, Coding] = {
    "FP8": Fp8((128, 128)),
    "FP8-row": Fp8((1, 0)),
    "FP8-tensor": Fp8((0, 0)),
    "MXFP4": Mxfp4(),
    "lossless": Lossless(),
    "NVFP4": Nvfp4(),
    **{name: GgufBlocks(name) for name in UNPACK},
    **dict.fromkeys(("BF16", "F16", "F32"), PlainRows()),
    **{f"INT{b}-{g or 'row'}{kind}": PackQuantized(b) for b in BITS for g in _SIZES for kind in ("", "-asym")},
    **{f"GPTQ{b}-{g or 'row'}": Gptq(b, g) for b in BITS for g in _SIZES},
    **{f"GPTQ{b}-{g}-order": Gptq(b, g) for b in BITS for g in GROUPS},
    **{f"AWQ-{g or 'row'}": Awq() for g in _SIZES},
}
CODINGS: Mapping[str, Coding] = MappingProxyType(_ALL)
"""By the names of ``planner.contract.given.formats``, of all that run."""
